"""Weights by torch.distributed, into a server like SGLang's: the code in two schedulers of a model, without a model:

- each scheduler of each replica receives all of them, in one process group of both and the trainer, and loads them at
  the commit
- weights that are damaged, of another model or from nobody are loaded by none; the next push works
- after a load that fails, the schedulers load the previous weights that they hold, or the previous folder
- a server that was started again between send and commit holds nothing: the commit fails
- at most two sets are held, and none once a folder serves; a server with another launcher is recognised
- a client that comes later knows that such weights are in no folder
"""

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web
from torch import Tensor

from areal_agent.engine.foreign.engine import ForeignEngine
from areal_agent.engine.sglang.scheduler_extension import WeightReceiving
from areal_agent.engine.sglang.server import RECEIVED, SglangServer
from areal_agent.errors import WeightUpdateError
from areal_agent.types import PauseMode, WeightVersion
from areal_agent.weights.push import push

from ..transfers import FAULTS, Channels, open_channel, parameters_of, serve
from .scripted import OLD, ScriptedServer, serving

NEW, NEXT = WeightVersion(step=4), WeightVersion(step=5)
NUM_SCHEDULERS = 2
UPDATER = SimpleNamespace(
    tp_worker=SimpleNamespace(model_runner=SimpleNamespace(weight_updater=SimpleNamespace(device="cpu", gpu_id=0)))
)


class Meeting:
    """The place where the schedulers of one model exchange data."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(NUM_SCHEDULERS)
        self._told = [""] * NUM_SCHEDULERS

    def of_all(self, rank: int, mine: str) -> list[str]:
        self._told[rank] = mine
        self._barrier.wait()
        told = list(self._told)
        self._barrier.wait()
        return told


class Scheduler:
    """A scheduler as our hooks see SGLang's."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.receiving = WeightReceiving(SimpleNamespace, lambda _, mine: meeting.of_all(rank, mine))
        self.serves: str | dict[str, Tensor] = ""
        self.num_failures = 0  # of the next loads

    def check(self, asked: SimpleNamespace) -> SimpleNamespace:
        return self.receiving.around_check(self._unknown, UPDATER, asked)

    def update(self, path: str) -> SimpleNamespace:
        return self.receiving.around_update(self._load, UPDATER, SimpleNamespace(model_path=path))

    @property
    def receptions(self) -> Mapping[str, object]:
        return self.receiving.receptions

    def _load(self, _: object, asked: SimpleNamespace) -> SimpleNamespace:
        source = SimpleNamespace(model_or_path=asked.model_path)
        try:
            tensors = self.receiving.around_iterator(lambda loader, source: source.model_or_path, None, source)
        except RuntimeError as error:
            return SimpleNamespace(success=False, message=str(error))
        self.serves = tensors if isinstance(tensors, str) else {name: one.clone() for name, one in tensors}
        if self.num_failures:
            self.num_failures -= 1
            return SimpleNamespace(success=False, message="half of it is loaded")
        return SimpleNamespace(success=True, message="")

    def _unknown(self, _: object, asked: SimpleNamespace) -> SimpleNamespace:
        return SimpleNamespace(success=False, message=f"Unsupported {asked.action}")


def replica() -> list[Scheduler]:
    meeting = Meeting()
    return [Scheduler(rank, meeting) for rank in range(NUM_SCHEDULERS)]


