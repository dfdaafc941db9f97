"""Which GPUs an engine takes, and how much of each, by its arguments. It starts none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from areal_agent.engine.config import EngineConfig

DEFAULT_FRACTION = 0.9
"""Of a GPU's memory, where the config names no share: about what SGLang and vLLM take by themselves."""

FRACTION_OF_ALL = ("--gpu-memory-utilization",)
"""vLLM's share has everything in it, SGLang's only weights and keys."""
FRACTION = ("--mem-fraction-static", *FRACTION_OF_ALL)
SHARDS = ("--tp-size", "--tp", "--tensor-parallel-size", "-tp")
REPLICAS = ("--dp-size", "--dp", "--data-parallel-size", "-dp")
FIRST_GPU = ("--base-gpu-id",)


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePlan:
    """Servers on GPUs `first_gpu`, `first_gpu + 1`, ...

    >>> config = EngineConfig(backend="sglang", python="p", server_args=("--tp-size=2", "--base-gpu-id", "4"))
    >>> [EnginePlan.of(config).num_servers_on(number) for number in (3, 4, 5, 6)]
    [0, 1, 1, 0]
    """

    first_gpu: int = 0
    num_shards: int = 1  # GPUs that share one copy of the weights
    num_replicas: int = 1  # copies of one server
    num_servers: int = 1
    memory_fraction: float = DEFAULT_FRACTION
    is_share_of_all: bool = False

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        given = read_arguments(config.server_args)
        return cls(
            first_gpu=int(_first(given, FIRST_GPU, 0)),
            num_shards=max(1, int(_first(given, SHARDS, 1))),
            num_replicas=max(1, int(_first(given, REPLICAS, 1))),
            num_servers=config.num_servers,
            memory_fraction=_first(given, FRACTION, DEFAULT_FRACTION),
            is_share_of_all=any(name in given for name in FRACTION_OF_ALL),
        )

    def num_servers_on(self, gpu: int) -> int:
        """How many have a shard there: servers of one config are given the same GPUs."""
        num_gpus = self.num_shards * self.num_replicas
        return self.num_servers if self.first_gpu <= gpu < self.first_gpu + num_gpus else 0


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
