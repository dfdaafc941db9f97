"""The config section of the inference engine, the GPUs of each server, and the KV cache's size. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from areal_agent.dtype import DType
from areal_agent.engine.address import Backend
from areal_agent.errors import ConfigError
from areal_agent.section import Section
from areal_agent.threads import Threads


class EngineConfig(Section):
    """The inference engine. Its model, seed and weight version are derived from the rest of the config."""

    backend: Backend = "embedded"
    """`embedded`: the engine that comes with areal_agent, in processes of its own. `sglang`, `vllm`: their servers,
    started with `python` or running at `urls`. With SGLang, seeds of requests need its
    `--enable-deterministic-inference`."""
    python: str | None = None
    """The Python of an environment with SGLang or vLLM, which starts the servers. Each needs an environment of its own,
    because of the versions that it pins."""
    num_servers: Annotated[int, Field(ge=1, le=64)] = 1
    """Servers to start, each in a process with `threads` of its own. Each turn goes to the server that has its
    beginning in the cache, unless that one is much busier than others. With `device: cuda` each has its own GPUs."""
    first_gpu: Annotated[int, Field(ge=0)] = 0
    """With `device: cuda`: the first GPU of the first server; the GPUs of further servers follow. `server_args` set the
    number of GPUs of an SGLang or vLLM server."""
    server_args: tuple[str, ...] = ()
    """Further arguments of `sglang.launch_server`, as in `["--mem-fraction-static", "0.6"]`, or of `vllm serve`."""
    urls: tuple[Annotated[str, Field(pattern=r"^https?://[^/]+")], ...] = ()
    """Running servers of SGLang or vLLM that only this run uses and that see its files: they are given its weights.
    They are SGLang's unless `backend` is `vllm`. Start SGLang's with `--incremental-streaming-output`, and vLLM's with
    areal_agent/engine/vllm/launcher.py."""
    url: Annotated[str, Field(pattern=r"^https?://[^/]+")] | None = None
    """An engine that runs already, on this machine; with `rollout.gateway_url`, the engine behind that gateway. The
    server reports its kind; if `backend` is set, it has to match."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the engine on 127.0.0.1 if it is one server; 0 picks a free one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: a GPU if there is one."""
    dtype: DType = "auto"
    """What the model computes in. `auto` is bfloat16 on a GPU, and on a CPU that multiplies it natively (AMX,
    AVX512-BF16, ARM's BF16) with models of a hidden size of 512 or more; else float32. On a CPU the embeddings, the
    last norm and the output layer are float32 in any case. With SGLang and vLLM `auto` is their own choice on a GPU,
    and float32 on a CPU."""
    threads: Threads = "auto"
    """CPU threads of each engine process. `auto` shares out the machine's cores between engine and trainer where both
    compute on its CPU, for a model of a hidden size of 512 or more; else, and on a Ray cluster, it is 1. Engines and
    trainer together should not exceed the cores of the machine."""
    max_running_requests: Annotated[int, Field(ge=1, le=4096)] = 64
    """Requests that sample at the same time; further ones queue. On a GPU the embedded engine allocates their whole
    contexts at the start; if half of `kv_tokens` is less than that, fewer sample at the same time."""
    max_context_tokens: Annotated[int, Field(ge=16, le=1_048_576)] = 1024
    """The limit of prompt and completion of one request together."""
    kv_tokens: Annotated[int, Field(ge=16)] | None = None
    """Tokens whose keys and values are kept, of running requests and of those that may be continued. Default: what fits
    into a quarter of the machine's memory (on a GPU: half of what is free), divided among the servers there, and at
    most two contexts for each running request; with SGLang what its `--mem-fraction-static` gives, with vLLM its
    `--gpu-memory-utilization`."""
    leave_gib: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """GiB that keys and values leave free, mainly for a trainer on the same GPU: they take the rest of what is free
    once the engine's model is loaded, at most two contexts for each running request. A trainer takes 16 bytes a
    parameter (weights, gradients, AdamW's two moments), 2 bytes for each that it publishes, and its activations. The
    engine takes its own activations from it, and 2 bytes a parameter to hold new weights beside the current ones."""
    release_kv: bool = False
    """Free the memory of keys and values while the trainer trains, for a trainer on the same GPU that needs it. Answers
    in progress wait for the end of the train step, and their keys and values are then recomputed."""
    on_push: Literal["interrupt", "turn_boundary", "drain"] = "interrupt"
    """What new weights do to answers in progress. `interrupt`: they stop at a token and continue under the new weights.
    `turn_boundary`: they finish under the old weights first, and the next turns wait. `drain`: whole rollouts finish
    first."""
    startup_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """How long the engine may take to load the model and answer."""
    hung_after_s: Annotated[float, Field(gt=0)] = 30.0
    """A server that has neither answered nor sampled a token for this long counts as hung, and its turns continue at
    other servers. Once it answers, it is given the current weights and serves again. A slow server is left alone."""
    wait_s: Annotated[float, Field(gt=0)] = 120.0
    """How long turns and pushes wait while no server serves, before they fail."""

    @property
    def num_threads(self) -> int:
        """`threads` as a number; 1 for an `auto` that nobody has resolved (areal_agent/threads.py)."""
        return 1 if self.threads == "auto" else self.threads

    @model_validator(mode="before")
    @classmethod
    def _urls_are_of_sglang(cls, values: Any) -> Any:
        match values:
            case {"urls": [_, *_]}:
                return {"backend": "sglang"} | values
            case _:
                return values

    @model_validator(mode="after")
    def _fits_its_backend(self) -> Self:
        if self.backend == "embedded":
            self._refuse(("python", "server_args", "urls"), "only applies to engine.backend sglang and vllm")
            if self.kv_tokens is not None and self.leave_gib is not None:
                raise ValueError(
                    f"engine.kv_tokens is {self.kv_tokens} and engine.leave_gib {self.leave_gib:g}, but each alone "
                    "determines how much keys and values take; leave one out"
                )
            if self.leave_gib is not None and self.num_servers > 1:
                raise ValueError(
                    f"engine.leave_gib is {self.leave_gib:g}, but engine.num_servers is {self.num_servers}: the "
                    "first would leave nothing for the others; set engine.kv_tokens for each"
                )
        else:
            self._fits_a_foreign_server()
        if self.first_gpu and self.device != "cuda":
            raise ValueError(
                f"engine.first_gpu is {self.first_gpu}, but engine.device is {self.device!r}; set that to 'cuda'"
            )
        if self.port and self.num_servers > 1:
            raise ValueError(
                f"engine.port is {self.port}, but engine.num_servers is {self.num_servers}; leave port out"
            )
        return self

    def _fits_a_foreign_server(self) -> None:
        self._refuse(("leave_gib", "release_kv"), "only applies to the embedded engine")
        if self.url is not None:
            self._refuse(("urls",), "names the servers of a run, but engine.url the engine behind a gateway")
        elif self.urls:
            started = ("python", "num_servers", "first_gpu", "server_args", "port", "device", "dtype", "threads")
            self._refuse(
                (*started, "max_running_requests", "kv_tokens"),
                "only applies to servers that the run starts, but those of engine.urls run already",
            )
        elif self.python is None:
            raise ValueError(
                f"engine.backend is {self.backend!r}: set engine.python to the Python of an environment that has it, "
                "or engine.urls to servers that run"
            )
        if self.backend == "vllm" and self.device == "cpu":
            raise ValueError("engine.device is 'cpu', but vLLM's build decides that; leave it out")
        if self.first_gpu and any(word.startswith("--base-gpu-id") for word in self.server_args):
            raise ValueError("engine.first_gpu and --base-gpu-id in engine.server_args are the same; leave one out")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError(f"engine.urls names a server twice: {', '.join(self.urls)}")

    def _refuse(self, names: tuple[str, ...], why: str) -> None:
        """Refuse options that would have no effect."""
        for name in names:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"engine.{name} {why}; leave it out")