class WorkingServer(ScriptedServer):
    """A server whose schedulers do what they are told; the first of each replica answers."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.replicas = [replica()]

    @property
    def receivers(self) -> list[Scheduler]:
        return list(itertools.chain(*self.replicas))

    def start_again(self) -> None:
        self.replicas = [replica()]

    def add_replica(self) -> None:
        self.replicas.append(replica())

    async def check(self, request: web.Request) -> web.Response:
        asked = SimpleNamespace(**await request.json())
        return self._merged(await asyncio.gather(*(asyncio.to_thread(one.check, asked) for one in self.receivers)))

    async def update(self, request: web.Request) -> web.Response:
        body = await request.json()
        answer = self._merged([one.update(body["model_path"]) for one in self.receivers])
        if answer.status == 200:
            self.model, self.label = body["model_path"], body["weight_version"]
        return answer

    def _merged(self, answers: list[SimpleNamespace]) -> web.Response:
        first = answers[::NUM_SCHEDULERS]
        is_good = all(one.success for one in first)
        body = {"success": is_good, "message": " | ".join(one.message for one in first)}
        return web.json_response(body, status=200 if is_good else 400)


@pytest.fixture
def channel(tiny: Path) -> Iterator[Channels]:
    with open_channel(tiny) as channel:
        yield channel


@pytest.fixture
async def server(tiny: Path) -> AsyncGenerator[tuple[WorkingServer, ForeignEngine]]:
    server = WorkingServer(str(tiny))
    async with serving(server) as url, contextlib.aclosing(ForeignEngine(SglangServer(url))) as engine:
        await engine.load(tiny, OLD)
        yield server, engine


async def test_every_receiver_has_all_and_loads_it_at_the_commit(server, channel, tiny, other):
    scripted, engine = server
    scripted.add_replica()
    await engine.load(tiny, OLD)
    await engine.begin_push("p")
    await engine.send_push("p", channel.write(parameters_of(other)))
    assert [one.serves for one in scripted.receivers] == [str(tiny)] * 4
    await engine.abort_push("p")
    await push([engine], channel.write(parameters_of(other)), NEW)
    assert serve(scripted.receivers, other)
    assert scripted.label == str(NEW)
    await push([engine], channel.write(parameters_of(tiny)), NEXT)
    assert serve(scripted.receivers, tiny)


async def test_what_is_wrong_is_loaded_by_none(server, channel, tiny, other):
    scripted, engine = server
    weights = channel.write(parameters_of(other))
    for fault, message in FAULTS.items():
        with pytest.raises(WeightUpdateError, match=message):
            await push([engine], fault(weights), NEW)
        assert [one.serves for one in scripted.receivers] == [str(tiny)] * len(scripted.receivers), fault
        assert scripted.label == str(OLD)
    await push([engine], weights, NEW)
    assert serve(scripted.receivers, other)


async def test_a_load_that_fails_brings_back_what_was_there_before(server, channel, tiny, other):
    scripted, engine = server
    scripted.receivers[0].num_failures = 1
    with pytest.raises(WeightUpdateError, match="the previous weights were loaded again"):
        await push([engine], channel.write(parameters_of(other)), NEW)
    assert [one.serves for one in scripted.receivers] == [str(tiny)] * len(scripted.receivers)
    await push([engine], channel.write(parameters_of(other)), NEW)
    scripted.receivers[0].num_failures = 1
    with pytest.raises(WeightUpdateError, match="the previous weights were loaded again"):
        await push([engine], channel.write(parameters_of(tiny)), NEXT)
    assert serve(scripted.receivers, other)
    assert scripted.label == str(NEW)


async def test_a_server_that_was_started_again_holds_nothing(server, channel, tiny, other):
    scripted, engine = server
    await engine.begin_push("p")
    await engine.send_push("p", channel.write(parameters_of(other)))
    scripted.start_again()
    await engine.pause(PauseMode.RETRACT)
    with pytest.raises(WeightUpdateError, match="nothing was received in push p"):
        await engine.commit_push("p", NEW)
    assert [one.serves for one in scripted.receivers] == [str(tiny)] * len(scripted.receivers)


async def test_two_sets_are_held_and_none_beside_a_folder(server, channel, tiny, other):
    scripted, engine = server
    for step in range(4, 8):
        await push([engine], channel.write(parameters_of(other)), WeightVersion(step=step))
        assert all(len(one.receptions) <= 2 for one in scripted.receivers)
    await engine.load(tiny, WeightVersion(step=8))
    assert [one.receptions for one in scripted.receivers] == [{}] * len(scripted.receivers)


async def test_a_server_that_was_not_started_by_our_launcher(tiny, channel, other):
    server = ScriptedServer(str(tiny))
    async with serving(server) as url, contextlib.aclosing(ForeignEngine(SglangServer(url))) as engine:
        with pytest.raises(WeightUpdateError, match=r"Was it started by .*launcher\.py"):
            await push([engine], channel.write(parameters_of(other)), NEW)
    assert server.loaded == []


async def test_whoever_comes_later_does_not_take_them_for_a_folder(server, channel, tiny, other):
    scripted, engine = server
    await push([engine], channel.write(parameters_of(other)), NEW)
    assert scripted.model.startswith(RECEIVED)
    async with contextlib.aclosing(ForeignEngine(SglangServer(engine.base_url))) as another:
        scripted.receivers[0].num_failures = 1
        with pytest.raises(WeightUpdateError, match="the source of the previous weights is unknown here"):
            await push([another], channel.write(parameters_of(tiny)), NEXT)
