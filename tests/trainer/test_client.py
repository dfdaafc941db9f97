"""The trainer through its client: a worker on the other end of a socket, in a thread or as the real process.

- init, train_step, publish and save do what they say; several records a session pass.
- A failing command is a TrainerError with its traceback, a wrong config a ConfigError; the worker lives on.
- One command at a time; a cancelled command does not confuse the next.
- A socket that ends inside an answer, or is closed by us, ends the command under way with ProcessDied.
- The real process: killed, it is ProcessDied for every later command; it ends when its socket closes and on shutdown,
  and leaves no shared memory behind. Without a key it says so.
"""

import asyncio
import math
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.engine.embedded.weights import WeightLayout, take_weights
from areal_agent.errors import ConfigError, ProcessDied, TrainerError
from areal_agent.trainer.__main__ import main
from areal_agent.trainer.client import TrainerClient
from areal_agent.trainer.config import TrainerConfig, TrainerSetup
from areal_agent.trainer.wire import Frame, SaveEnd, receive_frame
from areal_agent.types import DiskWeights, DistributedWeights, SharedMemoryWeights
from tests.trainer.lab import connected, real_process


async def init(client: TrainerClient, model: Path, folder: Path, **trainer: object):
    config = TrainerConfig.model_validate({"learning_rate": 1e-3, **trainer})
    setup = {"model": model, "trainer": config, "algorithm": AlgorithmConfig()}
    return await client.init(TrainerSetup(**setup, seed=0, shared_memory=folder))


@pytest.fixture
def client(served):
    return served[0]


@pytest.fixture
async def ready(client, model_folder, tmp_path):
    await init(client, model_folder, tmp_path)
    return client


