"""`GET /openapi.json`: OpenAPI 3.1 of every call, made from the classes that read the bodies and write the answers.

`About` handles the calls that only report: models, health, metrics.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Literal

import orjson
from aiohttp import web
from pydantic import Field, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from areal_agent.errors import RequestError
from areal_agent.gateway.auth import is_loopback
from areal_agent.gateway.bodies import Body, Number
from areal_agent.gateway.chat import ChatRequest, Tokenized, TokenizeRequest
from areal_agent.gateway.completions import CompletionsRequest
from areal_agent.gateway.messages import CountRequest, MessagesRequest, TokenCount
from areal_agent.gateway.metrics import GatewayStats, Metrics
from areal_agent.gateway.online.wire import (
    AcknowledgeRequest,
    DropRequest,
    GatewayStatus,
    LeaseReply,
    LeaseRequest,
    PublishRequest,
    ReturnReply,
    ReturnRequest,
    StateReply,
    StatusRequest,
)
from areal_agent.gateway.order import DEFAULT_MODEL, OrderBody
from areal_agent.gateway.responses import ResponsesRequest
from areal_agent.gateway.rollouts import Callers, EndedSession, ExportedTrajectory, RewardedSession, StartedSession
from areal_agent.gateway.server import ANTHROPIC_PATH, json_reply
from areal_agent.gateway.session import EndRequest, ExportRequest, RewardRequest, StartRequest
from areal_agent.gateway.sessions import Traffic
from areal_agent.types import JsonObject

ANY_MODEL = "*"
"""An alias that stands for every model name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model, as the clients of OpenAI and of Anthropic expect it."""

    id: str
    display_name: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    created: int = 0
    created_at: str = "1970-01-01T00:00:00Z"
    owned_by: str = "areal_agent"


@dataclass(frozen=True, kw_only=True, slots=True)
class Models:
    """The answer of `/v1/models`: the model, then its aliases."""

    object: Literal["list"] = "list"
    data: tuple[Model, ...]
    has_more: bool = False
    first_id: str
    last_id: str


def no_model(name: str, models: Sequence[str]) -> RequestError:
    """Return the error for a request that names another model."""
    return RequestError(
        f"the model {name!r:.200} does not exist; send {' or '.join(map(repr, models))}, or allow it: model_aliases in "
        "/rl/start_session, rollout.model_aliases of a run, --model-alias of a stand-alone gateway",
        status=404,
        param="model",
        code="model_not_found",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """The answer of `/health`."""

    status: Literal["ok", "draining"]
    model: str
    open_sessions: Number
    engine_requests: Number


class About:
    """The handlers of calls that change nothing."""

    def __init__(
        self,
        *,
        models: Sequence[str],
        callers: Callers,
        traffic: Traffic,
        stats: Callable[[], GatewayStats],
        metrics: Metrics,
    ) -> None:
        self._models = models
        self._callers = callers
        self._traffic = traffic
        self._stats = stats
        self._metrics = metrics

    async def models(self, request: web.Request) -> web.Response:
        """List the names of the gateway's one model; any key will do."""
        self._callers.require_any(request)
        names = [name for name in self._models if name not in (DEFAULT_MODEL, ANY_MODEL)]
        data = tuple(Model(id=name, display_name=name) for name in names)
        return json_reply(Models(data=data, first_id=names[0], last_id=names[-1]))

    async def model(self, request: web.Request) -> web.Response:
        """Describe the model by one of its names."""
        self._callers.require_any(request)
        name = request.match_info["model"]
        if name not in self._models and ANY_MODEL not in self._models:
            raise no_model(name, self._models)
        return json_reply(Model(id=name, display_name=name))

    async def root(self, request: web.Request) -> web.Response:
        """Answer clients that ask for the base URL, to see whether it is there."""
        return web.Response(text="areal_agent gateway; GET /openapi.json lists every path\n")

    async def health(self, request: web.Request) -> web.Response:
        """Report the gateway's health. It needs no key: it reveals only the model's name and the load."""
        stats = self._stats()
        return json_reply(
            Health(
                status="draining" if self._traffic.is_draining else "ok",
                model=self._models[0],
                open_sessions=stats.num_open_sessions,
                engine_requests=stats.num_engine_requests,
            )
        )

    async def metrics(self, request: web.Request) -> web.Response:
        """Return the metrics. Callers from other machines need the admin key."""
        if request.transport is None or not is_loopback(request.transport.get_extra_info("peername")):
            self._callers.require_admin(request)
        return web.Response(body=self._metrics.text(), headers={"Content-Type": Metrics.CONTENT_TYPE})


