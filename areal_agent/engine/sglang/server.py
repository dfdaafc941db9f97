"""One SGLang server, as `foreign.server.ForeignServer`.

How SGLang deviates from the common wire, and what is done about it:

    a token id outside the vocabulary crashes it         foreign/engine.py checks ids against the model's config.json
    an abort takes ids by prefix, is lost at a pause     foreign/engine.py: ids of equal length, streams that are closed
    `/health` samples a token, so fails while paused     `/server_info` goes through the scheduler and needs no model
    a label only changes when it is given                every update gives one, and it is read back
    it may answer 400 although the weights changed       foreign/server.py pauses first and undoes whatever fails
    idle connections are closed after 5 s                every call has its own connection
    events may hold all tokens so far                    refused; a flag of its start tells
    tensors that a folder lacks keep their old value     foreign/weight_folders.py checks the folder first
    no pause lets requests end first (`wait`)            foreign/engine.py waits for their end and holds others back
    `ignore_eos` ignores `stop_token_ids`, too           `SglangAnswer` ends the answer at them and leaves the stream
    `min_new_tokens` counts anew after a retraction      nothing: such an answer's probabilities are altered anyway
    images are looked for by the id of their pads        image_files.py puts them at the places of the request
    what was seen in images outlasts the weights         scheduler_extension.py forgets it with every load

Seeds of requests work if the server was started with `--enable-deterministic-inference`.
"""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from areal_agent.engine.foreign.server import ForeignServer, Served, ServerState, label_first, label_spans
from areal_agent.engine.sglang import SGLANG_LAUNCHER
from areal_agent.engine.wire import control, generate
from areal_agent.engine.wire.control import EngineStats
from areal_agent.engine.wire.fields import UNLABELLED, WireError, as_integer, as_object, encode_spans, get
from areal_agent.engine.wire.generate import decode_tokens, finished, top_entries
from areal_agent.errors import EngineError, EngineRejected, EngineUnreachable, WeightUpdateError
from areal_agent.types import (
    EngineInfo,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    JsonObject,
    PauseMode,
    PromptImage,
    TokenChunk,
    VersionSpan,
    WeightVersion,
)


class SglangAnswer:
    """Assembles the events of one answer. `result` is set after the last event.

    The last event of an aborted answer repeats its last id, or all ids, or has none, although the events before were
    increments. Its log-probabilities tell which: they cover either all tokens or the new ones, each with its id.

    `ends` are the ids that end the answer here, because SGLang does not end it at them.
    """

    def __init__(self, *, takes_unlabelled: bool = False, ends: Sequence[int] = ()) -> None:
        self.result: GenerateResult | None = None
        self.is_over = False
        self._ends = frozenset(ends)
        self._versions: list[WeightVersion] = []  # of the tokens so far
        self._takes_unlabelled = takes_unlabelled
        self._reader = generate.ResultReader()

    def read(self, fields: JsonObject) -> TokenChunk:
        meta = as_object(get(fields, "meta_info", dict), "meta_info")
        if self._takes_unlabelled:
            meta = _labelled(meta)
            fields = {**fields, "meta_info": meta}
        finish = meta.get("finish_reason")
        if finish is not None and as_object(finish, "finish_reason").get("type") == FinishReason.ABORT:
            _raise_failure(as_object(finish, "finish_reason"))
            return self._read_abort(meta)
        chunk = self._reader.read(fields)
        self.result = self._reader.result
        return self._until_its_end(chunk, meta) if self._ends else chunk

    def _until_its_end(self, chunk: TokenChunk, meta: JsonObject) -> TokenChunk:
        """Return the chunk up to the first token of `ends`, with which the answer is over."""
        num_before = len(self._reader.tokens.ids) - len(chunk.token_ids)
        self._versions += chunk.version_of_each()
        index = next((i for i, token_id in enumerate(chunk.token_ids) if token_id in self._ends), None)
        if index is None:
            return chunk
        self.is_over = True
        num_tokens = num_before + index + 1
        spans = encode_spans(VersionSpan.of_tokens(self._versions[:num_tokens]))
        ending = {"finish_reason": {"type": FinishReason.STOP}, "weight_versions": spans}
        self.result = finished(self._reader.tokens.all().first(num_tokens), {**meta, **ending})
        return chunk.first(index + 1)

    def _read_abort(self, meta: JsonObject) -> TokenChunk:
        tokens = self._reader.tokens
        seen, after = len(tokens.ids), as_integer(meta.get("completion_tokens", 0), "completion_tokens")
        entries = _new_entries(meta.get("output_token_logprobs") or [], seen, after)
        tops = _new_entries(top_entries(meta), seen, after)
        chunk = decode_tokens([_id_of(entry) for entry in entries], entries, tops)
        tokens.add(chunk)
        spans = _cut(meta.get("weight_versions") or [], len(tokens.ids))
        self.result = finished(tokens.all(), {**meta, "weight_versions": spans})
        return chunk


def _labelled(meta: JsonObject) -> JsonObject:
    """Label weights that nobody has labelled: in the current label, and in the spans."""
    told, spans = label_first(meta, "weight_version"), meta.get("weight_versions")
    return {**told, "weight_versions": label_spans(cast("list[Any]", spans))} if isinstance(spans, list) else told


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


