"""What is said to an engine and what it says: requests, tokens, pauses, weights. It knows nothing of I/O and torch.

Every record is frozen, keyword-only and holds plain data. Log-probabilities are in nats.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from areal_agent.types import FinishReason, SamplingParams, VersionSpan, WeightVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One call of an engine, tokens in. `request_id`s of one run have equal length (SGLang aborts by prefix)."""

    request_id: str
    input_ids: Sequence[int]  # a tuple; or `array("i")` where the prompt is long, which is a quarter of the work
    sampling: SamplingParams
    num_top_logprobs: int = 0  # how many of the likeliest tokens to report at each position


TopLogprobs = tuple[tuple[int, float], ...]
"""The likeliest tokens at one position, likeliest first: (token id, log-probability in nats)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenChunk:
    """Tokens of one request as they leave the engine: those that no chunk before held. All chunks make the result."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...] = ()  # one a token, or empty when none were asked for
    versions: tuple[VersionSpan, ...] = ()  # counted from the first of these; empty: not told before the end


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateResult:
    """What an engine sampled: C tokens, the log-probability of each (after temperature) and their version spans."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    cached_tokens: int = 0
    top_logprobs: tuple[TopLogprobs, ...] = ()  # one a token, or empty when none were asked for


class PauseMode(StrEnum):
    """What a pause does to the requests in flight; SGLang's names."""

    ABORT = "abort"  # they return what they have
    RETRACT = "retract"  # they stop at a token boundary; after resume the KV cache is recomputed (recompute)
    IN_PLACE = "in_place"  # they freeze and go on with the old KV cache (keep)
    WAIT = "wait"  # they end first, and those that have sampled nothing wait; vLLM's name, SGLang has no such mode


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """Where one tensor lies in a weight file. `dtype` is torch's name without the module: `float32`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedMemoryWeights:
    """A set of weights in a memory-mapped file of this host. `crc32` is over the bytes of `entries` in their order."""

    path: str
    entries: tuple[TensorEntry, ...]
    crc32: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskWeights:
    """A set of weights as a Hugging Face folder (config.json and safetensors)."""

    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaMemory:
    """A piece of a GPU's memory as another process of this host opens it (CUDA IPC); handles are base64."""

    gpu: str  # its UUID
    handle: str  # of the allocation
    offset: int  # in it
    num_bytes: int
    counter: str  # of the processes that have it open
    counter_offset: int
    event: str  # what was written before it may be read
    waits_for_event: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaWeights:
    """A set of weights in the memory of a GPU that trainer and engine share. Offsets count from its start."""

    memory: CudaMemory
    entries: tuple[TensorEntry, ...]
    checksum: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DistributedWeights:
    """A set of weights that the trainer sends to whoever asks at its store (torch.distributed).

    It comes as `num_bytes` bytes, in pieces of `bucket_bytes`; the offsets of `entries` count from their start.
    """

    host: str  # of the store
    port: int
    name: str  # of this set
    entries: tuple[TensorEntry, ...]
    num_bytes: int
    bucket_bytes: int
    checksum: int
    timeout_s: float  # how long either side waits for the next step of the other


Weights = SharedMemoryWeights | DiskWeights | CudaWeights | DistributedWeights
"""What a push can send."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """What an engine says of itself (`/server_info`, `/model_info`)."""

    model_path: str
    weight_version: WeightVersion
    vocab_size: int
    max_context_tokens: int
    has_grammar: bool = False  # it honours SamplingParams.json_schema
