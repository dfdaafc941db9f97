"""Pushes of weights, to a real server:

- the old version serves until the commit, also answers under way; after it the new one serves
- `send` refuses a damaged, incomplete or foreign transfer; the old version serves, and the next push works
- whatever happens to the sender or its files after the send changes nothing
- the push of a dead sender is never served, and blocks the next push only until the time-out
- there is one push at a time, with each step once and in order; anything else is a PushConflict and serves nothing
- versions only go up; the serving version may be pushed again with its own weights
- a commit that nobody waits for any more still happens
"""

import asyncio
import contextlib
import dataclasses
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_agent.engine.client import HttpEngine
from areal_agent.errors import PushConflict, WeightUpdateError
from areal_agent.files import MANIFEST
from areal_agent.types import DiskWeights, SharedMemoryWeights, WeightVersion
from areal_agent.weights.channels import DiskChannel

from .sampled import Weights, assert_swapped
from .transfers import parameters_of

OLD, NEW = WeightVersion(step=7), WeightVersion(step=8)
TOLERANCE = 1e-4


async def push(engine: HttpEngine, weights: SharedMemoryWeights | DiskWeights, version: WeightVersion = NEW) -> None:
    await engine.begin_push("p")
    await engine.send_push("p", weights)
    await engine.commit_push("p", version)


async def check_old_serves(served, ask, before) -> None:
    again = await served.engine.generate(ask(1))
    assert (again.token_ids, again.versions) == (before.token_ids, before.versions)
    assert again.logprobs == pytest.approx(before.logprobs, abs=1e-5)


@pytest.fixture
def folder(tmp_path, other) -> Callable[[], DiskWeights]:
    """Write the weights of `other` as the trainer does."""
    channel = DiskChannel(tmp_path / "weights", torch.float32)
    parameters = parameters_of(other)
    return lambda: channel.write(parameters)


@pytest.fixture(params=["shared_memory", "disk"])
def new_weights(request, other, share, folder) -> SharedMemoryWeights | DiskWeights:
    return share(other) if request.param == "shared_memory" else folder()


async def test_the_old_version_serves_until_the_commit(tiny, other, served, ask, truth, new_weights):
    request = ask(1, max_tokens=40)
    answer = await served.under_way(request)
    await served.engine.begin_push("p")
    await served.engine.send_push("p", new_weights)
    assert (await served.engine.info()).weight_version == OLD
    await served.gate.steps(5)
    await served.gate.meanwhile(served.engine.commit_push("p", NEW))
    served.gate.open()
    result = await answer
    old, new = Weights(model=tiny, version=OLD), Weights(model=other, version=NEW)
    assert assert_swapped(old, new, request, result, truth) >= 10


def with_bytes(weights: SharedMemoryWeights, change: Callable[[bytearray], object]) -> SharedMemoryWeights:
    data = bytearray(Path(weights.path).read_bytes())
    change(data)
    Path(weights.path).write_bytes(data)
    return weights


