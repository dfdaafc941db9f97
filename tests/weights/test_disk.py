"""The channel over folders.

- The embedded engine takes what was written, in float32 and bfloat16; tied weights are stored once.
- The folder that was handed out last stays whole while the next is written; the one before it goes.
- A folder has its own name only when it is whole: a write that fails leaves nothing.
- Folders are private, and gone after `close`.
"""

import stat
from pathlib import Path

import pytest
import torch
from torch import Tensor

from areal_agent.engine.embedded.weights import WeightLayout, take_weights
from areal_agent.types import DiskWeights
from areal_agent.weights.channels import DiskChannel
from tests.weights.test_shared_memory import Tied, parameters


def as_taken(weights: DiskWeights) -> dict[str, Tensor]:
    """By the engine's own reader, which checks every digest."""
    return dict(take_weights(weights, WeightLayout.of(Tied(0)), torch.device("cpu")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_engine_takes_what_was_written(tmp_path, dtype):
    taken = as_taken(DiskChannel(tmp_path, dtype).write(parameters(1)))
    assert taken.keys() == parameters(1).keys()
    assert all(torch.equal(taken[name], tensor.to(dtype)) for name, tensor in parameters(1).items())


def test_the_last_folder_stays_whole_and_the_one_before_goes(tmp_path):
    channel = DiskChannel(tmp_path, torch.float32)
    first, second, third = (channel.write(parameters(seed)) for seed in (1, 2, 3))
    assert not Path(first.path).exists()
    for seed, weights in ((2, second), (3, third)):
        assert torch.equal(as_taken(weights)["between.weight"], parameters(seed)["between.weight"])


def test_a_write_that_fails_leaves_nothing_and_the_last_folder(tmp_path):
    channel = DiskChannel(tmp_path, torch.float32)
    last = channel.write(parameters(1))
    with pytest.raises(NotImplementedError):
        channel.write({"norm.bias": torch.empty(6, device="meta")})
    assert [path.name for path in tmp_path.iterdir()] == [Path(last.path).name]
    assert as_taken(last)


def test_folders_are_private(tmp_path):
    assert stat.S_IMODE(Path(DiskChannel(tmp_path, torch.float32).write(parameters(0)).path).stat().st_mode) == 0o700


def test_closing_removes_the_folders(tmp_path):
    channel = DiskChannel(tmp_path, torch.float32)
    channel.write(parameters(0))
    channel.close()
    assert list(tmp_path.iterdir()) == []
