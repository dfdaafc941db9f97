"""The shared-memory channel.

- What the embedded engine's reader takes out is what was written, checksum included, in float32 and bfloat16.
- Tied weights are stored once; the layout is that of `named_parameters()`.
- The slot that was handed out last stays whole while the next weights are written; the slots take turns.
- Files have mode 0600 and are gone after `close`; parameters of another shape are refused.
"""

import stat
from pathlib import Path

import pytest
import torch

from areal_agent.engine.embedded.weights import WeightLayout, read_weights
from areal_agent.types import SharedMemoryWeights
from areal_agent.weights.channels import SharedMemoryChannel, layout


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
    channel = SharedMemoryChannel(tmp_path, layout(parameters(0).items(), torch.float32))
    yield channel
    channel.close()


def as_read(weights: SharedMemoryWeights) -> dict[str, torch.Tensor]:
    """By the engine's own reader, which checks sizes and the checksum."""
    return {name: tensor.clone() for name, tensor in read_weights(weights, WeightLayout.of(Tied(0))).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_engine_reads_what_was_written(tmp_path, dtype):
    channel = SharedMemoryChannel(tmp_path, layout(parameters(1).items(), dtype))
    read = as_read(channel.write(parameters(1)))
    assert read.keys() == parameters(1).keys()
    assert all(torch.equal(read[name], tensor.to(dtype)) for name, tensor in parameters(1).items())


def test_tied_weights_are_stored_once(channel):
    names = [entry.name for entry in channel.write(parameters(0)).entries]
    assert names.count("embedding.weight") == 1
    assert "head.weight" not in names


def test_the_slot_handed_out_last_stays_whole_while_the_next_is_written(channel):
    first = channel.write(parameters(1))
    second = channel.write(parameters(2))
    assert first.path != second.path
    assert torch.equal(as_read(first)["between.weight"], parameters(1)["between.weight"])


def test_the_slots_take_turns(channel):
    paths = [channel.write(parameters(seed)).path for seed in range(4)]
    assert paths[0] == paths[2] != paths[1] == paths[3]


def test_files_are_private(channel):
    path = Path(channel.write(parameters(0)).path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_closing_removes_the_files(tmp_path):
    channel = SharedMemoryChannel(tmp_path, layout(parameters(0).items(), torch.float32))
    channel.write(parameters(0))
    channel.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        SharedMemoryChannel(tmp_path / "missing", layout(parameters(0).items(), torch.float32))


def test_other_parameters_are_refused(channel):
    wrong = parameters(0) | {"norm.bias": torch.zeros(6)}
    with pytest.raises(ValueError, match=r"do not fit the channel's layout, see norm\.bias"):
        channel.write(wrong)