SCHEMAS = "#/components/schemas/"

ERRORS: Mapping[int, str] = {
    400: "The request is invalid; `param` names the place. Also: not HTTP, not JSON, or too long for the context.",
    401: "The API key is missing or unknown.",
    403: "The key is of the wrong kind, the Host is not this gateway's, or the Origin is another one.",
    404: "The model, session or path does not exist.",
    405: "The path does not have this method.",
    408: "The body did not arrive in time.",
    409: "The call conflicts with the state of the session, group or trainer.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "Too many sessions or calls at once; see `Retry-After`.",
    500: "The gateway failed.",
    502: "The engine failed.",
    503: "The engine cannot be reached, or the gateway is closing; see `Retry-After`.",
}
OF_EVERY_CALL = (400, 403, 500)
OF_EVERY_BODY = (408, 413, 415)

ANTHROPIC = "anthropic"
"""Begins the names of errors in Anthropic's form."""

KEYS = {
    "sessionKey": "The key from /rl/start_session. It gives access to that session only.",
    "adminKey": "The key that the gateway was started with.",
    "anyKey": "A session's key or the admin key.",
}

EVENT: JsonSchemaValue = {
    "type": "object",
    "properties": {"data": {"type": "string", "description": "A chunk as JSON, an error object, or [DONE]."}},
    "required": ["data"],
}
"""One server-sent event."""


# ------------------------------------------------------- answers that the endpoints write in more than one form


FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerMessage:
    """The model's message, with `tool_calls` and `reasoning_content` where there are any."""

    role: Literal["assistant"]
    content: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatChoice:
    """One answer."""

    index: Number
    message: AnswerMessage
    finish_reason: FinishReason
    logprobs: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionChoice:
    """One answer."""

    index: Number
    text: str
    finish_reason: FinishReason
    logprobs: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """The number of tokens that a call used."""

    prompt_tokens: Number
    completion_tokens: Number
    total_tokens: Number


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatCompletion:
    """The answers to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: Annotated[list[ChatChoice], Field(min_length=1)]
    usage: Usage


@dataclass(frozen=True, kw_only=True, slots=True)
class TextCompletion:
    """The answers to plain prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: Annotated[list[CompletionChoice], Field(min_length=1)]
    usage: Usage


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageUsage:
    """The number of tokens that a message used."""

    input_tokens: Number
    cache_read_input_tokens: Number
    cache_creation_input_tokens: Number
    output_tokens: Number


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageAnswer:
    """Anthropic's message object; `content` has blocks of type `thinking`, `text` and `tool_use`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[JsonObject]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """A response; `output` has items of type `reasoning`, `message`, `function_call` and `custom_tool_call`."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[JsonObject]
    usage: JsonObject | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """The details of an error."""

    message: Annotated[str, Field(min_length=1)]
    type: Annotated[str, Field(min_length=1)]
    param: str | None
    code: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Error:
    """OpenAI's error object."""

    error: Fault


@dataclass(frozen=True, kw_only=True, slots=True)
class AnthropicError:
    """Anthropic's error object, with `param` and `code` as in OpenAI's."""

    type: Literal["error"]
    error: Fault


# ---------------------------------------------------------------------------------------------------- the calls


@dataclass(frozen=True, slots=True)
class Call:
    """One operation. `body` is the class that reads its body and `answer` the class of its answer."""

    path: str
    name: str
    summary: str
    body: type[Body] | None  # None: the call has none
    answer: Any
    key: str | None  # the security scheme that it requires
    errors: Sequence[int]
    method: str = ""  # default: post with a body, else get


