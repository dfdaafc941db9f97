"""One SGLang server, as `foreign.engine.ForeignServer`.

How SGLang deviates from the common wire, and what is done about it:

    a token id outside the vocabulary crashes it         foreign/engine.py checks ids against the model's config.json
    an abort takes ids by prefix, is lost at a pause     foreign/engine.py: ids of equal length, streams that are closed
    `/health` samples a token, so fails while paused     `/server_info` goes through the scheduler and needs no model
    a label only changes when it is given                every update gives one, and it is read back
    it may answer 400 although the weights changed       foreign/weights.py pauses first and undoes whatever fails
    idle connections are closed after 5 s                every call has its own connection
    events may hold all tokens so far                    refused; a flag of its start tells
    tensors that a folder lacks keep their old value     foreign/weight_folders.py checks the folder first
    no pause lets requests end first (`wait`)            foreign/engine.py waits for their end and holds others back

Seeds of requests work if the server was started with `--enable-deterministic-inference`.
"""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_agent.engine import wire
from areal_agent.engine.foreign.engine import ServerState
from areal_agent.engine.foreign.weights import Served, label_meta
from areal_agent.engine.pushes import size_of_folder
from areal_agent.engine.sglang import SGLANG_LAUNCHER
from areal_agent.engine.transport import Transport
from areal_agent.engine.wire import EngineStats
from areal_agent.engine.wire.fields import WireError, as_integer, as_object, get
from areal_agent.engine.wire.generate import decode_tokens, finished, top_entries
from areal_agent.errors import EngineError, EngineRejected, EngineUnreachable, WeightUpdateError
from areal_agent.types import (
    EngineInfo,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    JsonObject,
    PauseMode,
    TokenChunk,
    TopLogprobs,
    WeightVersion,
)


class SglangAnswer:
    """Assembles the events of one answer. `result` is set after the last event.

    The last event of an aborted answer repeats its last id, or all ids, or has none, although the events before were
    increments. Its log-probabilities tell which: they cover either all tokens or the new ones, each with its id.
    """

    def __init__(self, *, takes_unlabelled: bool = False) -> None:
        """If `takes_unlabelled`, weights that nobody has labelled count as the first version."""
        self._takes_unlabelled = takes_unlabelled
        self.result: GenerateResult | None = None
        self._reader = wire.ResultReader()
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[TopLogprobs] = []

    def read(self, fields: JsonObject) -> TokenChunk:
        """Read one event; return its new tokens, if any.

        Raises WireError if it cannot be read, and an EngineError if the server reports a failure.
        """
        meta = as_object(get(fields, "meta_info", dict), "meta_info")
        if self._takes_unlabelled:
            meta = label_meta(meta)
            fields = {**fields, "meta_info": meta}
        finish = meta.get("finish_reason")
        if finish is not None and as_object(finish, "finish_reason").get("type") == FinishReason.ABORT:
            _raise_failure(as_object(finish, "finish_reason"))
            return self._read_abort(meta)
        chunk = self._reader.read(fields)
        self.result = self._reader.result
        return self._keep(chunk)

    def _read_abort(self, meta: JsonObject) -> TokenChunk:
        seen, after = len(self._token_ids), as_integer(meta.get("completion_tokens", 0), "completion_tokens")
        entries = _new_entries(meta.get("output_token_logprobs") or [], seen, after)
        tops = _new_entries(top_entries(meta), seen, after)
        chunk = self._keep(decode_tokens([_id_of(entry) for entry in entries], entries, tops))
        tokens = TokenChunk(
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            top_logprobs=tuple(self._top_logprobs),
        )
        spans = _cut(meta.get("weight_versions") or [], len(tokens.token_ids))
        self.result = finished(tokens, {**meta, "weight_versions": spans})
        return chunk

    def _keep(self, chunk: TokenChunk) -> TokenChunk:
        self._token_ids += chunk.token_ids
        self._logprobs += chunk.logprobs
        self._top_logprobs += chunk.top_logprobs
        return chunk


def _raise_failure(finish: JsonObject) -> None:
    """Raise if the abort has a status, which means that the request was wrong or that the server failed."""
    status = finish.get("status_code")
    if isinstance(status, int) and status >= 400:
        message = f"the engine ended the request with {status}: {finish.get('message')}"
        error: type[EngineError] = EngineRejected if status < 500 else EngineUnreachable
        raise error(message)


