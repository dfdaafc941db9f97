"""The embedded engine as a server on SGLang's wire: aiohttp in front of the model thread.

`wire/` encodes the JSON, and the scheduler holds all state. A wrong request is answered with 400 and a message, and
everything else goes on; a client that disconnects aborts its request. A streamed answer begins with the first token, so
that a request refused before that gets a status of its own; a later failure is an event.
"""

import asyncio
import contextlib
import hmac
import logging
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import orjson
from aiohttp import web
from aiohttp.typedefs import Middleware
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from areal_agent.engine.embedded.model import ModelRunner
from areal_agent.engine.embedded.sampler import Grammars, Matcher
from areal_agent.engine.embedded.scheduler import ModelWeights, Scheduler, TokenStream
from areal_agent.engine.pushes import PUSH_TIMEOUT_S, Pushes
from areal_agent.engine.wire import control, fields, generate
from areal_agent.engine.wire.fields import WireError
from areal_agent.engine.wire.generate import check_request
from areal_agent.errors import (
    ConfigError,
    EngineError,
    EngineRejected,
    EngineUnreachable,
    PushConflict,
    WeightUpdateError,
)
from areal_agent.types import EngineInfo, GenerateRequest, GenerateResult, WeightVersion

logger = logging.getLogger(__name__)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY_BYTES = 64 * 2**20
SHUTDOWN_GRACE_S = 2.0
STREAM_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


@dataclass(kw_only=True, slots=True, eq=False)
class _Preparation:
    """A request that the server prepares before the scheduler has it. An abort has to reach it, too."""

    request_id: str
    is_aborted: bool = False