DEFAULT_FRACTION = 0.9
"""The fraction of a GPU's memory that SGLang and vLLM take, about, if the config does not set it."""

FRACTION_OF_ALL = "--gpu-memory-utilization"
"""vLLM's fraction includes everything, SGLang's only weights and keys."""

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePlan:
    """Servers on GPUs `first_gpu`, `first_gpu + 1`, ...; with `engine.device: cuda` each has its own GPUs.

    >>> two = {"backend": "sglang", "python": "p", "device": "cuda", "num_servers": 2}
    >>> plan = EnginePlan.of(EngineConfig(**two, server_args=("--tp-size=2", "--base-gpu-id", "4")))
    >>> [plan.num_servers_on(gpu) for gpu in (3, 4, 5, 6, 7, 8)], plan.first_gpu_of(1)
    ([0, 1, 1, 1, 1, 0], 6)
    """

    first_gpu: int = 0
    num_shards: int = 1  # GPUs that share one copy of the weights
    num_replicas: int = 1  # copies of one server
    num_servers: int = 1
    is_spread: bool = False  # each server has its own GPUs
    memory_fraction: float = DEFAULT_FRACTION
    is_share_of_all: bool = False

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        given = read_arguments(config.server_args)
        return cls(
            first_gpu=int(_first(given, config.first_gpu, "--base-gpu-id")),
            num_shards=max(1, int(_first(given, 1, "--tp-size", "--tp", "--tensor-parallel-size", "-tp"))),
            num_replicas=max(1, int(_first(given, 1, "--dp-size", "--dp", "--data-parallel-size", "-dp"))),
            num_servers=config.num_servers,
            is_spread=config.device == "cuda" and config.num_servers > 1,
            memory_fraction=_first(given, DEFAULT_FRACTION, "--mem-fraction-static", FRACTION_OF_ALL),
            is_share_of_all=FRACTION_OF_ALL in given,
        )

    @property
    def num_sharing(self) -> int:
        """The number of servers that share one device: a GPU, or the machine's memory."""
        return 1 if self.is_spread else self.num_servers

    @property
    def num_gpus(self) -> int:
        """The number of GPUs of one server."""
        return self.num_shards * self.num_replicas

    def first_gpu_of(self, server: int) -> int:
        return self.first_gpu + (server * self.num_gpus if self.is_spread else 0)

    def gpus_of(self, server: int) -> range:
        first = self.first_gpu_of(server)
        return range(first, first + self.num_gpus)

    def num_servers_on(self, gpu: int) -> int:
        """Return the number of servers with a shard on this GPU."""
        return sum(gpu in self.gpus_of(server) for server in range(self.num_servers))


