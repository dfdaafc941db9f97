"""What may go wrong in a story, and when: drawn from a seed, so that a story can be told again and made shorter."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from areal_agent.engine.fake import Operation
from areal_agent.errors import EngineUnreachable
from areal_agent.storm.cluster import Cluster
from areal_agent.storm.machine import AFTER_A_COMMIT, BEFORE_A_COMMIT, Node, SimulatedProcess
from areal_agent.storm.programs import Network, StormEngine
from areal_agent.trainer.checkpoint import CommitPoint

T = TypeVar("T")

GAP_S = 6.0
"""The mean time between two faults that do not come together."""

POINTS = (
    BEFORE_A_COMMIT,
    AFTER_A_COMMIT,
    CommitPoint.WRITTEN,
    CommitPoint.DURABLE,
    CommitPoint.PUBLISHED,
    CommitPoint.PRUNED,
)
HANGING = (Operation.RESUME, Operation.BEGIN_PUSH, Operation.SEND_PUSH, Operation.COMMIT_PUSH)
"""A pause that waits for turns to end has no limit, so one that hangs would hang for ever."""
PUSHES = (Operation.PAUSE, *HANGING)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One thing that goes wrong, `gap_s` after the one before. `draw` in [0, 1) chooses among what is there then."""

    kind: str
    gap_s: float
    draw: float
    for_s: float

    def one_of(self, values: Sequence[T], shift: int = 1) -> T:
        """Return the chosen one; with another `shift`, a choice that has nothing to do with it."""
        return values[int(self.draw * shift * len(values)) % len(values)]

    def later(self, seconds: float) -> "Fault":
        """Return this fault with a longer gap before it."""
        return replace(self, gap_s=self.gap_s + seconds)


class Machines(Protocol):
    """What a fault strikes at: the machines of a story."""

    network: Network
    cluster: Cluster
    full_until_s: float  # no ledger can be written until then
    slow_until_s: float  # until then each write takes seconds
    no_saves_until_s: float  # nor a checkpoint

    @property
    def now_s(self) -> float: ...

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        """Call `action` later, whatever lives then."""
        ...

    def set_the_clock(self, seconds: float) -> None:
        """Set the time of day forward, or back where it is negative."""
        ...

    def processes(self, prefix: str) -> Sequence[SimulatedProcess]:
        """Return the living processes whose names begin so."""
        ...

    def engines(self) -> Sequence[StormEngine]:
        """Return the living engines."""
        ...

    def kill_run(self) -> bool:
        """Kill every process of the run. Return whether there was one."""
        ...

    def interrupt_run(self) -> bool:
        """Ask the run to save and to end, as Ctrl-C does. Return whether there was one."""
        ...

    def stop_run(self, for_s: float) -> bool:
        """Stop the run's own process for a while. Return whether there was one."""
        ...

    def kill_at(self, point: str, times: int, felt: Callable[[], object]) -> None:
        """Kill the run once it has passed this point so often, and call `felt`."""
        ...

    def felt(self, fault: Fault, how: str) -> None:
        """Count that a fault has hit something, and tell what, and for how long."""
        ...


Strike = Callable[[Machines, Fault], None]
"""Does it, and tells the machines when something has felt it."""


def _told(fault: Fault, how: str | None) -> str:
    """Return in words how a fault has struck: `how`, or for how long."""
    return f"for {fault.for_s:g} s" if how is None else how


def _always(do: Callable[[Machines, Fault], str | None]) -> Strike:
    def strike(machines: Machines, fault: Fault) -> None:
        machines.felt(fault, _told(fault, do(machines, fault)))

    return strike


def _run(do: Callable[[Machines, Fault], bool], how: str | None = "") -> Strike:
    def strike(machines: Machines, fault: Fault) -> None:
        if do(machines, fault):
            machines.felt(fault, _told(fault, how))

    return strike


def _process(prefix: str, do: Callable[[Machines, SimulatedProcess, Fault], str | None]) -> Strike:
    def strike(machines: Machines, fault: Fault) -> None:
        if living := machines.processes(prefix):
            process = fault.one_of(living)
            which = "" if process.name == prefix else process.name
            machines.felt(fault, f"{which} {_told(fault, do(machines, process, fault))}")

    return strike


def _node(do: Callable[[Cluster, Node, float], object]) -> Strike:
    def strike(machines: Machines, fault: Fault) -> None:
        living = [one.program.node for one in machines.processes("")]
        if any(living) and (node := fault.one_of(living)) is not None and machines.cluster.may_fail(node):
            do(machines.cluster, node, fault.for_s)
            machines.felt(fault, f"{node.name} {_told(fault, None)}")

    return strike


def _engine(do: Callable[[Machines, StormEngine, Fault], str | None]) -> Strike:
    def strike(machines: Machines, fault: Fault) -> None:
        if living := machines.engines():
            engine = fault.one_of(living)
            machines.felt(fault, f"{engine.program.name} {_told(fault, do(machines, engine, fault))}")

    return strike


def _kill(machines: Machines, process: SimulatedProcess, fault: Fault) -> str:
    process.kill()
    return ""


def _stop(machines: Machines, process: SimulatedProcess, fault: Fault) -> None:
    process.program.stop()
    machines.after(fault.for_s, process.program.go_on)


def _slow(machines: Machines, engine: StormEngine, fault: Fault) -> None:
    engine.slow = 40.0
    machines.after(fault.for_s, lambda: setattr(engine, "slow", 1.0))


def _fail(machines: Machines, engine: StormEngine, fault: Fault) -> str:
    operation = fault.one_of(PUSHES, 97)
    engine.fail_next(operation, EngineUnreachable("the connection was reset"))
    return operation


