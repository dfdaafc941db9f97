"""Sends weights by torch.distributed for tests, and lists what may be wrong with them. A helper of tests."""

import dataclasses
import socket
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM

from areal_agent.types import DistributedWeights, TensorEntry, WeightPart
from areal_agent.weights.channels import DistributedChannel, joined, layout

GONE_S = 0.5
"""The time after which somebody who is missing is given up."""


def parameters_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())


class Receiver(Protocol):
    """A receiver of pushes. `serves`: weights by name, or the folder that it has loaded."""

    serves: str | dict[str, torch.Tensor]


def serve(receivers: Sequence[Receiver], folder: Path) -> bool:
    """Return whether all receivers have exactly the weights of this folder."""
    expected = parameters_of(folder)
    return all(
        isinstance(one.serves, dict)
        and one.serves.keys() == expected.keys()
        and all(torch.equal(one.serves[name], expected[name]) for name in expected)
        for one in receivers
    )


NUM_RANKS = 2


class Channels:
    """The channels of a trainer's ranks, in one process."""

    def __init__(self, entries: tuple[TensorEntry, ...], *, timeout_s: float, num_ranks: int = NUM_RANKS) -> None:
        """Make them with many buckets. Only a hang takes `timeout_s`."""
        options: dict[str, Any] = {"host": "127.0.0.1", "bucket_bytes": 2**16, "timeout_s": timeout_s}
        self._ranks = [
            DistributedChannel(entries, torch.device("cpu"), rank=rank, num_ranks=num_ranks, **options)
            for rank in range(num_ranks)
        ]

    def write(self, parameters: dict[str, torch.Tensor]) -> DistributedWeights:
        return joined([rank.write(parameters) for rank in self._ranks])

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


@contextmanager
def open_channel(model: Path, timeout_s: float = 120.0) -> Generator[Channels]:
    """Open the channels of a trainer of this model."""
    channels = Channels(layout(parameters_of(model).items(), torch.float32), timeout_s=timeout_s)
    yield channels
    channels.close()


def with_last_part(weights: DistributedWeights, spoil: Callable[[WeightPart], WeightPart]) -> DistributedWeights:
    *others, last = weights.parts
    return dataclasses.replace(weights, parts=(*others, spoil(last)))


def damaged(weights: DistributedWeights) -> DistributedWeights:
    return with_last_part(weights, lambda part: dataclasses.replace(part, checksum=part.checksum ^ 1))


def lacking_a_tensor(weights: DistributedWeights) -> DistributedWeights:
    return dataclasses.replace(weights, entries=weights.entries[1:])


def of_another_shape(weights: DistributedWeights) -> DistributedWeights:
    first, *rest = weights.entries
    return dataclasses.replace(weights, entries=(dataclasses.replace(first, shape=(3,)), *rest))


def from_nobody(weights: DistributedWeights) -> DistributedWeights:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    weights = dataclasses.replace(weights, timeout_s=GONE_S)
    return with_last_part(weights, lambda part: dataclasses.replace(part, port=port))


def written_before(weights: DistributedWeights) -> DistributedWeights:
    return with_last_part(weights, lambda part: dataclasses.replace(part, name="before"))


FAULTS = {
    damaged: "checksum",
    lacking_a_tensor: "lack 1 tensors",
    of_another_shape: r"has shape \(3,\) that were published",
    from_nobody: "did not take the weights: failed",
    written_before: "has newer weights",
}
"""Faults of a transfer, and the error for each that the client of a foreign server reports."""
