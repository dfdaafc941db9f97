"""The channels over shared memory and over folders.

- The embedded engine reads what was written, in float32 and bfloat16, checking digests; tied weights are stored once.
- The slot or folder that was handed out last stays whole while the next is written.
- A folder gets its name only when it is whole: a write that fails leaves nothing.
- Files and folders are private, and gone after `close`; a missing folder and other parameters are refused.
"""

import stat
from pathlib import Path

import pytest
import torch

from areal_agent.engine.embedded.weights import WeightLayout, take_weights
from areal_agent.types import DiskWeights, SharedMemoryWeights
from areal_agent.weights.channels import DiskChannel, SharedMemoryChannel, layout


class Tied(torch.nn.Module):
    """An embedding whose weights are those of the output layer, a matrix, and a norm of odd size."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(7, 5)
        self.between = torch.nn.Linear(5, 5)
        self.norm = torch.nn.LayerNorm(5)
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight


def parameters(seed: int) -> dict[str, torch.Tensor]:
    return dict(Tied(seed).named_parameters())


@pytest.fixture
def channel(tmp_path: Path):
    channel = shared_memory(tmp_path)
    yield channel
    channel.close()


def as_taken(weights: SharedMemoryWeights | DiskWeights) -> dict[str, torch.Tensor]:
    """Read by the engine's own reader, which checks sizes and digests."""
    return dict(take_weights(weights, WeightLayout(Tied(0)), torch.device("cpu")))


def shared_memory(folder: Path, dtype: torch.dtype = torch.float32) -> SharedMemoryChannel:
    return SharedMemoryChannel(folder, layout(parameters(0).items(), dtype))


def disk(folder: Path, dtype: torch.dtype = torch.float32) -> DiskChannel:
    return DiskChannel(folder, dtype)


@pytest.mark.parametrize("open_channel", [shared_memory, disk])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_engine_reads_what_was_written(tmp_path, open_channel, dtype):
    taken = as_taken(open_channel(tmp_path, dtype).write(parameters(1)))
    assert taken.keys() == parameters(1).keys()
    assert all(torch.equal(taken[name], tensor.to(dtype)) for name, tensor in parameters(1).items())


@pytest.mark.parametrize(("open_channel", "mode"), [(shared_memory, 0o600), (disk, 0o700)])
def test_what_is_written_is_private_and_gone_after_close(tmp_path, open_channel, mode):
    channel = open_channel(tmp_path)
    assert stat.S_IMODE(Path(channel.write(parameters(0)).path).stat().st_mode) == mode
    channel.close()
    assert list(tmp_path.iterdir()) == []


def test_tied_weights_are_stored_once(channel):
    names = [entry.name for entry in channel.write(parameters(0)).entries]
    assert names.count("embedding.weight") == 1
    assert "head.weight" not in names


def test_the_slot_handed_out_last_stays_whole_while_the_next_is_written(channel):
    first = channel.write(parameters(1))
    second = channel.write(parameters(2))
    assert torch.equal(as_taken(first)["between.weight"], parameters(1)["between.weight"])
    paths = [first.path, second.path, *(channel.write(parameters(seed)).path for seed in (3, 4))]
    assert paths[0] == paths[2] != paths[1] == paths[3]


def test_a_folder_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        SharedMemoryChannel(tmp_path / "missing", layout(parameters(0).items(), torch.float32))


def test_other_parameters_are_refused(channel):
    wrong = parameters(0) | {"norm.bias": torch.zeros(6)}
    with pytest.raises(ValueError, match=r"do not fit the channel's layout, see norm\.bias"):
        channel.write(wrong)


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
