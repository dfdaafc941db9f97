"""Which GPUs the servers of an engine take, and how much of each, by their arguments. It starts none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from areal_agent.engine.config import EngineConfig
from areal_agent.errors import ConfigError

DEFAULT_FRACTION = 0.9
"""Of a GPU's memory, where the config names no share: about what SGLang and vLLM take by themselves."""

FRACTION_OF_ALL = ("--gpu-memory-utilization",)
"""vLLM's share has everything in it, SGLang's only weights and keys."""
FRACTION = ("--mem-fraction-static", *FRACTION_OF_ALL)
SHARDS = ("--tp-size", "--tp", "--tensor-parallel-size", "-tp")
REPLICAS = ("--dp-size", "--dp", "--data-parallel-size", "-dp")
FIRST_GPU = ("--base-gpu-id",)
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePlan:
    """Servers on GPUs `first_gpu`, `first_gpu + 1`, ...; with `engine.device: cuda` each has GPUs of its own.

    >>> two = {"backend": "sglang", "python": "p", "device": "cuda", "num_servers": 2}
    >>> plan = EnginePlan.of(EngineConfig(**two, server_args=("--tp-size=2", "--base-gpu-id", "4")))
    >>> [plan.num_servers_on(gpu) for gpu in (3, 4, 5, 6, 7, 8)], plan.first_gpu_of(1)
    ([0, 1, 1, 1, 1, 0], 6)
    """

    first_gpu: int = 0
    num_shards: int = 1  # GPUs that share one copy of the weights
    num_replicas: int = 1  # copies of one server
    num_servers: int = 1
    is_spread: bool = False  # each server has GPUs of its own
    memory_fraction: float = DEFAULT_FRACTION
    is_share_of_all: bool = False

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        given = read_arguments(config.server_args)
        return cls(
            first_gpu=int(_first(given, FIRST_GPU, config.first_gpu)),
            num_shards=max(1, int(_first(given, SHARDS, 1))),
            num_replicas=max(1, int(_first(given, REPLICAS, 1))),
            num_servers=config.num_servers,
            is_spread=config.device == "cuda" and config.num_servers > 1,
            memory_fraction=_first(given, FRACTION, DEFAULT_FRACTION),
            is_share_of_all=any(name in given for name in FRACTION_OF_ALL),
        )

    @property
    def num_sharing(self) -> int:
        """How many servers share what each of them has: a GPU, or the machine's memory."""
        return 1 if self.is_spread else self.num_servers

    @property
    def num_gpus(self) -> int:
        """Of one server."""
        return self.num_shards * self.num_replicas

    def gpus_of(self, server: int) -> range:
        """The GPUs of a server."""
        first = self.first_gpu_of(server)
        return range(first, first + self.num_gpus)

    def first_gpu_of(self, server: int) -> int:
        """Where a server's GPUs begin."""
        return self.first_gpu + (server * self.num_gpus if self.is_spread else 0)

    def num_servers_on(self, gpu: int) -> int:
        """How many have a shard there."""
        return sum(gpu in self.gpus_of(server) for server in range(self.num_servers))


def visible_gpus(config: EngineConfig, server: int, environ: Mapping[str, str]) -> dict[str, str]:
    """What shows a server its own GPUs alone, out of those that are seen here: for one that has no argument for it.

    Raises ConfigError when they are not enough.
    """
    if config.device != "cuda":
        return {}
    own, seen = EnginePlan.of(config).gpus_of(server), environ.get(VISIBLE_GPUS)
    known = seen.split(",") if seen else [str(gpu) for gpu in range(own.stop)]
    if own.stop > len(known):
        raise ConfigError(
            f"engine {server} is to have GPUs {own.start} to {own.stop - 1}, and {VISIBLE_GPUS} is {seen!r}; lower "
            "engine.first_gpu or engine.num_servers"
        )
    return {VISIBLE_GPUS: ",".join(known[own.start : own.stop])}


def may_be_on(config: EngineConfig, num_gpus: int) -> bool:
    """Whether the engine may hold memory of the first `num_gpus` GPUs, which are the trainer's.

    >>> [may_be_on(EngineConfig(device=device), 1) for device in ("auto", "cpu")]
    [True, False]
    >>> elsewhere = EngineConfig(backend="sglang", python="p", server_args=("--base-gpu-id", "2"))
    >>> may_be_on(elsewhere, 2), may_be_on(elsewhere, 3)
    (False, True)
    """
    if config.device == "cpu":
        return False
    if config.urls or config.url:
        return True  # nobody says where they run
    plan = EnginePlan.of(config)
    return any(plan.num_servers_on(gpu) for gpu in range(num_gpus))


def read_arguments(words: Sequence[str]) -> Mapping[str, str]:
    """`--name value` and `--name=value`, by name.

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


def _first(given: Mapping[str, str], names: Sequence[str], default: float) -> float:
    value = next((given[name] for name in names if name in given), None)
    return float(value) if value is not None and _is_number(value) else default


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
