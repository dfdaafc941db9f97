"""Weights by torch.distributed, into a server like vLLM's: the code of two workers, without a model:

- each worker of each replica receives all of them, in one process group of both and the trainer, and loads them at the
  commit
- weights that are damaged, of another model or from nobody are loaded by none; the next push works
- after a load that fails, the workers load the previous weights that they hold, or the previous folder
- a server that was started again between send and commit holds nothing: the commit fails
- one replica that fails undoes the load, though only the first answers
- at most two sets are held, and none once a folder serves; a server with another launcher is recognised
"""

from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from aiohttp import web
from torch import Tensor, nn

from areal_agent.engine.foreign.engine import ForeignEngine
from areal_agent.engine.vllm.worker_extension import WeightLoading
from areal_agent.errors import WeightUpdateError
from areal_agent.types import WeightVersion
from areal_agent.weights.push import push

from ..sglang.test_receiving import (  # noqa: F401
    channel,
    test_a_load_that_fails_brings_back_what_was_there_before,
    test_a_server_that_was_started_again_holds_nothing,
    test_every_receiver_has_all_and_loads_it_at_the_commit,
    test_two_sets_are_held_and_none_beside_a_folder,
    test_what_is_wrong_is_loaded_by_none,
)
from ..transfers import parameters_of, serve
from .scripted import OLD, ScriptedServer, answering

__all__ = ["channel"]  # a fixture

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
        self.start_again()

    def start_again(self) -> None:
        self.receivers = [Worker() for _ in range(NUM_WORKERS)]

    def add_replica(self) -> None:
        self.receivers += [Worker(replica=1) for _ in range(NUM_WORKERS)]

    async def rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        try:
            results = [getattr(worker, body["method"])(*body["args"]) for worker in self.receivers]
        except (AttributeError, KeyError, RuntimeError) as error:
            return web.json_response({"error": {"message": repr(error)}}, status=500)
        return web.json_response({"results": results[:NUM_WORKERS]})  # of the first replica


@pytest.fixture
async def server(tiny: Path) -> AsyncGenerator[tuple[WorkingServer, ForeignEngine]]:
    server = WorkingServer(str(tiny))
    async with answering(server) as engine:
        await engine.load(tiny, OLD)
        yield server, engine


async def test_a_replica_that_fails_undoes_the_load(server, channel, tiny, other):
    scripted, engine = server
    scripted.add_replica()
    await push([engine], channel.write(parameters_of(other)), NEW)
    scripted.receivers[-1].num_failures = 1
    with pytest.raises(WeightUpdateError, match="the previous weights were loaded again"):
        await push([engine], channel.write(parameters_of(tiny)), NEXT)
    assert serve(scripted.receivers, other)


async def test_a_server_that_was_not_started_by_our_launcher(server, channel, other):
    scripted, engine = server
    scripted.receivers = [SimpleNamespace()]
    with pytest.raises(WeightUpdateError, match=r"Was it started by .*launcher\.py"):
        await push([engine], channel.write(parameters_of(other)), NEW)
