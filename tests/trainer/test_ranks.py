"""A trainer of two ranks, as the main process has it: real processes behind a client.

- It trains and publishes as one rank does.
- A rank that is killed fails the step with an error that names it, and every command after; none is left.
- A rank that is killed between two commands ends the trainer, whose log says why.
- What a record lacks is told once, as with one rank.
- When the main process closes its end, no rank is left.
- More ranks than CUDA devices are refused.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.cluster.hosts import Process
from areal_agent.errors import ConfigError, ProcessDied, TrainerError
from areal_agent.trainer.client import TrainerClient
from areal_agent.trainer.config import TrainerConfig, TrainerSetup
from areal_agent.trainer.model import choose_device
from tests.trainer.lab import GRADIENT_DESCENT, Lab, real_process
from tests.trainer.two_ranks import published_weights


@dataclass(frozen=True)
class Started:
    client: TrainerClient
    rank_0: Process
    rank_1: psutil.Process

    async def gone(self) -> None:
        """Wait until neither is left."""
        await self.rank_0.died()
        await asyncio.to_thread(self.rank_1.wait)


@asynccontextmanager
async def two_ranks(model: Path, folder: Path, config: TrainerConfig = GRADIENT_DESCENT) -> AsyncIterator[Started]:
    setup = {"model": model, "trainer": config.model_copy(update={"num_ranks": 2}), "algorithm": AlgorithmConfig()}
    async with real_process(folder) as (process, client):
        await client.init(TrainerSetup(**setup, seed=0, shared_memory=folder))
        (rank_1,) = psutil.Process(process.pid).children()
        yield Started(client, process, rank_1)


@pytest.mark.slow
async def test_two_ranks_train_as_one_until_one_is_killed(model_folder, make_batch, as_input, tmp_path):
    batch = make_batch(1)
    alone = Lab(model_folder)
    alone.stepper.train(as_input(batch))
    async with two_ranks(model_folder, tmp_path) as started:
        report = await started.client.train_step(batch)
        assert report.metrics["num_micro_batches"] == 2
        published = published_weights(await started.client.publish())
        torch.testing.assert_close(published - alone.before, alone.weights() - alone.before, atol=2e-6, rtol=1e-4)
        started.rank_1.kill()
        for _ in range(2):  # where the command comes late, the trainer has ended by itself
            with pytest.raises((TrainerError, ProcessDied)) as caught:
                await started.client.train_step(make_batch(2))
            assert "rank" in f"{caught.value} {started.rank_0.log_tail()}"
        assert "was killed by SIGKILL" in started.rank_0.log_path.read_text()
        with contextlib.suppress(ProcessDied):
            await started.client.shutdown()
        await started.gone()


@pytest.mark.slow
async def test_a_rank_that_is_killed_between_commands_ends_the_trainer(model_folder, tmp_path):
    async with two_ranks(model_folder, tmp_path) as started:
        started.rank_1.kill()
        await started.gone()
        with pytest.raises(ProcessDied):
            await started.client.publish()
        assert "rank 1 was killed by SIGKILL; this trainer cannot continue" in started.rank_0.log_tail()


@pytest.mark.slow
async def test_what_a_record_lacks_is_told_once(model_folder, make_batch, tmp_path):
    batch = make_batch(1)
    first = batch.records[0]
    broken = replace(first, behavior_logprobs=np.full_like(first.behavior_logprobs, np.nan))
    async with two_ranks(model_folder, tmp_path) as started:
        with pytest.raises(TrainerError, match="ValueError: branch 0 of session") as caught:
            await started.client.train_step(replace(batch, records=(broken, *batch.records[1:])))
        assert "rank 1" not in str(caught.value)
        await asyncio.to_thread(started.rank_1.wait)


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
async def test_no_rank_is_left_when_the_main_process_or_rank_0_is_gone(model_folder, tmp_path, is_killed):
    async with two_ranks(model_folder, tmp_path) as started:
        if is_killed:
            started.rank_0.kill()
        else:
            await started.client.aclose()
        await started.gone()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_more_ranks_than_cuda_devices_are_refused():
    with pytest.raises(ConfigError, match=r"trainer\.num_ranks is 1025, but torch sees \d+ CUDA devices"):
        choose_device("cuda", num_ranks=1025)
