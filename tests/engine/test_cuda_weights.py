"""Weights within the memory of one GPU, through a real server; a stand-in for the two calls that need a GPU:

- the engine serves what was written from the commit on, in float32 and bfloat16; the memory may be gone by then
- memory that was overwritten, of another GPU or too small is refused; the old version serves, the next push works
- so are weights for which the GPU has no memory: the engine is as well as before
- an engine that runs on a CPU refuses, and says what to do; so does a trainer, and a config that names one
- the channel keeps what it wrote last alone, and takes no parameters but its own
- where there is a GPU, another process opens its memory
"""

import dataclasses
import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.config import Config
from areal_agent.engine.embedded.cuda_memory import CudaSharing, check_gpu
from areal_agent.engine.embedded.transfer import BLOCK_BYTES, checksum
from areal_agent.errors import ConfigError, WeightUpdateError
from areal_agent.trainer.config import TrainerConfig
from areal_agent.trainer.trainer import Trainer
from areal_agent.types import CudaMemory, VersionSpan, WeightVersion
from areal_agent.weights.channels import CudaChannel, layout

CPU = torch.device("cpu")
OLD, NEW = WeightVersion(step=7), WeightVersion(step=8)
TOLERANCE = 1e-4


class OneProcess:
    """A `DeviceSharing` whose handles are numbers of tensors in this process, which it does not keep alive."""

    def __init__(self, gpu: str = "GPU-1") -> None:
        self.gpu = gpu
        self._shared: list[weakref.ref[Tensor]] = []

    def share(self, data: Tensor) -> CudaMemory:
        self._shared.append(weakref.ref(data))
        return CudaMemory(
            gpu=self.gpu,
            handle=str(len(self._shared) - 1),
            offset=0,
            num_bytes=len(data),
            counter="",
            counter_offset=0,
            event="",
            waits_for_event=False,
        )

    def open(self, memory: CudaMemory, device: torch.device) -> Tensor:
        check_gpu(memory, self.gpu)
        data = self.shared(memory)
        assert data is not None, "it was freed while it is still to be taken"
        return data

    def shared(self, memory: CudaMemory) -> Tensor | None:
        return self._shared[int(memory.handle)]()


def parameters_of(folder: Path) -> dict[str, Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())


def channel_for(folder: Path, sharing: OneProcess, dtype: torch.dtype = torch.float32) -> CudaChannel:
    return CudaChannel(layout(parameters_of(folder).items(), dtype), CPU, sharing)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, TOLERANCE), (torch.bfloat16, 0.2)])
async def test_what_was_written_serves_from_the_commit_on(dtype, tolerance, tiny, other, serve, ask, truth):
    sharing = OneProcess()
    channel = channel_for(other, sharing, dtype)
    async with serve(tiny, sharing=sharing) as served:
        weights = channel.write(parameters_of(other))
        await served.engine.begin_push("p")
        await served.engine.send_push("p", weights)
        channel.close()
        assert (await served.engine.info()).weight_version == OLD
        await served.engine.commit_push("p", NEW)
        result = await served.engine.generate(ask(1))
    assert result.versions == (VersionSpan(version=NEW, start=0, end=12),)
    expected = truth(other).logprobs(ask(1).input_ids, result.token_ids)
    assert result.logprobs == pytest.approx(expected, abs=tolerance)


def overwritten(weights, sharing):
    data = sharing.shared(weights.memory)
    data[100] += 1
    return weights


def of_another_gpu(weights, _):
    return dataclasses.replace(weights, memory=dataclasses.replace(weights.memory, gpu="GPU-2"))


def too_small(weights, _):
    return dataclasses.replace(weights, memory=dataclasses.replace(weights.memory, num_bytes=BLOCK_BYTES))


def out_of_place(weights, _):
    first, *rest = weights.entries
    return dataclasses.replace(weights, entries=(dataclasses.replace(first, offset=2), *rest))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (overwritten, "checksum"),
        (of_another_gpu, r"GPU-2.*GPU-1.*trainer\.transfer"),
        (too_small, "do not lie within"),
        (out_of_place, "do not lie within"),
    ],
)
async def test_what_is_damaged_or_elsewhere_is_refused(spoil, message, tiny, other, serve, ask):
    sharing = OneProcess()
    channel = channel_for(other, sharing)
    async with serve(tiny, sharing=sharing) as served:
        before = await served.engine.generate(ask(1))
        await served.engine.begin_push("p")
        with pytest.raises(WeightUpdateError, match=message):
            await served.engine.send_push("p", spoil(channel.write(parameters_of(other)), sharing))
        after = await served.engine.generate(ask(1))
        assert (after.token_ids, after.versions) == (before.token_ids, before.versions)
        await served.engine.begin_push("q")
        await served.engine.send_push("q", channel.write(parameters_of(other)))
        await served.engine.commit_push("q", NEW)