class EngineServer:
    """One model, served on one port. Make it with `start`, end it with `aclose`."""

    def __init__(
        self, runner: ModelRunner, *, version: WeightVersion, push_timeout_s: float, grammars: Grammars | None
    ) -> None:
        self._runner = runner
        self._grammars = grammars
        self.failed = asyncio.Event()  # set when the model thread has died; the log has its traceback
        loop = asyncio.get_running_loop()
        self._scheduler = Scheduler(
            runner, version=version, on_failure=lambda: loop.call_soon_threadsafe(self.failed.set)
        )
        self._weights = ModelWeights(self._scheduler, runner.layout, runner.device)
        self._pushes = Pushes(self._weights, timeout_s=push_timeout_s)
        self._preparations: list[_Preparation] = []
        self._is_draining = False
        self._web: web.AppRunner | None = None
        self.base_url = ""

    @classmethod
    async def start(
        cls,
        runner: ModelRunner,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        key: str | None = None,
        version: WeightVersion | None = None,
        push_timeout_s: float = PUSH_TIMEOUT_S,
        grammars: Grammars | None = None,
    ) -> Self:
        """Serve on a port; 0 picks a free one. With a `key`, every call but `/health` has to show it.

        Without `grammars`, use those of the model's tokenizer.

        Raises ConfigError when the address cannot be bound.
        """
        grammars = grammars or Grammars.of(
            Path(runner.model_path), vocab_size=runner.vocab_size, eos_token_ids=runner.eos_token_ids
        )
        server = cls(runner, version=version or WeightVersion(), push_timeout_s=push_timeout_s, grammars=grammars)
        try:
            await server._listen(host, port, key)
        except BaseException:
            await server.aclose()
            raise
        return server

    async def drain(self, timeout_s: float) -> None:
        """Accept no more requests, and wait up to `timeout_s` for those under way to end."""
        self._is_draining = True
        with contextlib.suppress(TimeoutError, EngineUnreachable):
            async with asyncio.timeout(timeout_s):
                await asyncio.wrap_future(self._scheduler.finish())

    async def aclose(self) -> None:
        """Answer requests under way with what they have, and close. Harmless when repeated."""
        await asyncio.to_thread(self._scheduler.close)
        if self._web is not None:
            await self._web.cleanup()

    async def _listen(self, host: str, port: int, key: str | None) -> None:
        # With handler_cancellation, a client that disconnects cancels its handler, which aborts its request.
        self._web = web.AppRunner(
            self._app(key), handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_GRACE_S
        )
        await self._web.setup()
        try:
            await web.TCPSite(self._web, host, port, backlog=4096).start()
        except OSError as error:
            raise cannot_listen(host, port, error) from error
        name, at, *_ = self._web.addresses[0]
        self.base_url = f"http://[{name}]:{at}" if ":" in name else f"http://{name}:{at}"

    def _app(self, key: str | None) -> web.Application:
        middlewares: list[Middleware] = [_errors_as_json]
        if key is not None:
            middlewares.append(_who_shows(key))
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=middlewares)
        app.router.add_post(generate.GENERATE, self._generate)
        app.router.add_post(control.ABORT_REQUEST, self._abort)
        app.router.add_post(control.PAUSE_GENERATION, self._pause)
        app.router.add_post(control.CONTINUE_GENERATION, self._continue)
        app.router.add_post(control.RELEASE_MEMORY, self._release_memory)
        app.router.add_post(control.RESUME_MEMORY, self._resume_memory)
        app.router.add_post(control.UPDATE_FROM_DISK, self._update_from_disk)
        app.router.add_post(control.UPDATE_FROM_SHARED_MEMORY, self._update_from_shared_memory)
        app.router.add_post(control.BEGIN_PUSH, self._begin_push)
        app.router.add_post(control.SEND_PUSH, self._send_push)
        app.router.add_post(control.COMMIT_PUSH, self._commit_push)
        app.router.add_post(control.ABORT_PUSH, self._abort_push)
        app.router.add_get(control.HEALTH, self._health)
        app.router.add_get(control.SERVER_INFO, self._server_info)
        app.router.add_get(control.MODEL_INFO, self._server_info)
        app.router.add_get(control.METRICS, self._metrics)
        return app

    # -------------------------------------------------------------------------------------------- handlers

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        call = generate.GenerateCall.read(await http.read())
        request = call.request()
        self._check_serves()
        check_request(request, self._info())
        if request.images:
            raise EngineRejected(
                f"images has {len(request.images)}, and this engine takes texts only; for a model that sees images set "
                "engine.backend to vllm or sglang"
            )
        if call.logprob_start_len >= 0:
            return await self._score(call)
        # Thousands may wait, and a packed prompt takes a ninth of the memory of Python integers.
        request = replace(request, input_ids=array("i", request.input_ids))
        tokens = TokenStream() if call.stream else None
        matcher: Matcher | None = None
        preparation = _Preparation(request_id=request.request_id)
        if self._grammars is not None and (grammar := request.sampling.grammar) is not None:
            self._preparations.append(preparation)
            try:  # in a thread, because a large grammar takes a while
                matcher = await asyncio.to_thread(self._grammars.matcher, *grammar)
            finally:
                self._preparations.remove(preparation)
        answer = self._scheduler.submit(request, tokens and tokens.put, matcher)
        if preparation.is_aborted:
            self._scheduler.abort(request.request_id)
        try:
            if tokens is not None:
                return await _stream_answer(http, request, tokens, asyncio.wrap_future(answer))
            result = await asyncio.wrap_future(answer)
        except (asyncio.CancelledError, ConnectionError):
            with contextlib.suppress(EngineUnreachable):  # closed: nothing is sampled any more
                self._scheduler.abandon(request.request_id, answer)
            raise
        return _answer(generate.encode_result(request, result))

    async def _score(self, call: generate.GenerateCall) -> web.Response:
        start = call.logprob_start_len
        temperature = (call.sampling_params or generate.Sampling()).temperature
        if start >= len(call.input_ids) or not temperature:
            raise EngineRejected(
                f"logprob_start_len is {start} and temperature {temperature:g}; to have the {len(call.input_ids)} "
                "tokens of input_ids scored, the first must be less than that, and the second above 0"
            )
        scores = await asyncio.wrap_future(self._scheduler.score(call.input_ids, start, temperature))
        return _answer(generate.encode_scores(call, scores))

    async def _abort(self, http: web.Request) -> web.Response:
        abort = control.Abort.read(await http.read())
        request_id = None if abort.abort_all else abort.rid
        for preparation in self._preparations:
            preparation.is_aborted |= request_id in (None, preparation.request_id)
        await asyncio.wrap_future(self._scheduler.abort(request_id))
        return _success("aborted, if it was in flight")

    async def _pause(self, http: web.Request) -> web.Response:
        pause = control.Pause.read(await http.read())
        with self._pushes.hold(pause.push_id):
            await asyncio.wrap_future(self._scheduler.pause(pause.mode))
        return _success(f"paused: {pause.mode}")

    async def _continue(self, http: web.Request) -> web.Response:
        self._pushes.let_go(control.Continue.read(await http.read()).push_id)
        await asyncio.wrap_future(self._scheduler.resume())
        return _success("generation goes on")

    async def _release_memory(self, http: web.Request) -> web.Response:
        control.Memory.read(await http.read())
        await asyncio.wrap_future(self._scheduler.release_memory())
        return _success("the memory of keys and values is free; requests wait")

    async def _resume_memory(self, http: web.Request) -> web.Response:
        control.Memory.read(await http.read())
        await asyncio.wrap_future(self._scheduler.resume_memory())
        return _success("generation goes on")

    async def _update_from_disk(self, http: web.Request) -> web.Response:
        return await self._update(control.DiskUpdate.read(await http.read()))

    async def _update_from_shared_memory(self, http: web.Request) -> web.Response:
        return await self._update(control.SharedMemoryUpdate.read(await http.read()))

    async def _update(self, update: control.DiskUpdate | control.SharedMemoryUpdate) -> web.Response:
        """Update in one call. Reading and proving run beside the model thread; only the copy runs in it."""
        self._check_serves()
        async with self._pushes.swapping:
            weights = await self._weights.take(update.weights, needs_manifest=False)
            await self._weights.swap(weights, update.weight_version, flush_cache=update.flush_cache)
        return _success(f"serving weight version {update.weight_version}")

    async def _begin_push(self, http: web.Request) -> web.Response:
        push_id = control.Push.read(await http.read()).push_id
        self._check_serves()
        self._pushes.begin(push_id)
        return _success(f"push {push_id} has begun")

    async def _send_push(self, http: web.Request) -> web.Response:
        send = control.PushSend.read(await http.read())
        await self._pushes.send(send.push_id, send.weights)
        return _success(f"push {send.push_id} has its weights; the old version serves until the commit")

    async def _commit_push(self, http: web.Request) -> web.Response:
        commit = control.PushCommit.read(await http.read())
        await self._pushes.commit(commit.push_id, commit.weight_version, flush_cache=commit.flush_cache)
        return _success(f"serving weight version {commit.weight_version}")

    async def _abort_push(self, http: web.Request) -> web.Response:
        self._pushes.abort(control.Push.read(await http.read()).push_id)
        return _success("aborted, if it was open")

    async def _health(self, _: web.Request) -> web.Response:
        self._check_serves()
        return _answer({})

    async def _server_info(self, _: web.Request) -> web.Response:
        return _answer(control.encode_info(self._info(), self._scheduler.stats()))

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self._scheduler.metrics), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    def _check_serves(self) -> None:
        """Raises EngineUnreachable when the engine does not serve, so that a fleet goes elsewhere."""
        if self._scheduler.is_closed:
            raise EngineUnreachable("the model thread has ended; see the engine's log")
        if self._is_draining:
            raise EngineUnreachable("the engine is ending and takes no further requests; start another one")

    def _info(self) -> EngineInfo:
        return EngineInfo(
            model_path=self._runner.model_path,
            weight_version=self._scheduler.stats().weight_version,
            vocab_size=self._runner.vocab_size,
            max_context_tokens=self._runner.max_context_tokens,
            has_grammar=self._grammars is not None,
        )


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    """The error for an address that cannot be bound."""
    return ConfigError(
        f"the engine cannot listen on {host}:{port}: {error.strerror or error}; "
        "choose another port, or 0 for any free one"
    )


