"""Models that run over pages on a CPU: without CUDA graphs, and with a recorder that stands in for them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from areal_agent.engine.embedded.model import ModelRunner, load_model
from areal_agent.engine.embedded.workload import Row, Workload
from areal_agent.types import GenerateRequest, GenerateResult, WeightVersion


class Rerun:
    """A Recorder for CPUs: replays by doing it again, with the same memory."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0
        self.num_forgotten = 0

    def record(self, function: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        self.num_recorded += 1
        result = function()

        def replay() -> None:
            self.num_replayed += 1
            result.copy_(function())

        return replay, result

    def forget(self) -> None:
        self.num_forgotten += 1


@pytest.fixture
def recorder() -> Rerun:
    return Rerun()


@pytest.fixture(params=["steps one by one", "recorded steps"])
def load(request: pytest.FixtureRequest, recorder: Rerun):
    """Load a model over pages."""

    def loading(
        folder: Path, *, num_slots: int = 8, max_context: int = 512, kv_tokens: int | None = None
    ) -> ModelRunner:
        return ModelRunner(
            load_model(str(folder), device="cpu", max_context_tokens=max_context),
            model_path=str(folder),
            num_slots=num_slots,
            max_context_tokens=max_context,
            kv_tokens=kv_tokens,
            kv_layout="pages",
            recorder=recorder if request.param == "recorded steps" else None,
        )

    return loading


class Desk:
    """A workload, and rows that are answered in the thread that asks."""

    def __init__(self, runner: ModelRunner) -> None:
        self.work = Workload(runner, WeightVersion(step=7))
        self.runner = runner

    def add(self, *requests: GenerateRequest) -> list[Row]:
        rows = [Row.of(request) for request in requests]
        for row in rows:
            self.work.add(row)
        return rows

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.work.step()

    def to_the_end(self) -> None:
        while self.work.has_work():
            self.work.step()

    def answers(self, *requests: GenerateRequest) -> Sequence[GenerateResult]:
        rows = self.add(*requests)
        self.to_the_end()
        return [row.answer.result() for row in rows]


@pytest.fixture
def desk(load) -> Callable[..., Desk]:
    torch.set_num_threads(1)
    return lambda folder, **sizes: Desk(load(folder, **sizes))