class Full(OneProcess):
    """Of a GPU that has no memory left."""

    def open(self, memory: CudaMemory, device: torch.device) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 15.26 GiB")


async def test_weights_for_which_there_is_no_memory_are_refused(tiny, other, serve, ask):
    sharing = Full()
    channel = channel_for(other, sharing)
    async with serve(tiny, sharing=sharing) as served:
        await served.engine.begin_push("p")
        with pytest.raises(WeightUpdateError, match=r"no memory to take .* 15\.26 GiB; leave more of it free"):
            await served.engine.send_push("p", channel.write(parameters_of(other)))
        result = await served.engine.generate(ask(1))
    assert result.versions == (VersionSpan(version=OLD, start=0, end=12),)


async def test_an_engine_on_a_cpu_refuses(tiny, other, serve):
    weights = channel_for(other, OneProcess()).write(parameters_of(other))
    async with serve(tiny) as served:
        await served.engine.begin_push("p")
        with pytest.raises(WeightUpdateError, match=r"the engine runs on cpu; .*trainer\.transfer"):
            await served.engine.send_push("p", weights)


def test_a_trainer_on_a_cpu_refuses(tiny, tmp_path):
    with pytest.raises(ConfigError, match=r"cuda_ipc.*runs on cpu"):
        Trainer.load(
            tiny,
            config=TrainerConfig(transfer="cuda_ipc", device="cpu"),
            algorithm=AlgorithmConfig(),
            seed=0,
            shared_memory=tmp_path,
        )


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"engine": {"device": "cpu"}}, "engine.device is 'cpu'"),
        ({"trainer": {"device": "cpu"}}, "trainer.device is 'cpu'"),
        ({"engine": {"urls": ["http://127.0.0.1:1"]}}, "engine.backend sglang does not take"),
        ({"engine": {"num_servers": 2}}, "engine.num_servers is 2"),
    ],
)
def test_a_config_that_names_no_shared_gpu_is_refused(section, message):
    values = {"tasks": "module:tasks", **section}
    values["trainer"] = {"transfer": "cuda_ipc", **section.get("trainer", {})}
    with pytest.raises(ConfigError, match=message):
        Config.parse(values)


def test_the_channel_keeps_what_it_wrote_last(tiny):
    sharing = OneProcess()
    channel = channel_for(tiny, sharing)
    first, second = (channel.write(parameters_of(tiny)) for _ in range(2))
    gc.collect()
    assert sharing.shared(first.memory) is None
    assert sharing.shared(second.memory) is not None
    channel.close()
    gc.collect()
    assert sharing.shared(second.memory) is None


def test_the_channel_refuses_parameters_of_another_model(tiny):
    channel = channel_for(tiny, OneProcess())
    parameters = parameters_of(tiny)
    parameters.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        channel.write(parameters)


def test_the_checksum_tells_a_changed_byte_and_blocks_that_changed_places():
    data = torch.arange(4 * BLOCK_BYTES, dtype=torch.int64).to(torch.uint8)
    data[:BLOCK_BYTES] = 7
    changed, moved = data.clone(), data.roll(BLOCK_BYTES)
    changed[BLOCK_BYTES + 3] += 1
    assert len({checksum(data), checksum(changed), checksum(moved)}) == 3
    assert checksum(data) == checksum(data.clone())


OPENS = """
import json, sys, torch
from areal_agent.engine.embedded.cuda_memory import CudaSharing
from areal_agent.engine.embedded.transfer import checksum
from areal_agent.types import CudaMemory
print(checksum(CudaSharing().open(CudaMemory(**json.load(sys.stdin)), torch.device("cuda", 0)).clone()))
"""


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_another_process_opens_the_memory_of_a_gpu():
    data = torch.randint(256, (64 * BLOCK_BYTES,), device="cuda").to(torch.uint8)
    told = json.dumps(dataclasses.asdict(CudaSharing().share(data)))
    done = subprocess.run([sys.executable, "-c", OPENS], input=told, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(checksum(data))], done.stderr