async def _stream_answer(
    http: web.Request, request: GenerateRequest, tokens: TokenStream, answer: asyncio.Future[GenerateResult]
) -> web.StreamResponse:
    """Send tokens as events until `answer` is done, at the client's pace. Raises ConnectionError when it is gone."""
    answer.add_done_callback(lambda _: tokens.end())
    response = web.StreamResponse(headers=STREAM_HEADERS)
    num_sent = 0
    while True:
        chunk = await tokens.take()
        if answer.done():
            break  # the last event holds everything not yet sent
        if not chunk.token_ids:
            continue
        if not response.prepared:
            await response.prepare(http)
        num_sent += len(chunk.token_ids)
        await response.write(
            generate.encode_event(generate.encode_chunk(request.request_id, chunk, num_tokens=num_sent))
        )
    if not response.prepared:
        answer.result()  # a failure before the first token is answered as usual
        await response.prepare(http)
    await response.write(_last_event(request, answer, num_sent) + generate.STREAM_END)
    await response.write_eof()
    return response


def _last_event(request: GenerateRequest, answer: asyncio.Future[GenerateResult], num_sent: int) -> bytes:
    try:
        return generate.encode_event(generate.encode_result(request, answer.result(), num_sent=num_sent))
    except EngineError as error:
        status = 400 if isinstance(error, EngineRejected) else 503
        return generate.encode_event(fields.encode_failure(str(error), status))


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The boundary of the server: a failure becomes an answer, and the server goes on."""
    try:
        return await handler(request)
    except PushConflict as error:
        return _failure(str(error), 409)
    except (WireError, EngineRejected, WeightUpdateError) as error:
        return _failure(str(error), 400)
    except EngineUnreachable as error:
        return _failure(str(error), 503)
    except web.HTTPException as error:
        message = f"{request.method} {request.path}: {error.reason}"
        if request.path.startswith("/v1"):
            message += "; an engine takes token ids (/generate): put python -m areal_agent.gateway before it for /v1"
        return _failure(message, error.status)
    except ConnectionError:
        return _failure("the client is gone", 499)  # nobody reads it, but aiohttp would log a raised error as a failure
    except Exception as error:
        logger.exception("%s %s failed", request.method, request.path)
        return _failure(f"the engine failed: {error!r}; see its log", 500)


def _who_shows(key: str) -> Middleware:
    """Return a middleware that answers only callers that show the key."""
    expected = f"Bearer {key}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if request.path == control.HEALTH or hmac.compare_digest(shown, expected):
            return await handler(request)
        return _failure("this engine demands the key that it was started with: set AREAL_AGENT_ENGINE_KEY", 401)

    return check


def _answer(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def _success(message: str) -> web.Response:
    return _answer({"success": True, "message": message})


def _failure(message: str, status: int) -> web.Response:
    return _answer(fields.encode_failure(message, status), status=status)
