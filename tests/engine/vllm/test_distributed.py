"""Weights by torch.distributed, into the workers of a real vLLM server (slow):

- an answer goes on while they are sent, and under them after the commit; the spans say from which token on
- weights that are damaged, of another model, or whose trainer is gone change nothing, and the next ones work
- sent again and again, and after a folder was loaded, they serve; a folder may be loaded after them
"""

import dataclasses
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_agent.engine_types import PauseMode
from areal_agent.errors import WeightUpdateError
from areal_agent.types import VersionSpan, WeightVersion
from areal_agent.weights.distributed import DistributedChannel
from areal_agent.weights.push import push
from areal_agent.weights.shared_memory import layout

from ..sglang.conftest import Watched

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4


def parameters_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())


@pytest.fixture
def channel(vllm_model: Path) -> Iterator[DistributedChannel]:
    entries = layout(parameters_of(vllm_model).items(), torch.float32)
    channel = DistributedChannel(entries, torch.device("cpu"), host="127.0.0.1", bucket_bytes=2**16, timeout_s=20.0)
    yield channel
    channel.close()


async def test_an_answer_goes_on_while_they_are_sent_and_under_them(stage, channel, ask, truth):
    request = ask(1, max_tokens=stage.num_long)
    watched = Watched(stage.engine, request)
    await watched.until(5)
    await stage.send(channel.write(parameters_of(stage.other)))
    assert not watched.answer.done()
    await stage.swap(PauseMode.RETRACT)
    result = await watched.answer
    (cut,) = {span.start for span in result.versions} - {0}
    assert result.versions == (
        VersionSpan(version=stage.old, start=0, end=cut),
        VersionSpan(version=stage.new, start=cut, end=stage.num_long),
    )
    before, after = (truth(one).logprobs(request.input_ids, result.token_ids) for one in (stage.model, stage.other))
    assert result.logprobs[:cut] == pytest.approx(before[:cut], abs=TOLERANCE)
    assert result.logprobs[cut:] == pytest.approx(after[cut:], abs=TOLERANCE)


async def serves(stage, folder: Path, version: WeightVersion, ask, truth) -> None:
    request = ask(2, max_tokens=10)
    answer = await stage.engine.generate(request)
    assert answer.versions == (VersionSpan(version=version, start=0, end=10),)
    expected = truth(folder).logprobs(request.input_ids, answer.token_ids)
    assert answer.logprobs == pytest.approx(expected, abs=TOLERANCE)


def damaged(weights):
    return dataclasses.replace(weights, checksum=weights.checksum ^ 1)


def lacking_a_tensor(weights):
    return dataclasses.replace(weights, entries=weights.entries[1:])


def of_another_shape(weights):
    first, *rest = weights.entries
    return dataclasses.replace(weights, entries=(dataclasses.replace(first, shape=(3,)), *rest))


def of_nobody(weights):
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        return dataclasses.replace(weights, port=nobody.getsockname()[1], timeout_s=1.0)


def written_before(weights):
    return dataclasses.replace(weights, name="before")


@pytest.mark.parametrize("fault", [damaged, lacking_a_tensor, of_another_shape, of_nobody, written_before])
async def test_what_is_wrong_changes_nothing(stage, channel, ask, truth, fault):
    weights = channel.write(parameters_of(stage.other))
    with pytest.raises(WeightUpdateError):
        await stage.push(fault(weights))
    await serves(stage, stage.model, stage.old, ask, truth)
    await stage.push(weights)
    await serves(stage, stage.other, stage.new, ask, truth)


async def test_they_may_come_again_and_again_and_between_folders(stage, channel, ask, truth):
    version = stage.old
    for folder in (stage.other, stage.model, stage.other):
        version = WeightVersion(step=version.step + 1)
        await push([stage.engine], channel.write(parameters_of(folder)), version)
        await serves(stage, folder, version, ask, truth)
    version = WeightVersion(step=version.step + 1)
    await stage.engine.load(stage.model, version)
    await serves(stage, stage.model, version, ask, truth)
    version = WeightVersion(step=version.step + 1)
    await push([stage.engine], channel.write(parameters_of(stage.other)), version)
    await serves(stage, stage.other, version, ask, truth)