LOADS = "/v1/loads"

RECEIVED = "areal-agent-push:"
"""The prefix of a push's path, from which weights received by torch.distributed are loaded (scheduler_extension.py)."""


def decode_served(model_info: object) -> Served:
    """Read `/model_info`, which describes the current weights; the label in `/server_info` stays that of the start."""
    fields = as_object(model_info, control.MODEL_INFO)
    path = get(fields, "model_path", str)
    source = None if path.startswith(RECEIVED) else Path(path)
    return Served(source=source, label=get(fields, "weight_version", str))


def decode_start(server_info: object) -> EngineInfo:
    """Read what the server was started with, except for its vocabulary, which it does not report.

    Its context is `max_req_input_len`: a longer request within `context_length` is silently cut.
    """
    started = as_object(server_info, control.SERVER_INFO)
    return control.decode_info({**started, "context_length": None, "weight_version": UNLABELLED})


def tells_new_tokens(server_info: object) -> bool:
    """Return whether events hold only new tokens, as on the common wire."""
    return as_object(server_info, control.SERVER_INFO).get("incremental_streaming_output") is not False


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


IMAGE = "areal-agent-image"


def encode_images(images: Sequence[PromptImage]) -> list[str]:
    """Return files with their places, as our launcher lets SGLang take them (image_files.py)."""
    spans = [(image.span, b64encode(image.data).decode()) for image in images]
    return [f"{IMAGE}:{span.start}:{span.end}:{data}" for span, data in spans]


ACTION = "areal_agent."
CHECK_WEIGHTS = "/weights_checker"

_BETWEEN_REPLICAS = " | "  # as SGLang joins them


def _messages(body: object) -> list[str]:
    return get(as_object(body, CHECK_WEIGHTS), "message", str).split(_BETWEEN_REPLICAS)


class SglangServer(ForeignServer):
    kind = "SGLang"
    launcher = SGLANG_LAUNCHER
    generate_path = generate.GENERATE

    def encode(self, request: GenerateRequest, rid: str, label: str) -> dict[str, Any]:
        body = {**generate.encode_request(replace(request, images=()), is_streamed=True), "rid": rid}
        return {**body, "image_data": encode_images(request.images)} if request.images else body

    def reader(self, request: GenerateRequest) -> SglangAnswer:
        sampling = request.sampling
        ends = sampling.stop_token_ids if sampling.ignore_eos else ()
        return SglangAnswer(takes_unlabelled=self.takes_unlabelled, ends=ends)

    async def abort(self, rid: str) -> None:
        await self.transport.post(control.ABORT_REQUEST, control.Abort(rid=rid).encode())

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling; SGLang has no `wait`."""
        body = control.Pause(mode=PauseMode.RETRACT if mode is PauseMode.WAIT else mode).encode()
        await self.transport.post(control.PAUSE_GENERATION, body, has_limit=mode is not PauseMode.ABORT)

    async def resume(self) -> None:
        await self.transport.post(control.CONTINUE_GENERATION, {})

    async def load_folder(self, path: str, label: str, *, flush_cache: bool, num_bytes: int = 0) -> None:
        body = {"model_path": path, "weight_version": label, "flush_cache": flush_cache}
        await self.transport.post(control.UPDATE_FROM_DISK, body, refusal=WeightUpdateError, num_bytes=num_bytes)

    async def load_received(self, push_id: str, label: str, *, flush_cache: bool) -> None:
        """Load what the schedulers hold, like a folder whose name only they know."""
        await self.load_folder(RECEIVED + push_id, label, flush_cache=flush_cache)

    async def label(self) -> str:
        return (await self._served()).label

    async def ask(self, method: str, arguments: Sequence[str]) -> Sequence[str]:
        """Call a method of the schedulers and return each replica's answer."""
        return await self.call(CHECK_WEIGHTS, {"action": ACTION + method, "skip_tensor_list": arguments}, _messages)

    async def state(self) -> ServerState:
        """Return what it was started with, and the weights that serve now."""
        told = await self.transport.get(control.SERVER_INFO)
        started = self.transport.decoded(decode_start, control.SERVER_INFO, told)
        if not tells_new_tokens(told):
            raise EngineRejected(
                f"the SGLang server at {self.transport.base_url} repeats all tokens of an answer in every event; start "
                "it with --incremental-streaming-output"
            )
        return ServerState(
            model=Path(started.model_path),
            served=await self._served(),
            max_context_tokens=started.max_context_tokens,
            has_grammar=started.has_grammar,
        )

    async def stats(self, version: WeightVersion) -> EngineStats:
        """Return how many requests it runs now."""
        body = await self.transport.get(LOADS)
        return self.transport.decoded(lambda fields: decode_loads(fields, version), LOADS, body)

    async def probe(self, timeout_s: float) -> None:
        """Ask `/server_info`, which goes through the scheduler."""
        await self.transport.get(control.SERVER_INFO, timeout_s=timeout_s)

    async def _served(self) -> Served:
        return self.transport.decoded(decode_served, control.MODEL_INFO, await self.transport.get(control.MODEL_INFO))
