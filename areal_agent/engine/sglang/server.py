"""One SGLang server, as `foreign.server.ForeignServer`. It knows no socket (transport.py) and no process.

What SGLang does otherwise than the common wire says, and what is done about it:

    an id outside the vocabulary ends the server         foreign/engine.py: checked against the model's config.json
    an abort takes ids by prefix, is lost at a pause     foreign/request.py: ids of equal length, streams to close
    `/health` samples a token: dead while paused         `/server_info` goes through the scheduler and needs no model
    a label does not move without being given            loader.py: every update gives one, and it is read back
    400 although the weights have changed                foreign/weights.py: paused first; whatever fails is undone
    idle connections are closed after 5 s                every call has its own: none fails because of that
    events may hold all tokens so far                    refused: a flag of its start says which
    what a folder lacks keeps its old value              foreign/tensors.py: proved whole before it is told of
    no pause lets requests end first (`wait`)            foreign/in_flight.py: they have ended, and others wait there

The seed of a request holds where the server was started with `--enable-deterministic-inference`.
"""

from pathlib import Path

from areal_agent.engine import wire
from areal_agent.engine.foreign.server import ServerState
from areal_agent.engine.sglang.dialect import SglangDialect
from areal_agent.engine.sglang.info import LOADS, decode_loads, decode_served, decode_start, tells_new_tokens
from areal_agent.engine.sglang.loader import SglangLoader
from areal_agent.engine.sglang.receiver import SglangReceiver
from areal_agent.engine.transport import Transport
from areal_agent.engine.wire import EngineStats
from areal_agent.engine_types import PauseMode
from areal_agent.errors import EngineRejected
from areal_agent.types import WeightVersion


class SglangServer:
    """Where it listens, and how it is spoken to."""

    kind = "SGLang"

    def __init__(self, base_url: str, *, takes_unlabelled: bool = False) -> None:
        """With `takes_unlabelled` weights that nobody has labelled are the first version (foreign/unlabelled.py)."""
        self.transport = Transport(base_url, keeps_connections=False)  # uvicorn closes them after 5 s
        self.dialect = SglangDialect(takes_unlabelled=takes_unlabelled)
        self.loader = SglangLoader(self.transport)
        self.receiver = SglangReceiver(self.transport, self.loader)

    async def state(self) -> ServerState:
        """What it was started with, and what serves now."""
        ask, read = self.transport.get, self.transport.decoded
        told = await ask(wire.SERVER_INFO)
        started = read(decode_start, wire.SERVER_INFO, told)
        if not tells_new_tokens(told):
            raise EngineRejected(
                f"the SGLang server at {self.transport.base_url} tells all tokens of an answer again and again; start "
                "it with --incremental-streaming-output"
            )
        return ServerState(
            model=Path(started.model_path),
            served=read(decode_served, wire.MODEL_INFO, await ask(wire.MODEL_INFO)),
            max_context_tokens=started.max_context_tokens,
            has_grammar=started.has_grammar,
        )

    async def stats(self, version: WeightVersion) -> EngineStats:
        """How many requests it runs now."""
        body = await self.transport.get(LOADS)
        return self.transport.decoded(lambda fields: decode_loads(fields, version), LOADS, body)

    async def probe(self, timeout_s: float) -> None:
        """`/server_info` goes through the scheduler."""
        await self.transport.get(wire.SERVER_INFO, timeout_s=timeout_s)

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling; it has no `wait`."""
        body = wire.encode_pause(wire.Pause(mode=PauseMode.RETRACT if mode is PauseMode.WAIT else mode))
        await self.transport.post(wire.PAUSE_GENERATION, body, has_limit=mode is not PauseMode.ABORT)

    async def resume(self) -> None:
        """Go on sampling."""
        await self.transport.post(wire.CONTINUE_GENERATION, {})