def _hang(machines: Machines, engine: StormEngine, fault: Fault) -> str:
    operation = fault.one_of(HANGING, 97)
    engine.hang_next(operation)
    return operation


def _kill_at_a_point(machines: Machines, fault: Fault) -> None:
    point = fault.one_of(POINTS)
    times = fault.one_of(range(20), 97) if point in (BEFORE_A_COMMIT, AFTER_A_COMMIT) else 0
    machines.kill_at(point, times, lambda: machines.felt(fault, point))


def _damage(machines: Machines, fault: Fault) -> None:
    if living := machines.engines():
        engine = fault.one_of(living)
        engine.damaged.append(lambda: machines.felt(fault, engine.program.name))


def _cut(machines: Machines, engine: StormEngine, fault: Fault) -> str:
    program = fault.one_of(("main", *(one.name for one in machines.processes("worker"))), 97)
    machines.network.cut[program, engine.url] = machines.now_s + fault.for_s
    return f"from {program} {_told(fault, None)}"


def _lose(machines: Machines, engine: StormEngine, fault: Fault) -> str:
    machines.network.lost[engine.url] += 1
    return ""


def _repeat(machines: Machines, engine: StormEngine, fault: Fault) -> str:
    machines.network.repeated[engine.url] += 1
    return ""


def _late(machines: Machines, fault: Fault) -> None:
    machines.network.late_until_s = machines.now_s + fault.for_s


def _fill_the_disk(machines: Machines, fault: Fault) -> str:
    seconds = fault.for_s / 10
    machines.full_until_s = machines.now_s + seconds
    return f"for {seconds:g} s"


def _slow_the_disk(machines: Machines, fault: Fault) -> None:
    machines.slow_until_s = machines.now_s + fault.for_s


def _forbid_saves(machines: Machines, fault: Fault) -> None:
    machines.no_saves_until_s = machines.now_s + fault.for_s


def _set_the_clock(machines: Machines, fault: Fault) -> str:
    seconds = fault.for_s * fault.one_of((60, -60))
    machines.set_the_clock(seconds)
    return f"by {seconds:+g} s"


KINDS: Mapping[str, Strike] = {
    "the run is killed": _run(lambda machines, fault: machines.kill_run()),
    "the run is killed at a commit": _kill_at_a_point,
    "the run is interrupted": _run(lambda machines, fault: machines.interrupt_run()),
    "the run is stopped": _run(lambda machines, fault: machines.stop_run(fault.for_s), how=None),
    "the trainer is killed": _process("trainer", _kill),
    "the trainer is stopped": _process("trainer", _stop),
    "a worker is killed": _process("worker", _kill),
    "a worker is stopped": _process("worker", _stop),
    "an engine is killed": _process("engine", _kill),
    "an engine is stopped": _process("engine", _stop),
    "a machine is lost": _node(Cluster.lose),
    "a machine is cut off": _node(Cluster.cut_off),
    "a machine stands still": _node(Cluster.stand_still),
    "an engine is slow": _engine(_slow),
    "an engine's answer is lost": _engine(_lose),
    "an engine is cut off": _engine(_cut),
    "a message comes twice": _engine(_repeat),
    "messages are late": _always(_late),
    "weights arrive damaged": _damage,
    "a call of a push fails": _engine(_fail),
    "a call of a push hangs": _engine(_hang),
    "the ledger's disk is full": _always(_fill_the_disk),
    "the ledger's disk is slow": _always(_slow_the_disk),
    "no checkpoint can be written": _always(_forbid_saves),
    "the clock is set": _always(_set_the_clock),
}
"""What may go wrong, for a while where that can be. Cut off is an engine from one program, and both live on."""


ENDING = frozenset(kind for kind in KINDS if kind.startswith(("the run is", "the trainer is")))
"""What ends the process of a run as a rule: half of the stories have none of these, so that it lives for long."""


def draw_faults(seed: int, num_faults: int, kinds: Sequence[str] = ()) -> list[Fault]:
    """Draw a story's faults, of all kinds or of these. One in five comes together with the one before."""
    drawn = random.Random(f"faults of {seed}")
    chosen = list(kinds) or [kind for kind in KINDS if seed % 2 or kind not in ENDING]
    return [
        Fault(
            kind=drawn.choice(chosen),
            gap_s=drawn.expovariate(1 / GAP_S) if drawn.random() < 0.8 else 0.0,
            draw=drawn.random(),
            for_s=drawn.choice((1.0, 10.0, 45.0, 120.0)),
        )
        for _ in range(num_faults)
    ]


def shrink(faults: Sequence[Fault], fails: Callable[[Sequence[Fault]], bool], max_tries: int = 60) -> Sequence[Fault]:
    """Return fewer faults with which `fails` still holds, by leaving out runs of them, long ones first.

    The others strike when they did. (Zeller and Hildebrandt 2002, "Simplifying and isolating failure-inducing input".)
    """
    kept, size, tries = list(faults), max(1, len(faults) // 2), 0
    while tries < max_tries:
        start, is_shorter = 0, False
        while start < len(kept) and tries < max_tries:
            shorter = _without(kept, start, start + size)
            tries += 1
            if fails(shorter):
                kept, is_shorter = shorter, True
            else:
                start += size
        if size == 1 and not is_shorter:
            break
        size = max(1, size // 2)
    return kept


def _without(faults: Sequence[Fault], start: int, end: int) -> list[Fault]:
    left = list(faults[end:])
    if left:
        left[0] = left[0].later(sum(one.gap_s for one in faults[start:end]))
    return [*faults[:start], *left]
