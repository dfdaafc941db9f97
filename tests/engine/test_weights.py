"""A weight update is all or nothing:

- a damaged, incomplete or foreign set of weights raises WeightUpdateError, and the old version goes on unchanged
- fitting weights are loaded: sharded folders, other float types, tied heads that are stored twice
- weights for which there is no memory are refused, and the next ones are taken
- the size of weights: pushed in memory, in a transfer, or as a folder; a missing folder has size 0
- an idle engine does not hold on to the copied weights, which would take a GPU's memory twice
"""

import dataclasses
import threading
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from areal_agent.engine.embedded.scheduler import ModelWeights
from areal_agent.engine.pushes import size_of
from areal_agent.errors import WeightUpdateError
from areal_agent.types import (
    DiskWeights,
    DistributedWeights,
    GenerateResult,
    SharedMemoryWeights,
    TensorEntry,
    WeightPart,
    WeightVersion,
)
from tests.engine.conftest import DEADLINE_S

OLD, NEW = WeightVersion(step=7), WeightVersion(step=8)


def check_same(result: GenerateResult, before: GenerateResult) -> None:
    """The second answer may begin from the prefix cache, which changes log-probabilities only by rounding."""
    assert (result.token_ids, result.versions) == (before.token_ids, before.versions)
    assert result.logprobs == pytest.approx(before.logprobs, abs=1e-5)


async def test_faulty_shared_memory_leaves_the_old_version_serving(tiny, other, serve, ask, share):
    """test_pushes.py has the other faults, which the same code finds."""
    damaged = dataclasses.replace(share(other), crc32=0)
    async with serve(tiny) as served:
        before = await served.engine.generate(ask(1))
        with pytest.raises(WeightUpdateError, match="checksum"):
            await served.engine.update_weights(damaged, NEW)
        check_same(await served.engine.generate(ask(1)), before)
    assert before.versions[0].version == OLD


@pytest.mark.parametrize("fault", ["missing folder", "missing tensor", "wrong shape", "not safetensors"])
async def test_a_faulty_folder_leaves_the_old_version_serving(fault, tiny, other, serve, ask, tmp_path):
    tensors = load_file(other / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "missing tensor":
        del tensors[name]
    elif fault == "wrong shape":
        tensors[name] = tensors[name].T.contiguous()
    if fault != "missing folder":
        save_file(tensors, tmp_path / "model.safetensors")
    if fault == "not safetensors":
        (tmp_path / "model.safetensors").write_bytes(b"pickled?")
    async with serve(tiny) as served:
        before = await served.engine.generate(ask(1))
        with pytest.raises(WeightUpdateError):
            await served.engine.update_weights(DiskWeights(path=str(tmp_path)), NEW)
        check_same(await served.engine.generate(ask(1)), before)


async def test_a_sharded_folder(tiny, other, serve, ask, truth, tmp_path):
    AutoModelForCausalLM.from_pretrained(other).save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    await check_serves(tiny, DiskWeights(path=str(tmp_path)), other, serve, ask, truth)


async def test_a_folder_in_bfloat16(tiny, other, serve, ask, truth, tmp_path):
    AutoModelForCausalLM.from_pretrained(other).to(torch.bfloat16).save_pretrained(tmp_path)
    await check_serves(tiny, DiskWeights(path=str(tmp_path)), tmp_path, serve, ask, truth)


async def test_a_tied_head_stored_twice(tiny, other, serve, ask, truth, tmp_path):
    tensors = load_file(other / "model.safetensors")
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors"
    )
    await check_serves(tiny, DiskWeights(path=str(tmp_path)), other, serve, ask, truth)


async def test_a_head_that_is_no_longer_tied_is_refused(tiny, other, serve, tmp_path):
    tensors = load_file(other / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, tmp_path / "model.safetensors")
    async with serve(tiny) as served:
        with pytest.raises(WeightUpdateError, match="tied"):
            await served.engine.update_weights(DiskWeights(path=str(tmp_path)), NEW)


async def check_serves(served_folder, weights, expected_folder, serve, ask, truth) -> None:
    request = ask(1, max_tokens=20)
    async with serve(served_folder) as served:
        await served.engine.update_weights(weights, NEW)
        result = await served.engine.generate(request)
    truth(expected_folder).check(request, result)
    assert {span.version for span in result.versions} == {NEW}


class Full:
    """A WeightLayout on a device that once lacks memory."""

    def __init__(self, layout) -> None:
        self._layout = layout
        self.is_full = True

    def prove(self, weights):
        if self.is_full:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 15.26 GiB")
        return self._layout.prove(weights)


async def test_weights_for_which_there_is_no_memory_are_refused(tiny, other, schedule, share):
    with schedule(tiny) as (scheduler, runner):
        layout = Full(runner.layout)
        target = ModelWeights(scheduler, layout, runner.device)
        with pytest.raises(WeightUpdateError, match=r"no memory to take .* 15\.26 GiB; leave more of it free"):
            await target.take(share(other))
        layout.is_full = False
        await target.swap(await target.take(share(other)), NEW, flush_cache=True)
        assert target.version == NEW


def test_what_was_copied_is_let_go(tiny, other, schedule):
    is_gone = threading.Event()
    weights = load_file(other / "model.safetensors")
    last = weakref.ref(weights["model.norm.weight"], lambda _: is_gone.set())
    with schedule(tiny) as (scheduler, _):
        scheduler.swap(weights, NEW, flush_cache=True).result(DEADLINE_S)
        del weights
        assert is_gone.wait(DEADLINE_S) and last() is None


ENTRIES = tuple(
    TensorEntry(name=name, dtype="float32", shape=(3,), offset=start, num_bytes=12)
    for name, start in (("a", 0), ("b", 64))
)


def test_the_size_in_memory() -> None:
    assert size_of(SharedMemoryWeights(path="nowhere", entries=ENTRIES, crc32=0)) == 24


def test_the_size_of_a_transfer() -> None:
    part = WeightPart(host="h", port=1, name="n", num_bytes=128, checksum=0)
    weights = DistributedWeights(parts=(part, part), entries=ENTRIES, bucket_bytes=64, timeout_s=1.0)
    assert size_of(weights) == 256


def test_the_size_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    for path in (tmp_path / "one", tmp_path / "inner" / "two"):
        path.write_bytes(bytes(50))
    assert size_of(DiskWeights(path=str(tmp_path))) == 100
    assert size_of(DiskWeights(path=str(tmp_path / "nothing"))) == 0