def _new_entries(entries: Sequence[Any], seen: int, after: int) -> Sequence[Any]:
    """Return the entries of tokens after the first `seen`, from a list for all `after` tokens or only the new ones."""
    if len(entries) >= after:
        return entries[len(entries) - after + seen :]
    return entries if len(entries) == after - seen else []


def _id_of(entry: Any) -> Any:
    match entry:
        case [_, token_id, *_]:
            return token_id
        case _:
            raise WireError(f"output_token_logprobs holds {entry!r:.80}; it must hold [log-probability, token id, ...]")


def _cut(spans: Sequence[Any], num_tokens: int) -> list[dict[str, Any]]:
    """Return the spans of the first `num_tokens` tokens: more may have been sampled than arrived."""
    fields = [as_object(span, "a span of weight_versions") for span in spans]
    return [
        {**span, "end": min(as_integer(span.get("end"), "end"), num_tokens)}
        for span in fields
        if as_integer(span.get("start"), "start") < max(1, num_tokens)
    ]


class SglangDialect:
    """The common wire, apart from the end of an aborted answer."""

    path = wire.GENERATE

    def __init__(self, *, takes_unlabelled: bool = False) -> None:
        self._takes_unlabelled = takes_unlabelled

    def encode(self, request: GenerateRequest, rid: str, label: str) -> dict[str, Any]:
        """Return the body of a request. SGLang does not need the label."""
        del label
        return {**wire.encode_request(request, is_streamed=True), "rid": rid}

    def reader(self, request: GenerateRequest) -> SglangAnswer:
        """Return a reader for the events of an answer."""
        del request
        return SglangAnswer(takes_unlabelled=self._takes_unlabelled)

    async def abort(self, transport: Transport, rid: str) -> None:
        """Make the server end a request that has begun."""
        await transport.post(wire.ABORT_REQUEST, wire.encode_abort(rid))


LOADS = "/v1/loads"

RECEIVED = "areal-agent-push:"
"""The prefix of a push's path, from which weights received by torch.distributed are loaded (scheduler_extension.py)."""

_UNLABELLED = "default"  # SGLang's label of weights that nobody labelled


def decode_served(model_info: object) -> Served:
    """Read `/model_info`, which describes the current weights; the label in `/server_info` stays that of the start."""
    fields = as_object(model_info, wire.MODEL_INFO)
    path = get(fields, "model_path", str)
    source = None if path.startswith(RECEIVED) else Path(path)
    return Served(source=source, label=get(fields, "weight_version", str))


def decode_start(server_info: object) -> EngineInfo:
    """Read what the server was started with, except for its vocabulary, which it does not report.

    Its context is `max_req_input_len`: a longer request within `context_length` is silently cut.
    """
    started = as_object(server_info, wire.SERVER_INFO)
    return wire.decode_info({**started, "context_length": None, "weight_version": _UNLABELLED})


def tells_new_tokens(server_info: object) -> bool:
    """Return whether events hold only new tokens, as on the common wire."""
    return as_object(server_info, wire.SERVER_INFO).get("incremental_streaming_output") is not False


def decode_loads(body: object, version: WeightVersion) -> EngineStats:
    """Return the number of requests that run and wait, over all schedulers of the server."""
    loads: list[Any] = get(as_object(body, LOADS), "loads", list)
    fields = [as_object(load, "an entry of loads") for load in loads]
    return EngineStats(
        num_running=sum(as_integer(load.get("num_running_reqs"), "num_running_reqs") for load in fields),
        num_queued=sum(as_integer(load.get("num_waiting_reqs"), "num_waiting_reqs") for load in fields),
        busy_s=None,
        generated_tokens=None,
        weight_version=version,
    )


