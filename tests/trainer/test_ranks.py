"""A trainer of two ranks, as the main process has it: real processes behind a client.

- It trains and publishes as one rank does, and listens on loopback alone.
- A rank that is killed fails the step with an error that names it, and every command after; none is left.
- A rank that is killed between two commands ends the trainer, whose log says why.
- One that dies before it calls, or finds no host, is named. Ranks that died are no longer waited for.
- What a record lacks is told once, as with one rank, and is no death.
- Ranks talk over the interface that has their address.
- When the main process closes its end, no rank is left.
- More ranks than CUDA devices are refused.
- What ranks cannot share of a row's tokens (Ulysses) is refused; what they compute is in test_four_ranks.py.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.cluster.gang import Gang, rank_name, start_rank, start_trainer
from areal_agent.cluster.hosts import Host, LocalHost, Process
from areal_agent.config import Config
from areal_agent.errors import ConfigError, ProcessDied, TrainerDied, TrainerError
from areal_agent.trainer.attention import Row, Rule, segment_attention
from areal_agent.trainer.config import TrainerConfig, TrainerSetup
from areal_agent.trainer.context import Context
from areal_agent.trainer.model import choose_device
from areal_agent.trainer.ranks import Ranks, interface_of
from areal_agent.trainer.wire import RankCall
from tests.trainer.lab import GRADIENT_DESCENT, Lab
from tests.trainer.two_ranks import published_weights


@asynccontextmanager
async def two_ranks(model: Path, folder: Path, config: TrainerConfig = GRADIENT_DESCENT) -> AsyncIterator[Gang]:
    setup = {"model": model, "trainer": config.model_copy(update={"num_ranks": 2}), "algorithm": AlgorithmConfig()}
    async with start_trainer(1, folder) as gang:
        await gang.init(TrainerSetup(**setup, seed=0, shared_memory=folder))
        yield gang


async def until_gone(gang: Gang) -> None:
    """Wait until neither rank is left."""
    await asyncio.gather(*(process.died() for process in gang.processes))


@pytest.mark.slow
async def test_two_ranks_train_as_one_until_one_is_killed(model_folder, make_batch, as_input, tmp_path):
    batch = make_batch(1)
    alone = Lab(model_folder)
    alone.stepper.train(as_input(batch))
    async with two_ranks(model_folder, tmp_path) as gang:
        report = await gang.client.train_step(batch)
        assert report.metrics["num_micro_batches"] == 2
        published = published_weights(await gang.client.publish())
        torch.testing.assert_close(published - alone.before, alone.weights() - alone.before, atol=2e-6, rtol=1e-4)
        assert addresses_listened_at(gang) == {"127.0.0.1"}
        gang.processes[1].kill()
        for _ in range(2):
            with pytest.raises(
                TrainerDied, match=r"the trainer rank 1 process was killed by SIGKILL|rank 1 .* is gone"
            ):
                await gang.client.train_step(make_batch(2))
        assert "the trainer rank 1 process was killed by SIGKILL" in str(await gang.died())
        await gang.client.aclose()
        await until_gone(gang)


def addresses_listened_at(gang: Gang) -> set[str]:
    """Those of all ranks."""
    return {
        connection.laddr.ip
        for process_id in gang.process_ids.values()
        for connection in psutil.Process(process_id).net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.mark.slow
async def test_a_rank_that_is_killed_between_commands_ends_the_trainer(model_folder, tmp_path):
    async with two_ranks(model_folder, tmp_path) as gang:
        gang.processes[1].kill()
        assert "the trainer rank 1 process was killed by SIGKILL" in str(await gang.died())
        with pytest.raises(TrainerDied, match="the trainer rank 1 process was killed"):
            await gang.client.publish()
        await until_gone(gang)  # also without the main process
        assert "rank 1 is gone; this trainer cannot continue" in gang.processes[0].log_tail()


@pytest.mark.slow
async def test_what_a_record_lacks_is_told_once(model_folder, make_batch, tmp_path):
    batch = make_batch(1)
    first = batch.records[0]
    broken = replace(first, behavior_logprobs=np.full_like(first.behavior_logprobs, np.nan))
    async with two_ranks(model_folder, tmp_path) as gang:
        with pytest.raises(TrainerError, match="ValueError: branch 0 of session") as caught:
            await gang.client.train_step(replace(batch, records=(broken, *batch.records[1:])))
        assert "rank 1" not in str(caught.value)
        await gang.processes[1].died()
        assert gang.processes[1].exit_status == 0  # no death


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
async def test_no_rank_is_left_when_the_main_process_or_rank_0_is_gone(model_folder, tmp_path, is_killed):
    async with two_ranks(model_folder, tmp_path) as gang:
        if is_killed:
            gang.processes[0].kill()
        else:
            await gang.client.aclose()
        await until_gone(gang)


class Broken(LocalHost):
    """A host on which ranks other than 0 end at once."""

    async def start(
        self, name: str, argv: Sequence[str], *, log_path: Path, env: Mapping[str, str] | None = None
    ) -> Process:
        ends = ["sh", "-c", "exit 3"]
        return await super().start(name, argv if name == rank_name(0) else ends, log_path=log_path, env=env)


@pytest.mark.slow
async def test_a_rank_that_dies_before_it_calls_is_named(model_folder, tmp_path):
    config = TrainerConfig(num_ranks=2)
    async with start_trainer(1, tmp_path, Broken()) as gang:
        with pytest.raises(TrainerDied, match="the trainer rank 1 process exited with 3"):
            await gang.init(TrainerSetup(model=model_folder, trainer=config, seed=0, shared_memory=tmp_path))


class Full(LocalHost):
    async def host_for(self, name: str) -> Host:
        raise ProcessDied(f"there is no node for the {name}")


async def test_a_rank_without_a_host_is_a_death_of_the_trainer(tmp_path):
    with pytest.raises(TrainerDied, match="there is no node for the trainer rank 1"):
        await start_rank(1, RankCall(options=(), variables={}), 1, tmp_path, Full())
    with pytest.raises(TrainerDied, match=r"there is no node for the trainer$"):
        async with start_trainer(1, tmp_path, Full()):
            pass


def test_ranks_that_will_not_call_are_no_longer_waited_for():
    ranks = Ranks.expect(1, "127.0.0.1")
    with pytest.raises(TrainerDied, match="rank 1 of the trainer ended before it called"):
        ranks.accept(lambda: False)


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1").startswith("lo")
    with pytest.raises(ConfigError, match=r"has the address 198\.51\.100\.1; check cluster\.network"):
        interface_of("198.51.100.1")  # of a network for documentation, which no machine is in


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_more_ranks_than_cuda_devices_are_refused():
    with pytest.raises(ConfigError, match=r"trainer\.num_ranks is 1025, but torch sees \d+ CUDA devices"):
        choose_device("cuda", num_ranks=1025)


ROOT = Path(__file__).parents[2]


def context(size: int) -> Context:
    group: Any = None
    return Context(group=group, rank=0, size=size)


def test_heads_that_cannot_be_shared_out_are_refused() -> None:
    context(4).check(8)
    with pytest.raises(
        ConfigError, match=r"context_parallel is 3, which does not divide the model's 8 .* \[1, 2, 4, 8\]"
    ):
        context(3).check(8)


def test_a_window_within_a_sequence_is_refused() -> None:
    query = torch.zeros(1, 2, 8, 4)
    rule = Rule(reach=4, arguments={})
    with pytest.raises(ConfigError, match="windows or chunks, of 4 tokens, and a sequence has 10; set it to 1"):
        segment_attention(torch.nn.Module(), query, query, query, rule, row=Row(segments=(10, 6), context=context(2)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["trainer.num_ranks=4", "trainer.context_parallel=3"], "which does not divide trainer.num_ranks = 4"),
        (["trainer.num_ranks=2", "trainer.context_parallel=2", "trainer.packing=padded"], "which divides packed rows"),
        (["trainer.num_ranks=4", "trainer.replicas=3"], "replicas is 3, which does not divide trainer.num_ranks = 4"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.load(ROOT / "configs" / "quickstart.yaml", settings)
