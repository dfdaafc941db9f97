"""A weight update is all or nothing:

- a damaged, incomplete or foreign set of weights raises WeightUpdateError, and the old version goes on unchanged
- fitting weights are loaded: sharded folders, other float types, tied heads that are stored twice
- weights for which there is no memory are refused, and the next ones are taken
- an idle engine does not hold on to the copied weights, which would take a GPU's memory twice
"""

import dataclasses
import threading
import weakref
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from areal_agent.engine.embedded.scheduler import ModelWeights
from areal_agent.errors import WeightUpdateError
from areal_agent.types import DiskWeights, GenerateResult, SharedMemoryWeights, WeightVersion
from tests.engine.conftest import DEADLINE_S

OLD, NEW = WeightVersion(step=7), WeightVersion(step=8)


def damaged(weights: SharedMemoryWeights) -> SharedMemoryWeights:
    data = bytearray(Path(weights.path).read_bytes())
    data[len(data) // 2] ^= 1
    Path(weights.path).write_bytes(data)
    return weights


def short(weights: SharedMemoryWeights) -> SharedMemoryWeights:
    data = Path(weights.path).read_bytes()
    Path(weights.path).write_bytes(data[: len(data) // 2])
    return weights


def with_entry(weights: SharedMemoryWeights, index: int, **changes: object) -> SharedMemoryWeights:
    entries = list(weights.entries)
    entries[index] = dataclasses.replace(entries[index], **changes)
    return dataclasses.replace(weights, entries=tuple(entries))


FAULTS = {
    "damaged byte": (damaged, "checksum"),
    "file cut short": (short, "damaged"),
    "unknown name": (lambda w: with_entry(w, 0, name="model.stranger"), "stranger"),
    "wrong shape": (lambda w: with_entry(w, 0, shape=w.entries[0].shape[::-1]), "has shape"),
    "wrong size": (lambda w: with_entry(w, 0, num_bytes=4), "manifest is damaged"),
    "unknown dtype": (lambda w: with_entry(w, 0, dtype="int32"), "int32"),
    "missing file": (lambda w: dataclasses.replace(w, path="no_such_file"), "no_such_file"),
}


def check_same(result: GenerateResult, before: GenerateResult) -> None:
    """The second answer may begin from the prefix cache, which changes log-probabilities only by rounding."""
    assert (result.token_ids, result.versions) == (before.token_ids, before.versions)
    assert result.logprobs == pytest.approx(before.logprobs, abs=1e-5)


@pytest.mark.parametrize("fault", FAULTS)
async def test_faulty_shared_memory_leaves_the_old_version_serving(fault, tiny, other, serve, ask, share):
    spoil, message = FAULTS[fault]
    async with serve(tiny) as served:
        before = await served.engine.generate(ask(1))
        with pytest.raises(WeightUpdateError, match=message):
            await served.engine.update_weights(spoil(share(other)), NEW)
        check_same(await served.engine.generate(ask(1)), before)
    assert before.versions[0].version == OLD


async def test_shared_memory_that_lacks_a_tensor(tiny, other, serve, ask, share):
    whole = share(other)
    without_last = dataclasses.replace(whole, entries=whole.entries[:-1], crc32=crc32_of(whole, whole.entries[:-1]))
    async with serve(tiny) as served:
        before = await served.engine.generate(ask(1))
        with pytest.raises(WeightUpdateError, match=r"lack 1 tensors \['model.norm.weight'\]"):
            await served.engine.update_weights(without_last, NEW)
        check_same(await served.engine.generate(ask(1)), before)


def crc32_of(weights: SharedMemoryWeights, entries) -> int:
    data = Path(weights.path).read_bytes()
    crc32 = 0
    for entry in entries:
        crc32 = zlib.crc32(data[entry.offset : entry.offset + entry.num_bytes], crc32)
    return crc32


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
    expected = truth(expected_folder).logprobs(request.input_ids, result.token_ids)
    assert result.logprobs == pytest.approx(expected, abs=1e-4)
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