def as_read(weights: SharedMemoryWeights, model_folder: Path) -> dict[str, torch.Tensor]:
    """By the engine's own reader."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    taken = take_weights(weights, WeightLayout(model), torch.device("cpu"), needs_manifest=False)
    return {name: tensor.clone() for name, tensor in taken.items()}


async def test_a_train_step_reports_the_batch(ready, make_batch):
    batch = make_batch(1)
    report = await ready.train_step(batch)
    assert report.step == 1
    assert report.metrics["num_records"] == len(batch.records)
    assert report.metrics["num_loss_tokens"] == sum(int(record.loss_mask.sum()) for record in batch.records)
    assert report.metrics["reward_mean"] == pytest.approx(np.mean([one.rewards.total for one in batch.trained]))
    assert report.seconds > 0


async def test_an_engine_reads_the_published_weights_which_a_checkpoint_holds(
    ready, make_batch, model_folder, tmp_path
):
    before = as_read(await ready.publish(), model_folder)
    await ready.train_step(make_batch(1))
    after = as_read(await ready.publish(), model_folder)
    initial = dict(AutoModelForCausalLM.from_pretrained(model_folder).named_parameters())
    assert all(torch.equal(before[name], initial[name]) for name in initial)
    assert not torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    ended = await ready.save(tmp_path / "checkpoints", step=1, incarnation=0, run_state={})
    saved = dict(AutoModelForCausalLM.from_pretrained(ended.path).named_parameters())
    assert all(torch.equal(saved[name], after[name]) for name in saved)


async def test_weights_may_go_through_a_disk(client, model_folder, tmp_path):
    await init(client, model_folder, tmp_path / "here", transfer="disk")
    published = await client.publish()
    assert isinstance(published, DiskWeights)
    assert Path(published.path).is_relative_to(tmp_path / "here")
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    taken = take_weights(published, WeightLayout(model), torch.device("cpu"))
    assert all(torch.equal(taken[name], initial) for name, initial in model.named_parameters())


async def test_weights_may_go_by_torch_distributed(client, make_batch, model_folder, tmp_path):
    await init(client, model_folder, tmp_path, transfer="distributed", transfer_bucket_mib=1)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    published = await client.publish()
    assert isinstance(published, DistributedWeights)
    device = torch.device("cpu")
    before = await asyncio.to_thread(take_weights, published, WeightLayout(model), device)
    assert all(torch.equal(before[name], initial) for name, initial in model.named_parameters())
    await client.train_step(make_batch(1))
    late = await asyncio.to_thread(take_weights, published, WeightLayout(model), device)
    assert all(torch.equal(late[name], initial) for name, initial in model.named_parameters())
    after = await asyncio.to_thread(take_weights, await client.publish(), WeightLayout(model), device)
    assert not torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    assert list(tmp_path.iterdir()) == []


async def test_an_address_of_another_machine_is_a_config_error(client, model_folder, tmp_path):
    with pytest.raises(ConfigError, match=r"transfer_host is .192\.0\.2\.1., but the trainer cannot listen there"):
        await init(client, model_folder, tmp_path, transfer="distributed", transfer_host="192.0.2.1")


async def test_a_failing_command_is_a_trainer_error_and_the_worker_lives_on(ready, make_batch):
    batch = make_batch(1)
    broken = replace(batch.records[0], behavior_logprobs=np.full_like(batch.records[0].behavior_logprobs, math.nan))
    with pytest.raises(TrainerError, match=r"(?s)train_step failed: ValueError: branch 0 of session.*batching\.py"):
        await ready.train_step(replace(batch, records=(broken, *batch.records[1:])))
    assert (await ready.train_step(batch)).metrics["num_updates"] == 1


async def test_a_model_that_cannot_be_loaded_is_a_config_error_and_init_may_be_repeated(client, model_folder, tmp_path):
    with pytest.raises(TrainerError, match="no model is loaded; send init first"):
        await client.publish()
    with pytest.raises(ConfigError, match="cannot load a causal language model from"):
        await init(client, tmp_path, tmp_path)
    info = await init(client, model_folder, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    assert (info.step, info.device) == (0, "cpu")
    assert info.num_parameters == sum(one.numel() for one in model.parameters())


async def test_metrics_that_are_not_finite_arrive_as_nan(ready, make_batch):
    batch = make_batch(1)
    poison = np.full(2, np.nan, dtype=np.float32)
    records = tuple(replace(record, turn_rewards=poison) for record in batch.records)
    report = await ready.train_step(replace(batch, records=records))
    assert report.metrics["num_skipped_updates"] == 1
    assert math.isnan(report.metrics["grad_norm"])


async def test_commands_wait_for_each_other(ready, make_batch):
    first, published, second = await asyncio.gather(
        ready.train_step(make_batch(1, num_groups=20)), ready.publish(), ready.train_step(make_batch(2))
    )
    assert (first.step, second.step) == (1, 2)
    assert published.crc32 > 0


@pytest.fixture
async def peer():
    """A client, and the streams of the other end of its socket, which the test plays."""
    ours, theirs = socket.socketpair()
    client = TrainerClient(connected(ours))
    reader, writer = await asyncio.open_connection(sock=theirs)
    yield client, reader, writer
    await client.aclose()
    writer.close()


async def test_a_cancelled_command_does_not_confuse_the_next(peer):
    client, reader, writer = peer
    saving = asyncio.ensure_future(client.save(Path("a"), step=1, incarnation=0, run_state={}))
    first = (await receive_frame(reader)).header
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    saving = asyncio.ensure_future(client.save(Path("b"), step=2, incarnation=0, run_state={}))
    second = (await receive_frame(reader)).header
    for number, path in ((first["number"], "late"), (second["number"], "right")):
        writer.write(Frame(header={"number": number, "result": {"path": path}}).encode())
    assert await saving == SaveEnd(path=Path("right"))


async def test_an_end_inside_an_answer_is_process_died(peer):
    client, reader, writer = peer
    publishing = asyncio.ensure_future(client.publish())
    await receive_frame(reader)
    writer.write(b"\x00\x00")
    writer.close()
    with pytest.raises(ProcessDied, match="the trainer process ended before it answered"):
        await publishing


async def test_closing_the_client_ends_commands_under_way(peer):
    client, reader, _ = peer
    publishing = asyncio.ensure_future(client.publish())
    await receive_frame(reader)
    await client.aclose()
    with pytest.raises(ProcessDied, match="the connection to the trainer is closed"):
        await publishing


@pytest.fixture
def shared_memory(tmp_path) -> Path:
    folder = tmp_path / "shared_memory"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("end", [TrainerClient.shutdown, TrainerClient.aclose])
async def test_a_worker_that_ends_leaves_no_shared_memory(served, model_folder, shared_memory, end):
    client, thread = served
    await init(client, model_folder, shared_memory)
    await client.publish()
    assert len(list(shared_memory.iterdir())) == 2
    await end(client)
    await asyncio.to_thread(thread.join)
    assert list(shared_memory.iterdir()) == []


@pytest.mark.slow  # several starts of a process
@pytest.mark.parametrize("is_killed", [False, True])
async def test_the_process_removes_its_shared_memory_and_killed_it_is_process_died(
    model_folder, make_batch, tmp_path, shared_memory, is_killed
):
    async with real_process(tmp_path) as (process, client):
        await init(client, model_folder, shared_memory)
        await client.publish()
        if is_killed:
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(ProcessDied, match="the trainer process ended before it answered"):
                await client.train_step(make_batch(1))
            with pytest.raises(ProcessDied):
                await client.publish()
        else:
            await client.aclose()
            assert "exited with 0" in str(await process.died())
            assert list(shared_memory.iterdir()) == []


def test_the_process_without_a_key_says_so(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["areal_agent.trainer", "--connect", "127.0.0.1:1"])
    with pytest.raises(ConfigError, match="AREAL_AGENT_CALL_KEY is not set: only a run starts this command"):
        main()
