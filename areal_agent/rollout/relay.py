"""A gateway before an API that knows no tokens, for evaluations: sessions and rewards are as ever.

    workflow ── HTTP ──▶ Relay ── openai's client, its retries ──▶ the URL of `eval.api`
                           └── Journal ──▶ ledger: each call is `api.NUMBER` of what its trajectory logged

Every POST of a session is passed on, for any model name. A call that fails for good makes its rollout `infra`, whatever
the workflow makes of it; an API that refuses the key, or lacks the model, fails them all. Neither workflows nor the
ledger get the API's key.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self, cast

import httpx
import openai
import orjson
from aiohttp import web

from areal_agent.errors import ArealAgentError, ConfigError, RequestError
from areal_agent.gateway.auth import caller_hashes, key_hash, new_key, without_key
from areal_agent.gateway.bodies import BodyReader, Limits
from areal_agent.gateway.metrics import Counters, GatewayStats
from areal_agent.gateway.server import json_reply, serve_app
from areal_agent.gateway.session import EndRequest, RewardRequest, StartRequest, outcome_of, with_reward
from areal_agent.process import hide_keys, time_of_day_s
from areal_agent.protocols import Journal
from areal_agent.rollout.config import OtherModel
from areal_agent.rollout.local import LocalRollouts, RunnerSettings, open_runner
from areal_agent.rollout.models import OtherClient, OtherModels, open_models
from areal_agent.rollout.workflow import Workflow
from areal_agent.types import JsonObject, Rewards, SessionRecord, Status, Trajectory

API = "api"
MAX_TOKENS = {
    **dict.fromkeys(("chat/completions", "completions", "messages"), "max_tokens"),
    "responses": "max_output_tokens",
}
"""The name of the limit of an answer, by path."""
NEWER = "max_completion_tokens"
OVERRIDDEN = (
    *("temperature", "top_p", "top_k", "min_p", "logit_bias"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
ENDS = ("finish_reason", "stop_reason", "status")
CUT_OFF = ("length", "max_tokens", "incomplete")
"""What the APIs say of an answer that reached its limit."""
REFUSED = {401: "does not take the key", 402: "wants to be paid", 404: "does not have this model, or not this call"}
"""Answers to a call for an answer that every later one would get, too."""
FAILED = (401, 402, 403, 408, 409, 429)


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiUse:
    """The answers of an API in one trajectory, as far as it says."""

    ids: frozenset[str]
    num_answers: int
    num_tokens: int  # generated, by its `usage`
    is_truncated: bool  # the last one

    @classmethod
    def of(cls, logged: JsonObject) -> Self:
        """Read what a relay logged.

        >>> ApiUse.of({"api.1": {"status": 200, "answer": {"id": "c", "usage": {"completion_tokens": 7}}}}).num_tokens
        7
        """
        calls = [one for one in _calls(logged) if one.get("status") == 200 and "error" not in one]
        answers = [list(_objects(one.get("answer"))) for one in calls]
        usages = [[one["usage"] for one in objects if isinstance(one.get("usage"), dict)] for objects in answers]
        tokens = [[one.get("completion_tokens") or one.get("output_tokens") for one in given] for given in usages]
        last = answers[-1] if answers else []
        choices = [one["choices"] for one in last if isinstance(one.get("choices"), list)]
        parts = [*last, *(one for given in choices for one in given if isinstance(one, dict))]
        return cls(
            ids=frozenset(one["id"] for objects in answers for one in objects if isinstance(one.get("id"), str)),
            num_answers=len(calls),
            num_tokens=sum(max((one for one in given if isinstance(one, int)), default=0) for given in tokens),
            is_truncated=any(part.get(name) in CUT_OFF for part in parts for name in ENDS),
        )


def _calls(logged: JsonObject) -> list[dict[str, Any]]:
    return [one for name, one in logged.items() if name.startswith(f"{API}.") and isinstance(one, dict)]


def _failure(logged: JsonObject) -> str | None:
    """Return what is wrong with the last answer, or with the last try of an answer that was still awaited."""
    ended = [one for one in _calls(logged) if one.keys() & {"status", "error"}]
    if not ended or ("error" not in ended[-1] and not _has_failed(ended[-1]["status"])):
        return None
    return f"the API failed: {ended[-1].get('error') or ended[-1]['status']}"


def _has_failed(status: int) -> bool:
    return status in FAILED or status >= 500


def _objects(answer: Any) -> Iterator[dict[str, Any]]:
    """Yield the object of an answer; of a stream those of its events, and what these are about."""
    if isinstance(answer, dict):
        yield cast(dict[str, Any], answer)
    for line in answer.splitlines() if isinstance(answer, str) else ():
        with suppress(ValueError):  # not of an event, or [DONE]
            event: Any = orjson.loads(line.removeprefix("data:"))
            parts = (event, *map(event.get, ("response", "message", "delta"))) if isinstance(event, dict) else ()
            yield from (part for part in parts if isinstance(part, dict))


@dataclass(kw_only=True, slots=True)
class _Session:
    record: SessionRecord
    start: StartRequest
    client: OtherClient
    logged: dict[str, Any]
    rewards: Rewards = field(default_factory=Rewards)

    def asked(self, path: str, body: JsonObject) -> dict[str, Any]:
        """Return a body with the run's sampling where it names none, or wherever that is to win."""
        wishes, limit = self.start.sampling, MAX_TOKENS.get(path)
        found = {
            name: value for name, value in body.items() if name not in OVERRIDDEN or not self.start.sampling_override
        }
        if limit is not None:
            found.setdefault("temperature", wishes.temperature)
            if NEWER not in found:
                found.setdefault(limit, wishes.max_tokens)
        return {**found, "model": self.client.model}


