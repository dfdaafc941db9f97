"""Sends weights by torch.distributed for tests, and lists what may be wrong with them. A helper of tests."""

import dataclasses
import socket
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoModelForCausalLM

from areal_agent.types import DistributedWeights
from areal_agent.weights.channels import DistributedChannel, layout

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


@contextmanager
def open_channel(model: Path, timeout_s: float = 120.0) -> Generator[DistributedChannel]:
    """Open the channel of a trainer of this model, with many buckets. Only a hang takes `timeout_s`."""
    entries = layout(parameters_of(model).items(), torch.float32)
    channel = DistributedChannel(
        entries, torch.device("cpu"), host="127.0.0.1", bucket_bytes=2**16, timeout_s=timeout_s
    )
    yield channel
    channel.close()


def damaged(weights: DistributedWeights) -> DistributedWeights:
    return dataclasses.replace(weights, checksum=weights.checksum ^ 1)


def lacking_a_tensor(weights: DistributedWeights) -> DistributedWeights:
    return dataclasses.replace(weights, entries=weights.entries[1:])


def of_another_shape(weights: DistributedWeights) -> DistributedWeights:
    first, *rest = weights.entries
    return dataclasses.replace(weights, entries=(dataclasses.replace(first, shape=(3,)), *rest))


def from_nobody(weights: DistributedWeights) -> DistributedWeights:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        return dataclasses.replace(weights, port=nobody.getsockname()[1], timeout_s=GONE_S)


def written_before(weights: DistributedWeights) -> DistributedWeights:
    return dataclasses.replace(weights, name="before")


FAULTS = {
    damaged: "checksum",
    lacking_a_tensor: "lack 1 tensors",
    of_another_shape: r"has shape \(3,\) that were published",
    from_nobody: "did not take the weights: failed",
    written_before: "has newer weights",
}
"""Faults of a transfer, and the error for each that the client of a foreign server reports."""
