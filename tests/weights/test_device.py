"""Weights in memory that the trainer shares with an engine on its device, by the form that a CPU has (sharing.py).

- An engine in another process takes what was written, in float32 and bfloat16, and keeps it when that is overwritten.
- The last two sets stay. What was overwritten, lies on another device, or is no handle, is refused. The record
  decides nothing by itself.
- The memory is private, and gone after `close`.
- Where engines cannot open the memory, or the trainer cannot share it, pushes go through the host's memory for good.
"""

import json
import stat
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.engine.embedded.weights import WeightLayout, take_weights
from areal_agent.errors import EnginesGone, WeightUpdateError
from areal_agent.trainer.config import TrainerConfig
from areal_agent.trainer.trainer import Trainer, TrainerSetup
from areal_agent.types import DeviceWeights, SharedMemoryWeights
from areal_agent.weights.channels import DeviceChannel, layout
from areal_agent.weights.push import publish_and_push
from tests.fake_gpu import FakeGpu
from tests.weights.test_channels import Tied, parameters

CPU = torch.device("cpu")
ENGINE = """
import json, sys, torch
from areal_agent.engine.embedded.weights import WeightLayout, take_weights
from areal_agent.trainer.client import WEIGHTS
from tests.weights.test_channels import Tied
taken = take_weights(WEIGHTS.validate_json(sys.argv[1]), WeightLayout(Tied(0)), torch.device("cpu"))
print(json.dumps({name: one.double().tolist() for name, one in taken.items()}))
"""


@pytest.fixture
def channel(tmp_path):
    channel = DeviceChannel(layout(parameters(0).items(), torch.float32), CPU, tmp_path)
    yield channel
    channel.close()


def take(weights):
    return take_weights(weights, WeightLayout(Tied(0)), CPU)


def test_another_process_takes_what_was_written(tmp_path):
    channel = DeviceChannel(layout(parameters(0).items(), torch.bfloat16), CPU, tmp_path)
    weights = channel.write(parameters(1))
    command = [sys.executable, "-c", ENGINE, json.dumps(asdict(weights))]
    taken = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    assert taken == {name: one.bfloat16().double().tolist() for name, one in parameters(1).items()}
    channel.close()


def test_the_last_two_sets_can_be_taken_and_what_was_overwritten_is_refused(channel):
    first = channel.write(parameters(1))
    taken = take(first)
    second = channel.write(parameters(2))
    for weights, seed in ((first, 1), (second, 2)):  # an engine that was started anew is brought to the first one
        assert all(torch.equal(take(weights)[name], one) for name, one in parameters(seed).items())
    channel.write(parameters(3))
    assert all(torch.equal(taken[name], one) for name, one in parameters(1).items())
    with pytest.raises(WeightUpdateError, match="they were overwritten"):
        take(first)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "GPU-1"}, "they lie on the GPU GPU-1, and the engine computes on a CPU"),
        ({"handle": "{"}, "cannot be opened"),
        ({"handle": "5"}, "cannot be opened"),
        ({"handle": '["/nowhere", 4096]'}, "there is no '/nowhere' of 4096 bytes"),
        ({"handle": '["/dev/null", 4096]'}, "there is no '/dev/null' of 4096 bytes"),
        ({"handle": "[1, null]"}, "cannot be opened"),
        ({"checksum": 5}, "are not those of its record"),
        ({"entries": ()}, "have no tensors"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(channel, change, message):
    with pytest.raises(WeightUpdateError, match=message):
        take(replace(channel.write(parameters(1)), **change))


def test_entries_beyond_the_memory_are_refused(channel):
    weights = channel.write(parameters(1))
    far = [replace(one, offset=one.offset + 4096) for one in weights.entries]
    with pytest.raises(WeightUpdateError, match="are not those of its record"):
        take(replace(weights, entries=tuple(far)))


def test_the_memory_is_private_and_gone_after_close(channel, tmp_path):
    channel.write(parameters(0))
    assert [stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()] == [0o600, 0o600]
    channel.close()
    assert list(tmp_path.iterdir()) == []


class Refusing:
    """Publishes both forms, and pushes to an engine that refuses those in a GPU's memory with `error`."""

    def __init__(self, error):
        self.error, self.pushed = error, []

    async def publish(self, through_host):
        if through_host:
            return SharedMemoryWeights(path="x", entries=(), crc32=0)
        return DeviceWeights(handle="", device="", entries=(), checksum=0)

    async def push(self, weights):
        self.pushed.append(type(weights))
        if isinstance(weights, DeviceWeights):
            raise self.error
        return "pushed"


async def test_an_engine_that_cannot_open_it_gets_weights_through_the_host(caplog):
    run = Refusing(WeightUpdateError("no permission"))
    assert await publish_and_push(run.publish, run.push) == "pushed"
    assert run.pushed == [DeviceWeights, SharedMemoryWeights]
    assert "through the host's memory from now on: no permission" in caplog.text
    gone = Refusing(EnginesGone("gone"))
    with pytest.raises(EnginesGone):
        await publish_and_push(gone.publish, gone.push)


def test_a_trainer_that_cannot_share_it_publishes_through_the_host(tmp_path, small_model, caplog, monkeypatch):
    setup = TrainerSetup(
        model=small_model,
        trainer=TrainerConfig(device="cuda", dtype="float32"),
        algorithm=AlgorithmConfig(),
        seed=0,
        shared_memory=tmp_path,
        may_open_memory=True,
    )
    with FakeGpu():  # which shares nothing
        trainer = Trainer(setup)
        assert isinstance(trainer.publish(), SharedMemoryWeights)
        assert "the GPU's cannot be shared" in caplog.text
        trainer._channel.close()
        trainer._channel = DeviceChannel(trainer._policy.published(), CPU, tmp_path)
        monkeypatch.setattr("areal_agent.engine.embedded.sharing.gpu_uuid", lambda _: "GPU-1")
        last = trainer.publish()
        kinds = [type(trainer.publish(through_host=True))]
        assert Path(json.loads(last.handle)[0]).is_file(), "an engine may still be brought to it"
        kinds.append(type(trainer.publish()))
        assert kinds == [SharedMemoryWeights, SharedMemoryWeights] and not Path(json.loads(last.handle)[0]).exists()
        trainer.close()


def test_a_write_that_fails_goes_through_the_host(tmp_path, small_model, caplog):
    setup = TrainerSetup(
        model=small_model,
        trainer=TrainerConfig(device="cpu"),
        algorithm=AlgorithmConfig(),
        seed=0,
        shared_memory=tmp_path,
    )
    trainer = Trainer(setup)
    trainer._channel.close()
    trainer._channel = OutOfMemory(trainer._policy.published(), CPU, tmp_path)
    assert isinstance(trainer.publish(), SharedMemoryWeights)
    assert "from now on: out of memory" in caplog.text
    trainer.close()


class OutOfMemory(DeviceChannel):
    def write(self, parameters):
        next(iter(parameters))
        raise RuntimeError("out of memory")