# fmt: off
CALLS = (
    Call("/v1/chat/completions", "createChatCompletion",
         "Sample one turn. With `stream`, the answer is server-sent `chat.completion.chunk` events, then `[DONE]`.",
         ChatRequest, ChatCompletion, "sessionKey", (404, 409, 429, 502, 503)),
    Call("/v1/completions", "createCompletion", "Sample without a chat template; a prompt is text or ids.",
         CompletionsRequest, TextCompletion, "sessionKey", (404, 409, 429, 502, 503)),
    Call("/v1/messages", "createMessage",
         "Sample one turn, in Anthropic's form. With `stream`, the answer is Anthropic's server-sent events.",
         MessagesRequest, MessageAnswer, "sessionKey", (404, 409, 429, 502, 503)),
    Call("/v1/messages/count_tokens", "countTokens", "Count the tokens of a prompt. Nothing is recorded.",
         CountRequest, TokenCount, "sessionKey", (404, 409, 429)),
    Call("/v1/responses", "createResponse",
         "Sample one turn. With `stream`, the answer is server-sent events named by their `type`.",
         ResponsesRequest, Response, "sessionKey", (404, 409, 429, 502, 503)),
    Call("/v1/responses/{response_id}", "retrieveResponse", "Fetch a response of this session that was stored.",
         None, Response, "sessionKey", (404, 409, 429)),
    Call("/v1/responses/{response_id}/cancel", "cancelResponse", "Stop a response that is in progress.",
         None, Response, "sessionKey", (404, 409, 429), "post"),
    Call("/v1/models", "listModels", "List the gateway's one model.",
         None, Models, "anyKey", ()),
    Call("/v1/models/{model}", "retrieveModel", "Describe the model by one of its names.",
         None, Model, "anyKey", (404,)),
    Call("/v1/tokenize", "tokenize", "Return the token ids of a prompt or of messages. Nothing is recorded.",
         TokenizeRequest, Tokenized, "sessionKey", (404, 409, 429)),
    Call("/", "root", "Answer clients that check the base URL.",
         None, str, None, ()),
    Call("/health", "health", "Report whether the gateway serves, and its load.",
         None, Health, None, ()),
    Call("/metrics", "metrics", "Counters in Prometheus' text format. Other machines need the admin key.",
         None, str, None, (401,)),
    Call("/openapi.json", "describe", "This description.",
         None, JsonObject, None, ()),
    Call("/rl/start_session", "startSession", "Start a rollout; returns its key and its URLs.",
         StartRequest, StartedSession, "adminKey", (409, 429, 503)),
    Call("/rl/set_reward", "setReward",
         "Reward the session, one completion (`interaction_id`), or a named part for metrics (`name`).",
         RewardRequest, RewardedSession, "sessionKey", (404, 409, 429)),
    Call("/rl/end_session", "endSession",
         "End the session: calls in flight are aborted, their partial answers kept. May be repeated.",
         EndRequest, EndedSession, "sessionKey", (404, 409, 429)),
    Call("/export_trajectories", "exportTrajectories", "Export an ended session and its training records.",
         ExportRequest, ExportedTrajectory, "adminKey", (404, 409)),
)
TRAINER_CALLS = (
    Call("/rl/publish", "publish", "Announce the weight version that serves now.",
         PublishRequest, StateReply, "adminKey", (404, 409)),
    Call("/rl/lease", "lease", "Lease whole groups for a train step, within the staleness bound.",
         LeaseRequest, LeaseReply, "adminKey", (404, 409)),
    Call("/rl/acknowledge", "acknowledge", "Report a checkpoint: what was leased up to its step is trained.",
         AcknowledgeRequest, StateReply, "adminKey", (404, 409)),
    Call("/rl/return", "return", "Resume from an earlier step: what was leased for later ones waits again.",
         ReturnRequest, ReturnReply, "adminKey", (404, 409)),
    Call("/rl/drop", "drop", "Drop sessions: they will not be trained.",
         DropRequest, StateReply, "adminKey", (404, 409)),
    Call("/rl/status", "status", "Report the gateway's groups and counters.",
         StatusRequest, GatewayStatus, "adminKey", (404, 409)),
)
# fmt: on


# ------------------------------------------------------------------------------------------------- the document


