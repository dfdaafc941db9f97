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
    SharedMemoryWeights,
    TensorEntry,
    WeightPart,
    WeightVersion,
)
from tests.engine.conftest import DEADLINE_S, both_ways

fixed_shapes = both_ways

OLD, NEW = WeightVersion(step=7), WeightVersion(step=8)


NAME, EMBEDDING = "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"


async def test_what_is_faulty_leaves_the_old_version_serving(other, served, ask, share, tmp_path):
    """test_pushes.py has the other faults, which the same code finds."""
    tensors, file = load_file(other / "model.safetensors"), tmp_path / "model.safetensors"
    folder = DiskWeights(path=str(tmp_path))

    async def check_is_refused(weights: DiskWeights | SharedMemoryWeights, message: str) -> None:
        with pytest.raises(WeightUpdateError, match=message):
            await served.engine.update_weights(weights, NEW)
        assert (await served.engine.info()).weight_version == OLD

    before = await served.engine.generate(ask(1))
    await check_is_refused(dataclasses.replace(share(other), crc32=0), "checksum")
    await check_is_refused(folder, "safetensors")  # which are missing
    for wrong, message in (
        ({name: one for name, one in tensors.items() if name != NAME}, "lack 1"),
        (tensors | {NAME: tensors[NAME].T.contiguous()}, "has shape"),
        (tensors | {"lm_head.weight": tensors[EMBEDDING] + 1}, "tied"),
    ):
        save_file(wrong, file)
        await check_is_refused(folder, message)
    file.write_bytes(b"pickled?")
    await check_is_refused(folder, "safetensors")
    after = await served.engine.generate(ask(1))
    assert (after.token_ids, after.versions) == (before.token_ids, before.versions)
    assert after.logprobs == pytest.approx(before.logprobs, abs=1e-5)  # it may begin from the prefix cache


def save_in_shards(other: Path, folder: Path) -> None:
    AutoModelForCausalLM.from_pretrained(other).save_pretrained(folder, max_shard_size="100KB")
    assert (folder / "model.safetensors.index.json").exists()


def save_in_bfloat16(other: Path, folder: Path) -> None:
    AutoModelForCausalLM.from_pretrained(other).to(torch.bfloat16).save_pretrained(folder)


def save_a_tied_head_twice(other: Path, folder: Path) -> None:
    tensors = load_file(other / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors[EMBEDDING].clone()}, folder / "model.safetensors")


@pytest.mark.parametrize("save", [save_in_shards, save_in_bfloat16, save_a_tied_head_twice])
async def test_what_fits_is_loaded(save, other, served, ask, truth, tmp_path):
    save(other, tmp_path)
    request = ask(1, max_tokens=20)
    await served.engine.update_weights(DiskWeights(path=str(tmp_path)), NEW)
    result = await served.engine.generate(request)
    truth(tmp_path if save is save_in_bfloat16 else other).check(request, result)
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


def test_the_size_of_weights(tmp_path: Path) -> None:
    assert size_of(SharedMemoryWeights(path="nowhere", entries=ENTRIES, crc32=0)) == 24
    part = WeightPart(host="h", port=1, name="n", num_bytes=128, checksum=0)
    assert size_of(DistributedWeights(parts=(part, part), entries=ENTRIES, bucket_bytes=64, timeout_s=1.0)) == 256
    (tmp_path / "inner").mkdir()
    for path in (tmp_path / "one", tmp_path / "inner" / "two"):
        path.write_bytes(bytes(50))
    assert size_of(DiskWeights(path=str(tmp_path))) == 100
    assert size_of(DiskWeights(path=str(tmp_path / "nothing"))) == 0
