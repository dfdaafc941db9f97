"""The gateway's routes, who may call them, and how an answer is sent.

Agents call `/v1/*` with the key of their session and can use only that session. The owner of a rollout calls `/rl/*`
(`rollouts`). The admin key starts and exports sessions and, where a trainer elsewhere trains on them, leases them
(`online`). An answer is one JSON object or a stream of server-sent events::

    session.begin ─▶ outlet ─▶ chunks ─▶ (the turns are in the journal) ─▶ finish reasons, usage, [DONE]

When a client hangs up, the engine stops and what was sampled until then is recorded. A stream starts with the first
token, or after `keep_alive_s`: an earlier failure gets its own status, a later one becomes the last event. A stream
that has been silent for as long (a tool call is held back until it is whole) sends an event that means nothing new.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import orjson
from aiohttp import web

from areal_agent.errors import ConfigError, RequestError
from areal_agent.gateway.answers import Answer
from areal_agent.gateway.bodies import BodyReader, Limits
from areal_agent.gateway.chat import ChatBody, ChatRequest, Tokenized, TokenizeRequest
from areal_agent.gateway.completions import CompletionsBody, CompletionsRequest
from areal_agent.gateway.draft import Outlet, Piece
from areal_agent.gateway.images import ImageIntake
from areal_agent.gateway.messages import CountRequest, MessagesBody, MessagesRequest, TokenCount
from areal_agent.gateway.metrics import Counters, GatewayStats, Metrics
from areal_agent.gateway.online.consumer import Consumer, TrainerHandler, trainer_handlers
from areal_agent.gateway.openapi import ANY_MODEL, About, no_model, openapi_json
from areal_agent.gateway.order import DEFAULT_MODEL, Order
from areal_agent.gateway.responses_answer import ResponseCalls
from areal_agent.gateway.rollouts import Callers, RolloutCalls
from areal_agent.gateway.server import ServedGateway, as_request_error, json_reply, serve_app
from areal_agent.gateway.session import Session, StartRequest
from areal_agent.gateway.sessions import Closing, Sessions, Traffic
from areal_agent.gateway.turn import Exchange, Services
from areal_agent.images import ImageFolder
from areal_agent.ledger.ledger import Ledger
from areal_agent.process import return_free_memory
from areal_agent.protocols import Journal, Sampler
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import JsonObject, SessionRecord

RETURN_MEMORY_EVERY_S = 5.0
STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
AgentHandler = Callable[[web.Request, Session, JsonObject], Awaitable[web.StreamResponse]]
AskingHandler = Callable[[web.Request, Session], Awaitable[web.StreamResponse]]


class AnswerBody(Protocol):
    """Writes an answer as JSON in the format of its endpoint, whole or as the events of a stream."""

    names_events: bool  # each event is named by the `type` of its object
    done: bytes  # ends a stream

    def fault(self, fault: RequestError) -> JsonObject:
        """Return the event that reports a failure."""
        ...

    def whole(self, answer: Answer) -> JsonObject: ...

    def first(self, prompt_ids: Sequence[int]) -> Iterator[JsonObject]: ...

    def piece(self, piece: Piece) -> Iterator[JsonObject]: ...

    def idle(self) -> JsonObject:
        """Return an event that means nothing new: some clients count events to tell that a stream is alive."""
        ...

    def last(self, answer: Answer) -> Iterator[JsonObject]: ...


class Gateway:
    """An OpenAI-compatible front end to one model that records every token.

    ::

        gateway = Gateway(sampler=engine, renderer=Renderer.load(model_folder), journal=ledger.own, model_name="tiny",
                          admin_key=key, max_context_tokens=1024, vocab_size=360)
        served = await gateway.serve("127.0.0.1", 0)
        ...                                                # agents talk to f"{served.base_url}/v1"
        await served.aclose()
    """

    def __init__(
        self,
        *,
        sampler: Sampler,
        renderer: Renderer,
        journal: Journal,
        model_name: str,
        admin_key: str,
        max_context_tokens: int,
        vocab_size: int,
        has_grammar: bool = False,
        limits: Limits | None = None,
        allowed_hosts: Iterable[str] = (),
        model_aliases: Iterable[str] = (),
        archive: Ledger | None = None,
        consumer: Consumer | None = None,
        images: ImageFolder | None = None,
    ) -> None:
        if renderer.vocab_size > vocab_size:
            raise ConfigError(
                f"the tokenizer has {renderer.vocab_size} ids and the model {vocab_size}; "
                "use the tokenizer of that model"
            )
        self._counters = Counters()
        self._limits = limits or Limits()
        vision = renderer.vision()  # proved at the start, not by the first agent
        self._images = ImageIntake(vision, images, self._limits) if vision else None
        self._services = Services(
            sampler=sampler,
            renderer=renderer,
            journal=journal,
            counters=self._counters,
            max_context_tokens=max_context_tokens,
            vocab_size=vocab_size,
            images=self._images,
            has_grammar=has_grammar,
        )
        self._models = (model_name, DEFAULT_MODEL, *model_aliases)
        self._allowed_hosts = tuple(allowed_hosts)
        self._bodies = BodyReader(self._limits)
        self._sessions = Sessions()
        self._traffic = Traffic(self._limits)
        self._closing = Closing(self._traffic, self._sessions.with_id, self._counters)
        self._metrics = Metrics(self.stats)
        self._callers = Callers(admin_key, self._sessions)
        self._about = About(
            models=self._models, callers=self._callers, traffic=self._traffic, stats=self.stats, metrics=self._metrics
        )
        self._rollouts = RolloutCalls(
            sessions=self._sessions,
            traffic=self._traffic,
            callers=self._callers,
            bodies=self._bodies,
            journal=journal,
            make_session=self._make_session,
            archive=archive,
            consumer=consumer,
        )
        self._responses = ResponseCalls(
            renderer.detokenizer, place=self._place, answer=self._answer, traffic=self._traffic
        )
        self._trainer = trainer_handlers(consumer, self.stats) if consumer else {}

    def app(self) -> web.Application:
        """Build the web application. Use `serve` to run it with the connection limits and checks it needs."""
        app = web.Application(client_max_size=self._limits.max_body_bytes)
        app.cleanup_ctx.append(_while_served(self._return_memory))
        if self._limits.session_timeout_s is not None:
            app.cleanup_ctx.append(_while_served(partial(self._closing.sweep, self._limits.session_timeout_s)))
        for prefix in ("/v1", ""):
            app.router.add_post(f"{prefix}/chat/completions", self._for_agent(self._chat_completions))
            app.router.add_post(f"{prefix}/completions", self._for_agent(self._completions))
            app.router.add_post(f"{prefix}/messages", self._for_agent(self._messages))
            app.router.add_post(f"{prefix}/messages/count_tokens", self._for_agent(self._count_tokens))
            app.router.add_post(f"{prefix}/responses", self._for_agent(self._responses.create))
            response = f"{prefix}/responses/{{response_id}}"
            app.router.add_get(response, self._for_asking(self._responses.retrieve))
            app.router.add_post(f"{response}/cancel", self._for_asking(self._responses.cancel))
            app.router.add_post(f"{prefix}/tokenize", self._for_agent(self._tokenize))
            app.router.add_get(f"{prefix}/models", self._about.models)
            app.router.add_get(f"{prefix}/models/{{model:.+}}", self._about.model)
        app.router.add_get("/", self._about.root)
        app.router.add_post("/rl/start_session", self._rollouts.start)
        app.router.add_post("/rl/set_reward", self._rollouts.set_reward)
        app.router.add_post("/rl/end_session", self._rollouts.end)
        app.router.add_post("/export_trajectories", self._rollouts.export)
        for path, handle in self._trainer.items():
            app.router.add_post(path, self._for_trainer(handle))
        app.router.add_get("/health", self._about.health)
        app.router.add_get("/metrics", self._about.metrics)
        app.router.add_get("/openapi.json", self._describe)
        return app

    async def _describe(self, http: web.Request) -> web.Response:
        """Anybody may ask: the answer reveals nothing about this gateway but its API."""
        return web.Response(body=openapi_json(is_leased_from=bool(self._trainer)), content_type="application/json")

    async def serve(self, host: str = "127.0.0.1", port: int = 0) -> ServedGateway:
        """Listen on `host` and `port`; port 0 picks a free one. Raises ConfigError when the port is taken."""
        return await serve_app(
            self.app(), host, port, limits=self._limits, counters=self._counters, allowed_hosts=self._allowed_hosts
        )

    async def drain(self, timeout_s: float) -> int:
        """Refuse new turns and sessions, give calls in flight `timeout_s`, then end open sessions as `cancelled`.

        Returns how many it ended. The gateway still answers rewards, ends and exports.
        """
        return await self._closing.drain(timeout_s)

    def stats(self) -> GatewayStats:
        """Return the counts so far."""
        return self._counters.snapshot(num_open_sessions=self._sessions.num_open)

    # -------------------------------------------------------------------------------------------- agents

    async def _chat_completions(self, http: web.Request, session: Session, body: JsonObject) -> web.StreamResponse:
        request, detokenizer = ChatRequest.read(body), self._services.renderer.detokenizer
        return await self._answer(http, session, request.order(), lambda one: ChatBody(request, one, detokenizer))

    async def _completions(self, http: web.Request, session: Session, body: JsonObject) -> web.StreamResponse:
        request, renderer = CompletionsRequest.read(body), self._services.renderer
        return await self._answer(http, session, request.order(), lambda one: CompletionsBody(request, one, renderer))

    async def _messages(self, http: web.Request, session: Session, body: JsonObject) -> web.StreamResponse:
        request = MessagesRequest.read(body, session.translated)
        return await self._answer(http, session, request.order(), lambda one: MessagesBody(request, one))

    async def _count_tokens(self, http: web.Request, session: Session, body: JsonObject) -> web.StreamResponse:
        request = CountRequest.read(body, session.translated)
        self._require_model(request.model, session)
        token_ids = await session.prompt_ids(request.conversation, num_bytes=len(await http.read()))
        return json_reply(TokenCount(input_tokens=len(token_ids)))

    async def _tokenize(self, http: web.Request, session: Session, body: JsonObject) -> web.StreamResponse:
        request, renderer = TokenizeRequest.read(body), self._services.renderer
        self._require_model(request.model, session)
        if request.prompt is not None:
            token_ids: Sequence[int] = renderer.ids_of_prompt(request.prompt)
        else:
            token_ids = await session.prompt_ids(request.conversation, num_bytes=len(await http.read()))
        return json_reply(
            Tokenized(
                count=len(token_ids),
                max_model_len=self._services.max_context_tokens,
                tokens=list(token_ids),
            )
        )

    async def _answer(
        self, http: web.Request, session: Session, order: Order, body_of: Callable[[Exchange], AnswerBody]
    ) -> web.StreamResponse:
        """Place, sample and answer a request, and mark the answer as delivered once all of it was sent."""
        with session.deliveries.one():
            exchange = await self._place(http, session, order)
            send = self._send_in_chunks if order.is_streamed else self._send_whole
            return await send(http, session, exchange, body_of(exchange))

    async def _place(self, http: web.Request, session: Session, order: Order) -> Exchange:
        self._require_model(order.model, session)
        return await session.place(order, num_bytes=len(await http.read()))

    async def _send_whole(
        self, http: web.Request, session: Session, exchange: Exchange, body: AnswerBody
    ) -> web.StreamResponse:
        try:
            answer = await asyncio.shield(session.begin(exchange))
        except asyncio.CancelledError:
            exchange.hang_up()
            raise
        reply = json_reply(body.whole(answer))
        await reply.prepare(http)
        await reply.write_eof()
        session.deliveries.delivered(answer.completion_ids)
        return reply

    async def _send_in_chunks(
        self, http: web.Request, session: Session, exchange: Exchange, body: AnswerBody
    ) -> web.StreamResponse:
        outlet = Outlet()
        answering = session.begin(exchange, outlet)
        reply = web.StreamResponse(headers=STREAM_HEADERS)
        try:
            if not await outlet.may_begin(self._limits.keep_alive_s):
                await asyncio.shield(answering)
            await reply.prepare(http)
            async for events in self._until_the_end(outlet, body, exchange.prompt_ids):
                await reply.write(events)
            answer = await asyncio.shield(answering)
            await reply.write(_events(body, body.last(answer)) + body.done)
            await reply.write_eof()
            session.deliveries.delivered(answer.completion_ids)
        except (asyncio.CancelledError, ConnectionError):
            exchange.hang_up(keeps_calls=True)
            raise
        except Exception as error:  # boundary: an agent that reads a stream learns of a failure from an event
            if not reply.prepared:
                raise
            fault = as_request_error(error, http)
            self._counters.errors[fault.status] += 1
            await reply.write(_events(body, [body.fault(fault)]))
            await reply.write_eof()
        return reply

    async def _until_the_end(self, outlet: Outlet, body: AnswerBody, prompt_ids: Sequence[int]) -> AsyncIterator[bytes]:
        """Yield the events before the last ones, and one that means nothing new after each silence."""
        keep_alive_s, clock = self._limits.keep_alive_s, asyncio.get_running_loop().time
        idle_s = clock()
        if events := _events(body, body.first(prompt_ids)):
            yield events
            idle_s += keep_alive_s
        while (pieces := await outlet.take(idle_s)) is not None:
            events = b"".join(_events(body, body.piece(piece)) for piece in pieces)  # may be none: calls come last
            if events or clock() >= idle_s:
                yield events or _events(body, [body.idle()])
                idle_s = clock() + keep_alive_s

    def _require_model(self, model: str, session: Session) -> None:
        if model not in self._models and not {model, ANY_MODEL} & {*session.model_aliases, *self._models}:
            raise no_model(model, self._models)

    # ------------------------------------------------------------------------------------------- rollouts

    def _make_session(self, record: SessionRecord, start: StartRequest) -> Session:
        start.sampling.require_possible(self._services.vocab_size, "sampling.")
        return Session(record, services=self._services, on_ended=self._retire, start=start)

    async def _return_memory(self) -> None:
        """Give memory back after turns."""
        num_turns = 0
        while True:
            await asyncio.sleep(RETURN_MEMORY_EVERY_S)
            if self._counters.turns != num_turns:
                num_turns = self._counters.turns
                await asyncio.to_thread(return_free_memory)

    def _retire(self, session: Session) -> None:
        self._sessions.retire(session)
        self._traffic.leave(session.record.id)

    # --------------------------------------------------------------------------------------------- calls

    def _for_agent(self, handle: AgentHandler) -> Handler:
        """Return a handler for a turn of the session that the request's key belongs to."""

        async def handler(request: web.Request) -> web.StreamResponse:
            session = await self._rollouts.session_for_turn(request)
            with self._traffic.call(session.record.id, is_turn=True), self._metrics.turn():
                body = await self._bodies.agent(request, session.bodies)
                if self._images is not None:
                    body = await self._images.taken(body)
                return await handle(request, session, body)

        return handler

    def _for_asking(self, handle: AskingHandler) -> Handler:
        """Return a handler for a call about the session that the request's key belongs to, which begins no turn."""

        async def handler(request: web.Request) -> web.StreamResponse:
            session = await self._rollouts.session_for_turn(request)
            with self._traffic.call(session.record.id):
                return await handle(request, session)

        return handler

    def _for_trainer(self, handle: TrainerHandler) -> Handler:
        """A handler for a trainer, who has the admin key."""

        async def handler(request: web.Request) -> web.StreamResponse:
            self._callers.require_admin(request)
            return await handle(await self._bodies.control(request))

        return handler


def _events(body: AnswerBody, chunks: Iterable[JsonObject]) -> bytes:
    if body.names_events:
        return b"".join(b"event: %b\ndata: %b\n\n" % (one["type"].encode(), orjson.dumps(one)) for one in chunks)
    return b"".join(b"data: %b\n\n" % orjson.dumps(one) for one in chunks)


def _while_served(work: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[web.Application], AsyncIterator[None]]:
    """Return the context of a task that runs as long as the app."""

    async def context(_: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(work())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    return context