def visible_gpus(config: EngineConfig, server: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that shows a server only its own GPUs; for servers that have no argument for this.

    Raises ConfigError when too few are visible here.
    """
    if config.device != "cuda":
        return {}
    own, seen = EnginePlan.of(config).gpus_of(server), environ.get(VISIBLE_GPUS)
    known = seen.split(",") if seen else [str(gpu) for gpu in range(own.stop)]
    if own.stop > len(known):
        raise ConfigError(
            f"engine {server} is to have GPUs {own.start} to {own.stop - 1}, but {VISIBLE_GPUS} is {seen!r}; lower "
            "engine.first_gpu or engine.num_servers"
        )
    return {VISIBLE_GPUS: ",".join(known[own.start : own.stop])}


def may_be_on(config: EngineConfig, num_gpus: int) -> bool:
    """Return whether the engine may use memory of the first `num_gpus` GPUs, which are the trainer's.

    >>> [may_be_on(EngineConfig(device=device), 1) for device in ("auto", "cpu")]
    [True, False]
    >>> elsewhere = EngineConfig(backend="sglang", python="p", server_args=("--base-gpu-id", "2"))
    >>> may_be_on(elsewhere, 2), may_be_on(elsewhere, 3)
    (False, True)
    """
    if config.device == "cpu":
        return False
    if config.urls or config.url:
        return True  # their GPUs are unknown
    plan = EnginePlan.of(config)
    return any(plan.num_servers_on(gpu) for gpu in range(num_gpus))


def may_open_memory(config: EngineConfig, num_gpus: int) -> bool:
    """Return whether the engine is a single embedded one of this machine, which may be on one of the trainer's GPUs.

    >>> [may_open_memory(EngineConfig(num_servers=number), 1) for number in (1, 2)]
    [True, False]
    """
    is_ours = config.backend == "embedded" and not config.urls and not config.url
    return is_ours and config.num_servers == 1 and may_be_on(config, num_gpus)


def read_arguments(words: Sequence[str]) -> Mapping[str, str]:
    """Read `--name value` and `--name=value`, by name.

    >>> read_arguments(["--a", "1", "--b=2", "--c"])
    {'--a': '1', '--b': '2', '--c': ''}
    """
    given: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("-") and not _is_number(word):
            name, _, value = word.partition("=")
            given[name] = value
        elif name:
            given[name] = word
    return given


def _first(given: Mapping[str, str], default: float, *names: str) -> float:
    value = next((given[name] for name in names if name in given), None)
    return float(value) if value is not None and _is_number(value) else default


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


GPU_SHARE = 0.5
"""The fraction of the memory free after loading the model that keys and values take, unless `leave_gib` is set. The
rest is for activations and a trainer."""

CPU_SHARE = 0.25
"""The fraction of the machine's memory that keys and values take, unless `leave_gib` is set."""

CONTEXTS_A_SLOT = 2
"""The number of contexts kept for each request that may run: its own, and an ended one that may be continued."""


def default_kv_tokens(
    *,
    is_gpu: bool,
    free_bytes: int,
    all_bytes: int,
    leave_bytes: int | None,
    num_sharing: int,
    token_bytes: int,
    num_slots: int,
    max_context_tokens: int,
) -> int:
    """Return how many tokens' keys and values one of `num_sharing` engines on a device keeps by default.

    They fit into a fraction of the device's memory, or into all that is free but `leave_bytes`.

    >>> [default_kv_tokens(is_gpu=False, free_bytes=3000, all_bytes=4000, leave_bytes=None, num_sharing=number,
    ...                    token_bytes=10, num_slots=4, max_context_tokens=20) for number in (1, 2)]
    [100, 50]
    """
    if leave_bytes is not None:
        room = free_bytes - leave_bytes
    else:
        room = GPU_SHARE * free_bytes if is_gpu else CPU_SHARE * all_bytes
    fitting = max(0, int(room)) // num_sharing // token_bytes
    return min(fitting, CONTEXTS_A_SLOT * num_slots * max_context_tokens)