class SglangLoader:
    """Makes one server load weights. A load has succeeded when the label has changed."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def load(self, folder: Path, label: str, *, flush_cache: bool) -> None:
        """Make the paused server load a folder under a label. Raises EngineError unless it confirms the label."""
        path = os.path.abspath(folder)  # noqa: ASYNC240 (no disk: the server has a working directory of its own)
        num_bytes = await asyncio.to_thread(size_of_folder, folder)
        await self.update(path, label, flush_cache=flush_cache, num_bytes=num_bytes)

    async def update(self, path: str, label: str, *, flush_cache: bool, num_bytes: int = 0) -> None:
        """Make the server load what it knows as `path`, of which `num_bytes` come from a disk. Errors as in `load`."""
        body = {"model_path": path, "weight_version": label, "flush_cache": flush_cache}
        await self._transport.post(wire.UPDATE_FROM_DISK, body, refusal=WeightUpdateError, num_bytes=num_bytes)
        answer = await self._transport.get(wire.MODEL_INFO)
        served = self._transport.decoded(decode_served, wire.MODEL_INFO, answer)
        if served.label != label:
            raise WeightUpdateError(
                f"{self._transport.base_url} reports that it serves {served.label} after an update to {label}"
            )


ACTION = "areal_agent."
CHECK_WEIGHTS = "/weights_checker"

_BETWEEN_REPLICAS = " | "  # as SGLang joins them


class SglangReceiver:
    """Makes the schedulers receive weights, which are then loaded like a folder whose name only they know."""

    def __init__(self, transport: Transport, loader: SglangLoader) -> None:
        self._transport = transport
        self._loader = loader

    async def ask(self, method: str, arguments: Sequence[str]) -> Sequence[str]:
        """Call a method of the schedulers and return each replica's answer."""
        body = {"action": ACTION + method, "skip_tensor_list": arguments}
        try:
            answer = await self._transport.post(CHECK_WEIGHTS, body, refusal=WeightUpdateError)
        except EngineError as error:
            raise WeightUpdateError(f"{error}; see its log. Was it started by {SGLANG_LAUNCHER}?") from error
        return self._transport.decoded(_messages, CHECK_WEIGHTS, answer)

    async def load_received(self, push_id: str, label: str, *, flush_cache: bool) -> None:
        """Make the paused server load what they hold. Raises EngineError unless it confirms the label."""
        await self._loader.update(RECEIVED + push_id, label, flush_cache=flush_cache)


def _messages(body: object) -> list[str]:
    return get(as_object(body, CHECK_WEIGHTS), "message", str).split(_BETWEEN_REPLICAS)


class SglangServer:
    """The address of one server, and how to talk to it."""

    kind = "SGLang"

    def __init__(self, base_url: str, *, takes_unlabelled: bool = False) -> None:
        """If `takes_unlabelled`, weights that nobody has labelled count as the first version."""
        self.transport = Transport(base_url, keeps_connections=False)  # uvicorn closes them after 5 s
        self.dialect = SglangDialect(takes_unlabelled=takes_unlabelled)
        self.loader = SglangLoader(self.transport)
        self.receiver = SglangReceiver(self.transport, self.loader)

    async def state(self) -> ServerState:
        """Return what it was started with, and the weights that serve now."""
        ask, read = self.transport.get, self.transport.decoded
        told = await ask(wire.SERVER_INFO)
        started = read(decode_start, wire.SERVER_INFO, told)
        if not tells_new_tokens(told):
            raise EngineRejected(
                f"the SGLang server at {self.transport.base_url} repeats all tokens of an answer in every event; start "
                "it with --incremental-streaming-output"
            )
        return ServerState(
            model=Path(started.model_path),
            served=read(decode_served, wire.MODEL_INFO, await ask(wire.MODEL_INFO)),
            max_context_tokens=started.max_context_tokens,
            has_grammar=started.has_grammar,
        )

    async def stats(self, version: WeightVersion) -> EngineStats:
        """Return how many requests it runs now."""
        body = await self.transport.get(LOADS)
        return self.transport.decoded(lambda fields: decode_loads(fields, version), LOADS, body)

    async def probe(self, timeout_s: float) -> None:
        """Ask `/server_info`, which goes through the scheduler."""
        await self.transport.get(wire.SERVER_INFO, timeout_s=timeout_s)

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling; SGLang has no `wait`."""
        body = wire.encode_pause(wire.Pause(mode=PauseMode.RETRACT if mode is PauseMode.WAIT else mode))
        await self.transport.post(wire.PAUSE_GENERATION, body, has_limit=mode is not PauseMode.ABORT)

    async def resume(self) -> None:
        """Continue sampling."""
        await self.transport.post(wire.CONTINUE_GENERATION, {})
