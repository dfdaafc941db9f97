"""Weights by torch.distributed, into a server like vLLM's: the code of two workers, without a model:

- each worker receives all of them, in one process group of both and the trainer, and loads them at the commit
- weights that are damaged, of another model or from nobody are loaded by none; the next push works
- after a load that fails, the workers load the previous weights that they hold, or the previous folder
- a server that was started again between send and commit holds nothing: the commit fails
- each replica of a server receives them, though only the first answers; one that fails undoes the load
- at most two sets are held, and none once a folder serves; a server with another launcher is recognised
"""

from collections.abc import AsyncGenerator, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from aiohttp import web
from torch import Tensor, nn

from areal_agent.engine.foreign.engine import ForeignEngine
from areal_agent.engine.vllm.worker_extension import WeightLoading
from areal_agent.errors import WeightUpdateError
from areal_agent.types import PauseMode, WeightVersion
from areal_agent.weights.channels import DistributedChannel
from areal_agent.weights.push import push

from ..transfers import FAULTS, open_channel, parameters_of, serve
from .scripted import OLD, ScriptedServer, answering

NUM_WORKERS = 2
NEW, NEXT = WeightVersion(step=4), WeightVersion(step=5)


class Worker(WeightLoading):
    """A worker as the extension sees vLLM's worker class."""

    def __init__(self, replica: int = 0) -> None:
        self.device = torch.device("cpu")
        self.parallel_config = SimpleNamespace(
            world_size=NUM_WORKERS, data_parallel_size=1, data_parallel_index=replica
        )
        self.model_runner = SimpleNamespace(get_model=nn.Module)
        self.serves: str | dict[str, Tensor] = ""
        self.num_failures = 0  # of the next loads

    def reload_weights(
        self, weights_path: str = "", weights_iterator: Iterable[tuple[str, Tensor]] | None = None
    ) -> None:
        self.serves = {name: one.clone() for name, one in weights_iterator} if weights_iterator else weights_path
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError("half of it is loaded")


class WorkingServer(ScriptedServer):
    """A server whose workers do what they are told."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.workers = [Worker() for _ in range(NUM_WORKERS)]

    async def rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        try:
            results = [getattr(worker, body["method"])(*body["args"]) for worker in self.workers]
        except (AttributeError, KeyError, RuntimeError) as error:
            return web.json_response({"error": {"message": repr(error)}}, status=500)
        return web.json_response({"results": results[:NUM_WORKERS]})  # of the first replica


@pytest.fixture
def channel(tiny: Path) -> Iterator[DistributedChannel]:
    with open_channel(tiny) as channel:
        yield channel


@pytest.fixture
async def server(tiny: Path) -> AsyncGenerator[tuple[WorkingServer, ForeignEngine]]:
    server = WorkingServer(str(tiny))
    async with answering(server) as engine:
        await engine.load(tiny, OLD)
        yield server, engine


async def test_every_worker_receives_all_and_loads_it_at_the_commit(server, channel, tiny, other):
    scripted, engine = server
    await engine.begin_push("p")
    await engine.send_push("p", channel.write(parameters_of(other)))
    assert [worker.serves for worker in scripted.workers] == [str(tiny)] * NUM_WORKERS
    await engine.abort_push("p")
    await push([engine], channel.write(parameters_of(other)), NEW)
    assert serve(scripted.workers, other)
    assert scripted.label == str(NEW)
    await push([engine], channel.write(parameters_of(tiny)), NEXT)
    assert serve(scripted.workers, tiny)


@pytest.mark.parametrize(("fault", "message"), FAULTS.items())
async def test_what_is_wrong_is_loaded_by_none(server, channel, tiny, other, fault, message):
    scripted, engine = server
    weights = channel.write(parameters_of(other))
    with pytest.raises(WeightUpdateError, match=message):
        await push([engine], fault(weights), NEW)
    assert [worker.serves for worker in scripted.workers] == [str(tiny)] * NUM_WORKERS
    assert scripted.label == str(OLD)
    await push([engine], weights, NEW)
    assert serve(scripted.workers, other)


async def test_a_load_that_fails_brings_back_what_was_there_before(server, channel, tiny, other):
    scripted, engine = server
    scripted.workers[0].num_failures = 1
    with pytest.raises(WeightUpdateError, match="the previous weights were loaded again"):
        await push([engine], channel.write(parameters_of(other)), NEW)
    assert [worker.serves for worker in scripted.workers] == [str(tiny)] * NUM_WORKERS
    await push([engine], channel.write(parameters_of(other)), NEW)
    scripted.workers[1].num_failures = 1
    with pytest.raises(WeightUpdateError, match="the previous weights were loaded again"):
        await push([engine], channel.write(parameters_of(tiny)), NEXT)
    assert serve(scripted.workers, other)
    assert scripted.label == str(NEW)


async def test_a_server_that_was_started_again_holds_nothing(server, channel, tiny, other):
    scripted, engine = server
    await engine.begin_push("p")
    await engine.send_push("p", channel.write(parameters_of(other)))
    scripted.workers = [Worker() for _ in range(NUM_WORKERS)]
    await engine.pause(PauseMode.RETRACT)
    with pytest.raises(WeightUpdateError):
        await engine.commit_push("p", NEW)
    assert [worker.serves for worker in scripted.workers] == [str(tiny)] * NUM_WORKERS


async def test_replicas_are_sent_them_each(server, channel, tiny, other):
    scripted, engine = server
    scripted.workers += [Worker(replica=1) for _ in range(NUM_WORKERS)]
    await push([engine], channel.write(parameters_of(other)), NEW)
    assert serve(scripted.workers, other)
    scripted.workers[-1].num_failures = 1
    with pytest.raises(WeightUpdateError, match="the previous weights were loaded again"):
        await push([engine], channel.write(parameters_of(tiny)), NEXT)
    assert serve(scripted.workers, other)


async def test_two_sets_are_held_and_none_beside_a_folder(server, channel, tiny, other):
    scripted, engine = server
    for step in range(4, 8):
        await push([engine], channel.write(parameters_of(other)), WeightVersion(step=step))
        assert all(len(worker.receptions) <= 2 for worker in scripted.workers)
    await engine.load(tiny, WeightVersion(step=8))
    assert [worker.receptions for worker in scripted.workers] == [{}] * NUM_WORKERS


async def test_a_server_that_was_not_started_by_our_launcher(server, channel, other):
    scripted, engine = server
    scripted.workers = [SimpleNamespace()]
    with pytest.raises(WeightUpdateError, match=r"Was it started by .*launcher\.py"):
        await push([engine], channel.write(parameters_of(other)), NEW)
