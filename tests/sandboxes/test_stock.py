"""The warm stock, over a provider whose cells start when the test lets them.

1. The first who asks is served and nothing is started ahead; who then finds nothing ready has one more kept ready; 2. a
cell is handed out once; 3. who waits is served in the order of asking; 4. one that has died in stock is not handed out;
5. one that nobody asks for is closed, and fewer are kept; 6. never more than the bound stand ready, over all kinds;
7. a failure to start is told to who waits longest, the next may succeed; 8. a cell that comes for somebody who has gone
is kept; 9. closing closes what stands ready and fails who waits; 10. `warm` has as many ready as asked; 11. a
cell that comes for a sandbox whose closing was cancelled meanwhile is closed; 12. `warm` waits for those that others
have begun to start, and starts others for those that fail; 13. the next is not started in the moment in which one is
handed out; 14. programs that sandboxes failed are counted, and above one per cent the pool warns at its end.
"""

import asyncio
import logging
from collections import Counter

import pytest
import pytest_asyncio

from areal_agent.errors import SandboxError
from sandboxes import Limits, Sandbox, SandboxSpec
from sandboxes.pool import Stock, log_counts
from sandboxes.spec import CellSpec

ONE, OTHER = CellSpec(limits=Limits()), CellSpec(limits=Limits(), image="other")


class StubCell:
    """What the stock asks of a cell."""

    def __init__(self) -> None:
        self.is_living = True
        self.is_closed = False

    async def answers(self) -> bool:
        return self.is_living

    async def close(self) -> None:
        self.is_closed = True


class StubProvider:
    """What the stock asks of a provider: each cell waits for `let`."""

    def __init__(self) -> None:
        self.asked: list[asyncio.Future[StubCell]] = []
        self.is_open = False

    async def create(self, spec: CellSpec) -> StubCell:
        if self.is_open:
            return StubCell()
        self.asked.append(asyncio.get_running_loop().create_future())
        return await self.asked[-1]


async def turns() -> None:
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


def num_ready(stock: Stock) -> int:
    return sum(len(shelf.ready) for shelf in stock.shelves.values())


@pytest.fixture
def provider() -> StubProvider:
    return StubProvider()


@pytest_asyncio.fixture(loop_scope="module")
async def stock(provider: StubProvider):
    stock = Stock(provider, max_idle=2, idle_s=1000.0, refill_pause_s=0.0)
    yield stock
    await stock.aclose()


async def test_demand_sizes_it(stock: Stock, provider: StubProvider) -> None:
    provider.is_open = True
    numbers = []
    for _ in range(5):
        await stock.take(ONE)
        await turns()
        numbers.append(num_ready(stock))
    assert numbers == [0, 1, 1, 1, 1]


async def test_a_cell_is_handed_out_once(stock: Stock, provider: StubProvider) -> None:
    provider.is_open = True
    cells = [await stock.take(ONE) for _ in range(10)]
    assert len(set(cells)) == 10


async def test_order_of_asking(stock: Stock, provider: StubProvider) -> None:
    calls = [asyncio.create_task(stock.take(ONE)) for _ in range(3)]
    await turns()
    cells = [StubCell() for _ in range(3)]
    for number in (2, 0, 1):  # whichever is ready first goes to who asked first
        provider.asked[number].set_result(cells[number])
        await turns()
    assert [await call for call in calls] == [cells[2], cells[0], cells[1]]


async def test_dead_cell_is_not_handed_out(stock: Stock, provider: StubProvider) -> None:
    provider.is_open = True
    await stock.warm(ONE, 1)
    [[dead]] = [shelf.ready for shelf in stock.shelves.values()]
    dead.is_living = False
    assert await stock.take(ONE) is not dead
    await turns()
    assert dead.is_closed


async def test_unused_cell_is_closed() -> None:
    provider = StubProvider()
    provider.is_open = True
    stock = Stock(provider, max_idle=2, idle_s=0.0, refill_pause_s=0.0)
    await stock.warm(ONE, 5)
    await turns()
    assert stock.shelves == {}
    await stock.aclose()


async def test_bound_holds_over_all_kinds(stock: Stock, provider: StubProvider) -> None:
    provider.is_open = True
    await stock.warm(ONE, 5)
    assert num_ready(stock) == 2
    for _ in range(4):
        await asyncio.gather(*(stock.take(spec) for spec in (ONE, ONE, ONE, OTHER, OTHER)))
        await turns()
        assert num_ready(stock) <= 2