class Relay:
    """Made by `open_relayed`. `failing` gets the error of an API that refuses every call."""

    def __init__(self, api: OtherModel, models: OtherModels, journal: Journal, admin_key: str) -> None:
        self.failing: asyncio.Future[ArealAgentError] = asyncio.get_running_loop().create_future()
        self.counters = Counters()
        self.limits = Limits()
        self._api = api
        self._models = models
        self._journal = journal
        self._admin_hash = key_hash(admin_key)
        self._sessions: dict[str, _Session] = {}  # by the hash of its key
        self._bodies = BodyReader(self.limits)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=self.limits.max_body_bytes)
        app.router.add_post("/rl/start_session", self._start)
        app.router.add_post("/rl/set_reward", self._set_reward)
        app.router.add_post("/rl/end_session", self._end)
        for prefix in ("/v1", ""):
            app.router.add_post(f"{prefix}/{{path:.+}}", self._answer)
        return app

    async def _start(self, request: web.Request) -> web.Response:
        if self._admin_hash not in caller_hashes(request.headers):
            raise RequestError("this call needs the key of the evaluation", status=401, code="invalid_api_key")
        start, key = StartRequest.read(await self._bodies.control(request)), new_key()
        record = start.record(key)
        await self._journal.open_session(record)
        logged: dict[str, Any] = {}
        client = self._models.client(API, logged)
        self._sessions[record.key_hash] = _Session(record=record, start=start, client=client, logged=logged)
        return json_reply({"session_id": record.id, "api_key": key, "base_url": f"{request.url.origin()}/v1"})

    async def _set_reward(self, request: web.Request) -> web.Response:
        session = self._session_of(request)
        reward = RewardRequest.read(await self._bodies.control(request))
        session.rewards = with_reward(session.rewards, reward, ApiUse.of(session.logged).ids)
        return json_reply({"session_id": session.record.id})

    async def _end(self, request: web.Request) -> web.Response:
        session = self._session_of(request)
        end = EndRequest.read(await self._bodies.control(request))
        num_turns = ApiUse.of(session.logged).num_answers
        status, error = outcome_of(end, session.rewards, num_turns=num_turns)
        failure = _failure(session.logged)
        if failure is not None and end.status not in (Status.REJECTED, Status.CANCELLED):
            status, error = Status.INFRA, failure
        told = orjson.loads(self._without_key(orjson.dumps([error, {**end.logged, **session.logged}]).decode()))
        trajectory = Trajectory(
            session_id=session.record.id,
            group_id=session.record.group_id,
            task_id=session.record.task_id,
            turns=(),
            rewards=session.rewards,
            status=status,
            error=told[0],
            logged=told[1],
            started_s=session.record.started_s,
            ended_s=time_of_day_s(),
        )
        del self._sessions[session.record.key_hash]
        await self._journal.close_session(trajectory)
        return json_reply({"session_id": session.record.id, "status": status, "error": told[0], "num_turns": num_turns})

    async def _answer(self, request: web.Request) -> web.Response:
        session, path = self._session_of(request), request.match_info["path"]
        body = session.asked(path, await self._bodies.control(request))
        response = await self._ask(session, path, body)
        if response.status_code == 400 and NEWER in response.text and "max_tokens" in body:
            body[NEWER] = body.pop("max_tokens")  # some of OpenAI's models know the limit by this name alone
            response = await self._ask(session, path, body)
        kind = response.headers.get("content-type", "application/json").partition(";")[0]
        text = response.text if response.is_success else self._without_key(response.text)
        return web.Response(status=response.status_code, text=text, content_type=kind, charset="utf-8")

    async def _ask(self, session: _Session, path: str, body: JsonObject) -> httpx.Response:
        """Ask the API. Raises RequestError, which makes the rollout `infra`, when it does not answer for good."""
        try:
            response = await session.client.post(f"/{path}", body=body, cast_to=httpx.Response)
        except openai.APIStatusError as error:
            response = error.response
        except openai.APIConnectionError as error:
            raise self._failed(f"gave no answer: {error.__cause__ or error}") from None
        status = response.status_code
        if path in MAX_TOKENS and status in REFUSED and not self.failing.done():
            self.failing.set_result(ConfigError(self._refusal(status)))
        if _has_failed(status):
            raise self._failed(f"answered {status}: {response.text}")
        return response

    def _failed(self, what: str) -> RequestError:
        return RequestError(self._without_key(f"{self._api.url} {what:.200}"), status=502, code="api_failed")

    def _refusal(self, status: int) -> str:
        api = self._api
        key = f"the key in {api.key_env}" if api.key_env else "the key, for which eval.api.key_env names no variable"
        remedy = f"check url and the model {api.model!r}" if status == 404 else f"check {key}"
        return f"eval.api: {api.url} {REFUSED[status]} (it answers {status}); {remedy}"

    def stats(self) -> GatewayStats:
        return self.counters.snapshot(num_open_sessions=len(self._sessions))

    def _session_of(self, request: web.Request) -> _Session:
        for caller in caller_hashes(request.headers):
            if caller in self._sessions:
                return self._sessions[caller]
        raise RequestError("the key belongs to no open session", status=401, code="invalid_api_key")

    def _without_key(self, text: str) -> str:
        return hide_keys(without_key(text, self._api.key("eval.api")))


@asynccontextmanager
async def open_relayed(
    settings: RunnerSettings, workflow: Workflow, *, api: OtherModel, journal: Journal
) -> AsyncGenerator[LocalRollouts]:
    """Run rollouts of this process whose model is behind an API."""
    async with AsyncExitStack() as stack:
        admin_key = new_key()
        relay = Relay(api, await stack.enter_async_context(open_models({API: api})), journal, admin_key)
        served = await serve_app(relay.app(), "127.0.0.1", settings.port, limits=relay.limits, counters=relay.counters)
        stack.push_async_callback(served.aclose)
        opening = open_runner(settings, workflow, served.base_url, admin_key, relay.stats, relay.failing)
        yield await stack.enter_async_context(opening)
