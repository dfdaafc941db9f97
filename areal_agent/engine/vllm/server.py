"""One vLLM server, as `foreign.server.ForeignServer`. It knows no socket (transport.py) and no process.

The server is started by launcher.py. What vLLM does otherwise than this project, and what is done about it:

    log-probabilities are before temperature             launcher.py: those that were sampled from are asked for
    a reload leaves a tied head as it was, on a CPU      worker_extension.py: the head is packed again
    loaded adapters are those of later requests          worker_extension.py: they take the place of those before
    a load does not move the label                       loader.py: it is given afterwards, and read back
    flushing may be refused, with a success              loader.py: the answer is read; requests are taken back first
    keys and values are found again by tokens alone      dialect.py: salted with the label of the weights
    the folder that serves is not told after a load      foreign/weights.py: known here, or nothing can be put back
    `/health` answers while the scheduler hangs          `/is_paused` goes through the scheduler
    an answer ends at the end token of the model         sampling.py: at the tokens of the request alone
    likeliest tokens have the sampled one in front       answer.py: one more is asked for, and they are ranked
    idle connections are closed after 5 s                every call has its own: none fails because of that
    an id outside the vocabulary, a prompt too long      foreign/engine.py: checked with this project's words

Seeds hold. On a CPU it wants a head dimension of 32 or more.
"""

from areal_agent.engine.foreign.server import ServerState
from areal_agent.engine.foreign.weights import Served
from areal_agent.engine.transport import Transport
from areal_agent.engine.vllm.dialect import VllmDialect
from areal_agent.engine.vllm.info import (
    IS_PAUSED,
    METRICS,
    MODELS,
    UNLABELLED,
    WEIGHT_INFO,
    decode_label,
    decode_metrics,
    decode_started,
)
from areal_agent.engine.vllm.loader import VllmLoader
from areal_agent.engine.vllm.receiver import VllmReceiver
from areal_agent.engine.wire import EngineStats
from areal_agent.engine_types import PauseMode
from areal_agent.types import WeightVersion

_MODES = {PauseMode.ABORT: "abort", PauseMode.RETRACT: "keep", PauseMode.IN_PLACE: "keep", PauseMode.WAIT: "wait"}


class VllmServer:
    """Where it listens, and how it is spoken to."""

    kind = "vLLM"

    def __init__(self, base_url: str, *, takes_unlabelled: bool = False) -> None:
        """With `takes_unlabelled` weights that nobody has labelled are the first version (foreign/unlabelled.py)."""
        self.transport = Transport(base_url, keeps_connections=False)  # uvicorn closes them after 5 s
        self.dialect = VllmDialect(takes_unlabelled=takes_unlabelled)
        self.loader = VllmLoader(self.transport)
        self.receiver = VllmReceiver(self.transport, self.loader)

    async def state(self) -> ServerState:
        """What it was started with, and what serves now: from where, it tells of what it began with alone."""
        ask, read = self.transport.get, self.transport.decoded
        started = read(decode_started, MODELS, await ask(MODELS))
        label = read(decode_label, WEIGHT_INFO, await ask(WEIGHT_INFO))
        begun_with = started.adapter or started.model
        self.dialect.applies_adapter = started.adapter is not None
        return ServerState(
            model=started.model,
            served=Served(source=begun_with if label == UNLABELLED else None, label=label),
            max_context_tokens=started.max_context_tokens,
            has_grammar=True,
            applies_adapters=started.adapter is not None,
        )

    async def stats(self, version: WeightVersion) -> EngineStats:
        """How many requests it runs now, and what it has sampled since it started."""
        text = await self.transport.text(METRICS)
        return self.transport.decoded(lambda body: decode_metrics(body, version), METRICS, text)

    async def probe(self, timeout_s: float) -> None:
        """`/is_paused` goes through the scheduler."""
        await self.transport.get(IS_PAUSED, timeout_s=timeout_s)

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. `wait` takes as long as the requests of other clients."""
        path = f"/pause?mode={_MODES[mode]}&clear_cache=false"
        await self.transport.post(path, {}, has_limit=mode is not PauseMode.WAIT)

    async def resume(self) -> None:
        """Go on sampling."""
        await self.transport.post("/resume", {})