async def test_bound_holds_when_many_have_gone(stock: Stock, provider: StubProvider) -> None:
    calls = [asyncio.create_task(stock.take(ONE)) for _ in range(4)]
    await turns()
    for call in calls:
        call.cancel()
    await turns()
    cells = [StubCell() for _ in range(4)]
    for asked, cell in zip(provider.asked, cells, strict=True):
        asked.set_result(cell)
    await turns()
    assert (num_ready(stock), [cell.is_closed for cell in cells]) == (2, [False, False, True, True])


async def test_failure_is_told_to_who_waits_longest(stock: Stock, provider: StubProvider) -> None:
    first, second = (asyncio.create_task(stock.take(ONE)) for _ in range(2))
    await turns()
    provider.asked[1].set_exception(SandboxError("no room"))
    with pytest.raises(SandboxError, match="no room"):
        await first
    cell = StubCell()
    provider.asked[0].set_result(cell)
    assert await second is cell


async def test_cell_for_somebody_who_has_gone_is_kept(stock: Stock, provider: StubProvider) -> None:
    call = asyncio.create_task(stock.take(ONE))
    await turns()
    call.cancel()
    await turns()
    cell = StubCell()
    provider.asked[0].set_result(cell)
    await turns()
    assert await stock.take(ONE) is cell


async def test_closing(provider: StubProvider) -> None:
    stock = Stock(provider, max_idle=2)
    provider.is_open = True
    await stock.warm(ONE, 1)
    [[cell]] = [shelf.ready for shelf in stock.shelves.values()]
    provider.is_open = False
    waiting = asyncio.create_task(stock.take(OTHER))
    await turns()
    await stock.aclose()
    assert cell.is_closed
    with pytest.raises(SandboxError, match="the sandbox pool was closed"):
        await waiting
    with pytest.raises(SandboxError, match="the sandbox pool is closed; open another"):
        await stock.take(ONE)


async def test_a_cell_for_a_closed_sandbox_is_closed() -> None:
    coming: asyncio.Future[StubCell] = asyncio.get_running_loop().create_future()

    async def take(_spec: CellSpec) -> StubCell:
        return await coming

    box = Sandbox(take, SandboxSpec(), Limits(), asyncio.Semaphore(1), Counter())
    use, closing = asyncio.create_task(box.read("file")), asyncio.create_task(box.close())
    await turns()
    closing.cancel()
    await turns()
    cell = StubCell()
    coming.set_result(cell)
    with pytest.raises(SandboxError, match="closed"):
        await use
    assert cell.is_closed


async def test_what_sandboxes_fail_is_counted_and_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async def take(_spec: CellSpec) -> StubCell:
        raise SandboxError("no more cells")

    counts = Counter({"ok": 98, "nonzero": 1})
    box = Sandbox(take, SandboxSpec(), Limits(), asyncio.Semaphore(1), counts)
    for _ in range(2):
        with pytest.raises(SandboxError):
            await box.exec(["true"])
        log_counts(counts)
    assert [record.levelno for record in caplog.records if record.levelno > logging.INFO] == [logging.WARNING]
    assert caplog.messages[-1] == "of 101 programs 98 succeeded, 1 failed by themselves, and 2 because of their sandbox"


async def test_warm_waits_for_those_that_are_being_started(stock: Stock, provider: StubProvider) -> None:
    warming = [asyncio.create_task(stock.warm(ONE, 1)), asyncio.create_task(stock.take(ONE))]
    await turns()
    provider.asked[0].set_result(StubCell())
    await asyncio.gather(*warming)
    await turns()
    warm = asyncio.create_task(stock.warm(ONE, 1))
    await turns()
    assert (len(provider.asked), warm.done()) == (2, False)
    provider.asked[1].set_result(StubCell())
    await warm
    assert num_ready(stock) == 1


async def test_warm_starts_in_the_place_of_those_that_failed(stock: Stock, provider: StubProvider) -> None:
    taking = [asyncio.create_task(stock.take(ONE)) for _ in range(2)]
    await turns()
    for future in provider.asked[:2]:
        future.set_result(StubCell())
    await asyncio.gather(*taking)
    await turns()
    warm = asyncio.create_task(stock.warm(ONE, 1))
    await turns()
    provider.asked[2].set_exception(SandboxError("no room"))
    await turns()
    assert (len(provider.asked), warm.done()) == (4, False)
    provider.asked[3].set_exception(SandboxError("still no room"))
    with pytest.raises(SandboxError, match="still no room"):
        await warm


async def test_the_next_is_not_started_while_one_is_handed_out(provider: StubProvider) -> None:
    provider.is_open = True
    stock = Stock(provider, max_idle=1, refill_pause_s=1000.0)
    await stock.warm(ONE, 1)
    await stock.take(ONE)
    await turns()
    assert num_ready(stock) == 0
    await stock.take(ONE)  # who finds none does not wait for that
    await stock.aclose()
