"""A discrete-event model of a run: engines that share their time among requests, tool waits, the bound, one trainer.

    admit (bound, slots) ─▶ wait ─▶ turn at the least busy server ─▶ wait ─▶ ... ─▶ group ready ─▶ take
              ▲                                                                                     │
              └──────────────── publish ◀── push (engines held at its end) ◀── train ◀──────────────┘

With n requests a server gives each 1 / (token_s + crowd_s n) tokens a second (processor sharing). While a server and
the trainer both work, each takes 1 + contention times as long. Admission and batches follow staleness.py and
rollout/producer.py: whole groups, the oldest first, and stragglers at the bound.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from areal_agent.staleness import Admission


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a rollout: the wait for tools before it, and the tokens that it samples."""

    wait_s: float
    num_tokens: float


Episode = Sequence[Turn]
"""The turns of one rollout in their order; a turn of 0 tokens is a last wait, and asks no engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What a run's parts take: its groups as they were recorded, and its engine and trainer, each as fast as alone."""

    groups: Sequence[Sequence[Episode]]
    token_s: float  # of a token at a server that has no other request
    crowd_s: float  # more of a token for each request that the server has
    turn_tokens: float = 0.0  # the tokens that a turn's prompt and round trip count as
    training_s: Sequence[float]  # of recorded train steps
    push_s: float = 0.0
    stall_s: float = 0.0  # of it, with the engines held
    between_s: float = 0.0  # of the trainer, after each step: checkpoints and the rest
    contention: float = 0.0
    kept_share: float = 1.0  # of finished groups; dynamic sampling drops the others


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The settings of a run that the model knows. `training_scale` multiplies the time of a train step."""

    batch_size: int  # groups a step
    group_size: int
    max_staleness: int
    max_concurrent: int  # rollouts
    max_running_requests: int  # of one server
    num_servers: int = 1
    training_scale: float = 1.0
    drops_stale: bool = True  # not with `straggler: mask`
    straggler_wait_s: float = 0.0  # 0: batches wait for no straggler


@dataclass(frozen=True, slots=True)
class Trace:
    """The times at which train steps ended, pushes included, and the seconds in which each side worked."""

    ends: Sequence[float]
    training_s: float
    sampling_s: float  # in which at least one request was at an engine

    def per_hour(self, skip: int) -> float:
        """Return the train steps an hour, without the first `skip`, in which a run fills up."""
        return 3600.0 * (len(self.ends) - skip) / max(1e-9, self.ends[-1] - (self.ends[skip - 1] if skip else 0.0))


def simulate(costs: Costs, layout: Layout, num_steps: int, seed: int = 0) -> Trace:
    """Play a run from its start until `num_steps` train steps have ended, with groups drawn by `seed`.

    >>> group = [[Turn(wait_s=4.0, num_tokens=10.0)]]
    >>> costs = Costs(groups=[group], token_s=0.1, crowd_s=0.0, training_s=[2.0], push_s=1.0)
    >>> layout = Layout(batch_size=1, group_size=1, max_staleness=0, max_concurrent=8, max_running_requests=8)
    >>> [round(end, 3) for end in simulate(costs, layout, 3).ends]      # 4 waiting, 1 sampling, 2 training, 1 pushing
    [8.0, 16.0, 24.0]
    """
    return _Simulation(costs, layout, seed).run(num_steps)


@dataclass(slots=True, eq=False)
class _Group:
    version: int  # at its start
    left: int  # rollouts under way


@dataclass(slots=True, eq=False)
class _Rollout:
    group: _Group
    turns: Episode
    done: int = 0


_Entry = tuple[float, int, _Rollout]
"""When something of a rollout happens, on some scale; a number, by which equals keep their order; and the rollout."""


class _Server:
    """One engine. Its clock is the tokens that each running request has got, so that arrivals change only the rate."""

    def __init__(self, costs: Costs, limit: int) -> None:
        self._costs, self._limit = costs, limit
        self._tokens = 0.0
        self.running: list[_Entry] = []  # a heap, by the tokens at which they end
        self.queue: deque[_Entry] = deque()  # by the tokens that they want

    @property
    def next_s(self) -> float:
        """The seconds of work until the next request ends."""
        return (self.running[0][0] - self._tokens) / self._rate if self.running else math.inf

    @property
    def _rate(self) -> float:
        return 1.0 / (self._costs.token_s + self._costs.crowd_s * len(self.running))

    def work(self, seconds: float) -> list[_Rollout]:
        """Work for up to `next_s`, take in what waits, and return what ended."""
        until = self._tokens + seconds * self._rate if self.running else self._tokens
        ended: list[_Rollout] = []
        while self.running and self.running[0][0] <= until * (1.0 + TINY):
            ended.append(heapq.heappop(self.running)[2])
        self._tokens = until
        while self.queue and len(self.running) < self._limit:
            num_tokens, number, rollout = self.queue.popleft()
            heapq.heappush(self.running, (self._tokens + num_tokens, number, rollout))
        return ended


TINY = 1e-12
"""Times and tokens with a smaller relative difference are the same."""


class _Simulation:
    def __init__(self, costs: Costs, layout: Layout, seed: int) -> None:
        self._costs, self._layout = costs, layout
        self._random = random.Random(seed)
        self._now_s = 0.0
        self._number = 0
        self._waiting: list[_Entry] = []  # for tools: a heap, by the time at which they go on
        self._servers = [_Server(costs, layout.max_running_requests) for _ in range(layout.num_servers)]
        self._admission = Admission(layout.batch_size * layout.group_size, layout.max_staleness)
        self._running: set[_Group] = set()
        self._ready: list[_Group] = []
        self._phases: deque[tuple[str, float]] = deque()  # of the trainer, with their seconds; none: it waits
        self._patience_s = layout.straggler_wait_s
        self._ends: list[float] = []
        self._training_s = self._sampling_s = 0.0

    def run(self, num_steps: int) -> Trace:
        while len(self._ends) < num_steps:
            self._admit()
            is_patient = not self._phases and self._take()
            self._advance(is_patient=is_patient)
        return Trace(self._ends, self._training_s, self._sampling_s)

    def _admit(self) -> None:
        size, admission = self._layout.group_size, self._admission
        while admission.may_admit(size):
            if admission.running and admission.running + size > self._layout.max_concurrent:
                return
            admission.start(size)
            group = _Group(version=admission.step, left=size)
            self._running.add(group)
            recorded = self._random.choice(self._costs.groups)
            for turns in recorded if len(recorded) == size else self._random.choices(recorded, k=size):
                self._go_on(_Rollout(group, turns))

    def _go_on(self, rollout: _Rollout) -> None:
        """Wait for the tools of the next turn, or end the rollout and, with its last one, the group."""
        if rollout.done < len(rollout.turns):
            self._number += 1
            wait_s = rollout.turns[rollout.done].wait_s
            heapq.heappush(self._waiting, (self._now_s + wait_s, self._number, rollout))
            return
        group, size = rollout.group, self._layout.group_size
        group.left -= 1
        if group.left:
            return
        self._running.remove(group)
        if self._random.random() < self._costs.kept_share:
            self._admission.finish(size)
            self._ready.append(group)
        else:
            self._admission.give_back_running(size)

    def _ask(self, rollout: _Rollout) -> None:
        """Send the next turn to the least busy server."""
        num_tokens = rollout.turns[rollout.done].num_tokens
        if num_tokens == 0:
            rollout.done += 1
            self._go_on(rollout)
            return
        server = min(self._servers, key=lambda one: len(one.running) + len(one.queue))
        self._number += 1
        server.queue.append((num_tokens + self._costs.turn_tokens, self._number, rollout))
        server.work(0.0)

    def _take(self) -> bool:
        """Begin a train step if there is a batch, the oldest groups first; return whether it waits for stragglers."""
        layout, step, costs = self._layout, self._admission.step + 1, self._costs
        if layout.drops_stale:
            fresh = [group for group in self._ready if step - 1 - group.version <= layout.max_staleness]
            for _ in range(len(self._ready) - len(fresh)):
                self._admission.give_back_finished(layout.group_size)
            self._ready = fresh
        if len(self._ready) < layout.batch_size:
            return False
        if self._patience_s > 0.0 and any(step - group.version > layout.max_staleness for group in self._running):
            return True
        self._patience_s = layout.straggler_wait_s
        self._ready.sort(key=lambda group: group.version)
        del self._ready[: layout.batch_size]
        for _ in range(layout.batch_size):
            self._admission.consume(layout.group_size)
        training_s = layout.training_scale * self._random.choice(costs.training_s)
        pushing_s = max(0.0, costs.push_s - costs.stall_s)
        phases = [
            ("training", training_s),
            ("pushing", pushing_s),
            ("held", costs.stall_s),
            ("between", costs.between_s),
        ]
        self._phases.extend(phases)
        return False

    def _advance(self, *, is_patient: bool) -> None:
        """Move the clock to the next event: the end of a wait, of a turn, or of a phase of the trainer."""
        phase, left_s = self._phases[0] if self._phases else ("waiting", self._patience_s if is_patient else math.inf)
        is_sampling = phase != "held" and any(server.running for server in self._servers)
        slower = 1.0 + self._costs.contention if phase == "training" and is_sampling else 1.0
        of_turns_s = min(server.next_s for server in self._servers) * slower if is_sampling else math.inf
        of_waits_s = self._waiting[0][0] - self._now_s if self._waiting else math.inf
        passed_s = max(0.0, min(left_s * slower, of_turns_s, of_waits_s))
        self._now_s += passed_s
        self._sampling_s += passed_s * is_sampling
        self._training_s += passed_s * (phase == "training")
        if is_sampling:
            for server in self._servers:
                for rollout in server.work(passed_s / slower):
                    rollout.done += 1
                    self._go_on(rollout)
        while self._waiting and self._waiting[0][0] <= self._now_s * (1.0 + TINY):
            self._ask(heapq.heappop(self._waiting)[2])
        if self._phases:
            self._phases[0] = (phase, left_s - passed_s / slower)
            if passed_s >= left_s * slower:
                self._phases.popleft()
                if phase == "held":  # the new version serves
                    self._admission.step += 1
                    self._ends.append(self._now_s)
        elif is_patient:
            self._patience_s -= passed_s
