"""Other models that a workflow asks, such as a judge or a simulated user: `rollout.client("judge")`. None is trained.

client("judge") ── openai's client, its retries ──▶ _Recorder ──▶ the URL of `rollout.models.judge`
                                                        └──▶ `rollout.logged`: what was asked and answered
"""

import re
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self

import httpx
import orjson
from httpx_aiohttp import AiohttpTransport
from openai import APIError, AsyncOpenAI

from areal_agent.errors import ConfigError
from areal_agent.gateway.auth import without_key
from areal_agent.rollout.config import OtherModel

MAX_SHOWN = 200
OF_BYTES = ("content-encoding", "content-length", "transfer-encoding")
"""The headers that do not hold for a changed answer."""
FAULTY_EVENT = re.compile(r'^data: ?\{"error": ?[^n ]', re.MULTILINE)


class OtherClient(AsyncOpenAI):
    """A stock client of one of them. `model` is its name there, for requests."""

    model: str = ""

    def copy(self, **options: Any) -> Self:
        copied = super().copy(**options)
        copied.model = self.model
        return copied

    with_options = copy


class RolloutClient(AsyncOpenAI):
    """`rollout.client`: a stock client of this rollout's session. Called with a name, it returns another model's."""

    others: "OtherModels"
    logged: dict[str, Any]

    def copy(self, **options: Any) -> Self:
        """Return a client with other options, of the same rollout."""
        copied = super().copy(**options)
        copied.others, copied.logged = self.others, self.logged
        return copied

    with_options = copy

    def __call__(self, name: str) -> OtherClient:
        """Return a client of the model that `rollout.models` has under this name. Raises ConfigError."""
        return self.others.client(name, self.logged)


class OtherModels:
    """All of a config; from `open_models`."""

    def __init__(self, models: Mapping[str, OtherModel], transport: httpx.AsyncBaseTransport) -> None:
        self._models = models
        self._transport = transport
        self._keys = {name: model.key(f"rollout.models.{name}") for name, model in models.items()}

    def client(self, name: str, logged: dict[str, Any]) -> OtherClient:
        """Return a client whose calls are kept in `logged`. Raises ConfigError for a name that there is not."""
        if name not in self._models:
            known = ", ".join(map(repr, self._models)) or "none"
            raise ConfigError(f"rollout.models has no {name!r}; it has {known}; give its url and model there")
        model = self._models[name]
        client = OtherClient(
            api_key=self._keys[name],
            base_url=model.url,
            timeout=model.timeout_s,
            max_retries=model.max_retries,
            http_client=httpx.AsyncClient(
                transport=_Recorder(self._transport, name, logged, self._keys[name]), trust_env=False
            ),
        )
        client.model = model.model
        return client

    def have_failed(self, error: Exception) -> bool:
        """Return whether an error of openai's came from one of these models, not from the gateway."""
        return isinstance(error, APIError) and any(
            str(error.request.url).startswith(model.url) for model in self._models.values()
        )


NO_MODELS = OtherModels({}, httpx.AsyncBaseTransport())


@asynccontextmanager
async def open_models(models: Mapping[str, OtherModel]) -> AsyncGenerator[OtherModels]:
    """Open what the clients of all rollouts share; it is closed on leaving. Raises ConfigError for a missing key."""
    if not models:
        yield NO_MODELS
        return
    async with AiohttpTransport(trust_env=True, limits=httpx.Limits(max_connections=None)) as transport:
        yield OtherModels(models, transport)


class _Recorder(httpx.AsyncBaseTransport):
    """Keeps each call, also one that fails or is tried again, as `NAME.NUMBER`. A streamed answer comes at its end.

    A provider may repeat the key in an error, which then goes into logs and the ledger, so it is taken out of answers.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport, name: str, logged: dict[str, Any], key: str) -> None:
        self._transport = transport
        self._name = name
        self._logged = logged
        self._key = key

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        number = sum(key.startswith(f"{self._name}.") for key in self._logged) + 1
        call = self._logged[f"{self._name}.{number}"] = {"asked": _as_json(await request.aread())}
        start_s = time.monotonic()
        try:
            response = await self._transport.handle_async_request(request)
            body = await response.aread()
            told = body.decode(errors="surrogateescape")
            if (shown := without_key(told, self._key)) != told:
                body = shown.encode(errors="surrogateescape")
                headers = {name: value for name, value in response.headers.items() if name not in OF_BYTES}
                response = httpx.Response(response.status_code, headers=headers, content=body, request=request)
            call["answer"] = answer = _as_json(body)
        except httpx.TransportError as error:
            call["error"] = repr(error)
            raise
        finally:
            call["seconds"] = round(time.monotonic() - start_s, 3)
        call["status"] = response.status_code
        fault = _fault_of(answer, response, request.url.path)
        if response.is_success and fault is not None:
            call["error"] = f"{request.url} answered with {fault!r:.{MAX_SHOWN}}"
            raise httpx.RemoteProtocolError(call["error"])
        return response


def _fault_of(answer: Any, response: httpx.Response, path: str) -> Any:
    """Return what shows that a success is none, or None."""
    if not answer:
        return "nothing"
    if "text/event-stream" in response.headers.get("content-type", ""):
        return answer if FAULTY_EVENT.search(str(answer)) else None
    if not isinstance(answer, dict) or (path.endswith("/chat/completions") and not answer.get("choices")):
        return answer
    return answer.get("error")


def _as_json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except ValueError:
        return body.decode(errors="replace")