def openapi_document(*, is_leased_from: bool) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document; with `is_leased_from` it includes the calls of a trainer.

    Every path under `/v1` is also served without that prefix, for clients that leave it out.
    """
    calls = CALLS + (TRAINER_CALLS if is_leased_from else ())
    bodies = [(call.name, "validation", TypeAdapter(call.body)) for call in calls if call.body is not None]
    answers = [(call.name, "serialization", TypeAdapter(call.answer)) for call in calls]
    schemas, definitions = TypeAdapter.json_schemas(
        [
            *bodies,
            *answers,
            ("", "serialization", TypeAdapter(Error)),  # type: ignore[list-item]
            (ANTHROPIC, "serialization", TypeAdapter(AnthropicError)),  # type: ignore[list-item]
        ],
        ref_template=SCHEMAS + "{model}",
        schema_generator=_Schemas,
    )
    paths: dict[str, Any] = {}
    for call in calls:
        operation = _operation(call, schemas)
        method = call.method or ("get" if call.body is None else "post")
        paths.setdefault(call.path, {})[method] = operation
        if call.path.startswith("/v1/"):
            short = operation | {"operationId": f"{call.name}Short"}
            paths.setdefault(call.path.removeprefix("/v1"), {})[method] = short
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "areal_agent gateway",
            "version": "1",
            "description": "OpenAI's and Anthropic's API for one model, recording every token, and the calls that "
            "start, reward and end sessions. A key may also be sent in the header `api-key` or `x-api-key`. Every "
            "error is OpenAI's error object, and Anthropic's under /v1/messages.",
        },
        "paths": paths,
        "components": {
            "schemas": {name: _without_example(schema) for name, schema in definitions["$defs"].items()},
            "responses": {
                f"{form}{status}": _error_response(status, why, schemas[form, "serialization"])
                for form in ("", ANTHROPIC)
                for status, why in ERRORS.items()
            },
            "securitySchemes": {
                name: {"type": "http", "scheme": "bearer", "description": text} for name, text in KEYS.items()
            },
        },
    }


@cache
def openapi_json(*, is_leased_from: bool) -> bytes:
    """Return the document as it is served."""
    return orjson.dumps(openapi_document(is_leased_from=is_leased_from))


class _Schemas(GenerateJsonSchema):
    """Generates schemas: optional fields of a body may be null (`Body` drops nulls); an answer has all fields."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def field_is_required(self, field: Any, total: bool) -> bool:
        return self.mode == "serialization" or super().field_is_required(field, total)

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        inner, default = self.generate_inner(schema["schema"]), schema.get("default")
        if self.mode == "serialization" or _takes_null(inner):
            return inner
        described: dict[str, Any] = {"anyOf": [inner, {"type": "null"}]}
        if isinstance(default, str | int | float):
            described["default"] = str(default) if isinstance(default, StrEnum) else default
        return described


def _takes_null(schema: JsonSchemaValue) -> bool:
    is_any = not schema.keys() & {"type", "$ref", "oneOf", "anyOf", "const", "enum"}
    return is_any or None in schema.get("enum", ()) or {"type": "null"} in schema.get("anyOf", ())


def _without_example(schema: JsonSchemaValue) -> JsonSchemaValue:
    """Remove the Python example from a class's docstring, which is its description."""
    text = schema.get("description", "")
    return schema | {"description": text.partition("\n\n>>>")[0]} if text else schema


def _operation(call: Call, schemas: Mapping[Any, JsonSchemaValue]) -> dict[str, Any]:
    statuses = {*OF_EVERY_CALL, *call.errors}
    if call.key is not None:
        statuses.add(401)
    if call.body is not None:
        statuses.update(OF_EVERY_BODY)
    form = ANTHROPIC if ANTHROPIC_PATH.match(call.path) else ""
    answer = schemas[call.name, "serialization"]
    content: dict[str, Any] = {"text/plain" if call.answer is str else "application/json": {"schema": answer}}
    if call.body is not None and issubclass(call.body, OrderBody | MessagesRequest):
        content["text/event-stream"] = {"schema": EVENT}
    described: dict[str, Any] = {
        "operationId": call.name,
        "summary": call.summary,
        "security": [] if call.key is None else [{call.key: []}],
        "responses": {
            "200": {"description": "Done.", "content": content},
            **{str(status): {"$ref": f"#/components/responses/{form}{status}"} for status in sorted(statuses)},
        },
    }
    names = re.findall(r"{(\w+)}", call.path)
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if call.body is not None:
        body = schemas[call.name, "validation"]
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return described


def _error_response(status: int, why: str, error: JsonSchemaValue) -> dict[str, Any]:
    response: dict[str, Any] = {"description": why, "content": {"application/json": {"schema": error}}}
    if status in (429, 503):
        response["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}}
    return response