def flip(data: bytearray) -> None:
    data[len(data) // 2] ^= 1


def with_entries(weights: SharedMemoryWeights, *entries) -> SharedMemoryWeights:
    """Replace the manifest's entries, with the checksum of their bytes."""
    data = Path(weights.path).read_bytes()
    crc32 = 0
    for entry in entries:
        crc32 = zlib.crc32(data[entry.offset : entry.offset + entry.num_bytes], crc32)
    return dataclasses.replace(weights, entries=entries, crc32=crc32)


def with_nan(weights: SharedMemoryWeights) -> SharedMemoryWeights:
    """Put NaN into the last number of the file, under the right checksum."""
    nan = np.array([np.nan], dtype=np.float32).tobytes()
    return with_entries(with_bytes(weights, lambda data: data.__setitem__(slice(-4, None), nan)), *weights.entries)


def changed_first(weights: SharedMemoryWeights, **changes: object) -> SharedMemoryWeights:
    first, *rest = weights.entries
    return with_entries(weights, dataclasses.replace(first, **changes), *rest)


SHARED_FAULTS = {
    "a flipped bit": (lambda w: with_bytes(w, flip), "checksum"),
    "cut short": (lambda w: with_bytes(w, lambda data: data.__delitem__(slice(len(data) // 2, None))), "damaged"),
    "gone": (lambda w: dataclasses.replace(w, path="no_such_file"), "no_such_file"),
    "no tensor": (lambda w: with_entries(w), "have no tensors"),
    "a missing tensor": (lambda w: with_entries(w, *w.entries[:-1]), r"lack 1 tensors \['model.norm.weight'\]"),
    "an extra tensor": (lambda w: with_entries(w, *w.entries, dataclasses.replace(w.entries[0], name="x")), r"\['x'\]"),
    "a tensor twice": (lambda w: with_entries(w, *w.entries, w.entries[0]), "listed twice"),
    "another shape": (lambda w: changed_first(w, shape=w.entries[0].shape[::-1]), "has shape"),
    "a negative shape": (
        lambda w: changed_first(w, shape=tuple(-n for n in w.entries[0].shape)),
        "manifest is damaged",
    ),
    "another dtype": (lambda w: changed_first(w, dtype="bfloat16"), "manifest is damaged"),
    "an unknown dtype": (lambda w: changed_first(w, dtype="int32"), "int32"),
    "beyond the file": (lambda w: changed_first(w, offset=2**60), "damaged"),
    "not a number": (with_nan, "hold NaN or infinity"),
    "before the file": (lambda w: changed_first(w, offset=-4), "damaged"),
}


async def test_a_faulty_push_over_shared_memory(other, served, ask, share):
    for fault, (spoil, message) in SHARED_FAULTS.items():
        await check_is_refused(served, ask, spoil(share(other)), message, fault)
    await push(served.engine, share(other))
    assert (await served.engine.generate(ask(1))).versions[0].version == NEW


def spoiled_file(weights: DiskWeights, name: str, change: Callable[[bytearray], object]) -> None:
    path = Path(weights.path) / name
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def with_tensors(weights: DiskWeights, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Write other tensors, with the right digests."""
    path = Path(weights.path)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    DiskChannel(path.parent / "again", torch.float32).write(tensors)
    (path.parent / "again" / "weights_000001" / "model.safetensors").replace(path / "model.safetensors")
    (path.parent / "again" / "weights_000001" / MANIFEST).replace(path / MANIFEST)


DISK_FAULTS = {
    "a flipped bit": (lambda w: spoiled_file(w, "model.safetensors", flip), "SHA-256"),
    "cut short": (lambda w: spoiled_file(w, "model.safetensors", lambda data: data.pop()), "size"),
    "no weights": (lambda w: (Path(w.path) / "model.safetensors").unlink(), "model.safetensors"),
    "no manifest": (lambda w: (Path(w.path) / MANIFEST).unlink(), "no readable manifest"),
    "half a manifest": (lambda w: spoiled_file(w, MANIFEST, lambda data: data.__delitem__(slice(9, None))), MANIFEST),
    "an empty manifest": (lambda w: (Path(w.path) / MANIFEST).write_text('{"files": {}}'), "does not name"),
    "a foreign manifest": (lambda w: (Path(w.path) / MANIFEST).write_text('{"files": [1]}'), MANIFEST),
    "a missing tensor": (
        lambda w: with_tensors(w, lambda tensors: tensors.pop("model.norm.weight")),
        r"lack 1 tensors \['model.norm.weight'\]",
    ),
    "infinity": (
        lambda w: with_tensors(w, lambda tensors: tensors["model.norm.weight"].fill_(torch.inf)),
        r"'model.norm.weight' and 0 more .* hold NaN or infinity",
    ),
    "other weights": (lambda w: save_file({"x": torch.zeros(3)}, Path(w.path) / "model.safetensors"), "size"),
}


async def test_a_faulty_push_over_disk(served, ask, folder):
    for fault, (spoil, message) in DISK_FAULTS.items():
        spoil(weights := folder())
        await check_is_refused(served, ask, weights, message, fault)
    await push(served.engine, folder())
    assert (await served.engine.generate(ask(1))).versions[0].version == NEW


async def check_is_refused(served, ask, weights, message: str, fault: str) -> None:
    before = await served.engine.generate(ask(1))
    await served.engine.begin_push(fault)
    with pytest.raises(WeightUpdateError, match=message) as caught:
        await served.engine.send_push(fault, weights)
    assert not isinstance(caught.value, PushConflict)
    with pytest.raises(PushConflict, match=f"'{fault}' is not open"):
        await served.engine.commit_push(fault, NEW)
    await check_old_serves(served, ask, before)
    assert before.versions[0].version == OLD


def destroy(path: Path) -> None:
    for file in [path] if path.is_file() else list(path.iterdir()):
        file.write_bytes(b"overwritten")
        file.unlink()


async def test_what_becomes_of_the_file_after_the_send_changes_nothing(other, served, ask, truth, new_weights):
    await served.engine.begin_push("p")
    await served.engine.send_push("p", new_weights)
    destroy(Path(new_weights.path))
    await served.engine.commit_push("p", NEW)
    result = await served.engine.generate(ask(1))
    truth(other).check(ask(1), result)


async def die_after_sending(served, weights: DiskWeights) -> None:
    """For the engine, a sender that died is one whose connections have ended."""
    async with contextlib.aclosing(HttpEngine(served.engine.base_url)) as sender:
        await sender.begin_push("dead")
        await sender.send_push("dead", weights)


async def test_a_sender_that_died_is_replaced_after_the_time_out(tiny, serve, ask, share, other, folder):
    async with serve(tiny, push_timeout_s=0.0) as served:
        before = await served.engine.generate(ask(1))
        await die_after_sending(served, folder())
        await check_old_serves(served, ask, before)
        await push(served.engine, share(other))
        with pytest.raises(PushConflict, match="'dead' is not open"):
            await served.engine.commit_push("dead", WeightVersion(step=9))
        assert (await served.engine.info()).weight_version == NEW


async def test_until_the_time_out_a_second_push_is_refused(served, ask, folder):
    before = await served.engine.generate(ask(1))
    await die_after_sending(served, folder())
    with pytest.raises(PushConflict, match=r"409: push 'dead' is open; commit or abort it first\. .* silent for"):
        await served.engine.begin_push("p")
    await check_old_serves(served, ask, before)
    await served.engine.abort_push("dead")
    await push(served.engine, folder())


async def test_steps_out_of_order_are_refused(other, served, share):
    engine = served.engine
    with pytest.raises(PushConflict, match="not open"):
        await engine.send_push("p", share(other))
    await engine.begin_push("p")
    with pytest.raises(PushConflict, match="no weights yet"):
        await engine.commit_push("p", NEW)
    await engine.send_push("p", share(other))
    with pytest.raises(PushConflict, match="already"):
        await engine.send_push("p", share(other))
    await engine.abort_push("p")
    with pytest.raises(PushConflict, match="not open"):
        await engine.commit_push("p", NEW)
    await engine.abort_push("p")
    await engine.abort_push("never begun")
    assert (await engine.info()).weight_version == OLD


async def test_versions_only_go_up(tiny, other, served, share):
    for version in (WeightVersion(step=6), OLD):
        with pytest.raises(WeightUpdateError, match="versions only go up"):
            await push(served.engine, share(other), version)
    await push(served.engine, share(other), WeightVersion(incarnation=1, step=3))
    with pytest.raises(WeightUpdateError, match="versions only go up"):
        await push(served.engine, share(tiny), WeightVersion(step=100))
    assert (await served.engine.info()).weight_version == WeightVersion(incarnation=1, step=3)


async def test_the_version_that_serves_may_come_again_with_its_weights(tiny, other, served, ask, share):
    await push(served.engine, share(tiny), OLD)
    await push(served.engine, share(other), NEW)
    before = await served.engine.generate(ask(1))
    await push(served.engine, share(other), NEW)
    after = await served.engine.generate(ask(1))
    assert (after.token_ids, after.versions) == (before.token_ids, before.versions)


async def test_a_commit_that_nobody_waits_for_happens_all_the_same(other, served, ask, share):
    await served.engine.begin_push("p")
    await served.engine.send_push("p", share(other))
    answer = await served.under_way(ask(1, max_tokens=400), num_steps=3)
    commit = asyncio.create_task(served.engine.commit_push("p", NEW))
    await until_accepted(lambda: served.engine.begin_push("q"))
    commit.cancel()
    served.gate.open()
    assert {span.version for span in (await answer).versions} == {OLD, NEW}


async def until_accepted(call: Callable[[], Awaitable[None]]) -> None:
    """Wait until another push may begin, which is as soon as the commit of the open one has begun."""
    while True:
        with contextlib.suppress(PushConflict):
            return await call()
