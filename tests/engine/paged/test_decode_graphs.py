"""Decode steps that are recorded once and replayed:

- each size is recorded once, whatever rows fill it; a third of it at most is padding
- padding writes into nobody's page alone
- new weights need no new recording; memory that moved does, and the recorder is told that all is to be forgotten
- where recording is refused, steps are taken one by one, and it is not tried again
"""

import logging

import pytest
import torch

from areal_agent.engine.embedded.kv_cache import KVShape
from areal_agent.engine.embedded.model import ModelRunner, load_model
from areal_agent.engine.embedded.paged.attention import Gathered
from areal_agent.engine.embedded.paged.decode_graphs import DecodeGraphs, sizes
from areal_agent.engine.embedded.paged.store import PageStore
from areal_agent.errors import EngineRejected
from tests.engine.paged.conftest import Desk


@pytest.fixture
def at(tiny, recorder) -> Desk:
    return Desk(
        ModelRunner(
            load_model(str(tiny), device="cpu", max_context_tokens=256),
            model_path=str(tiny),
            num_slots=20,
            max_context_tokens=256,
            kv_layout="pages",
            recorder=recorder,
        )
    )


def test_each_size_is_recorded_once(at, ask, recorder):
    at.answers(*(ask(number, prompt_length=5, max_tokens=9) for number in range(8)))
    assert (recorder.num_recorded, recorder.num_replayed) == (1, 8)
    at.answers(*(ask(number, prompt_length=5, max_tokens=9) for number in range(7)))
    assert (recorder.num_recorded, recorder.num_replayed) == (1, 16), "seven rows fill the place of eight"
    at.answers(ask(1, prompt_length=5, max_tokens=40))
    assert recorder.num_recorded == 1 + 3, "one row; of one page, two and three"


@pytest.mark.parametrize("most", [1, 2, 20, 64, 256, 1000])
def test_a_third_of_a_recording_at_most_is_padding(most):
    found = sizes(most)
    assert found == sorted(set(found)) and found[-1] == most
    for wanted in range(1, most + 1):
        size = next(one for one in found if one >= wanted)
        assert 3 * (size - wanted) <= size


def test_padding_writes_into_nobodys_page_alone(recorder):
    shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=1)
    pages = PageStore(
        shape,
        Gathered(),
        num_slots=8,
        max_context_tokens=64,
        num_tokens=512,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    for slot in range(5):
        pages.begin(torch.arange(20, dtype=torch.int32).numpy() + slot, [20] * slot)
    seen: list[tuple[list[int], list[list[int]]]] = []

    def forward(ids: torch.Tensor, lengths: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        seen.append((lengths.tolist(), tables.tolist()))
        return torch.zeros(len(ids), 3)

    graphs = DecodeGraphs(forward, recorder, pages=pages)
    assert graphs.hidden([1] * 5, [20] * 5).shape == (5, 3)
    assert graphs.hidden([1] * 6, [20] * 5 + [1]).shape == (6, 3)
    lengths, tables = seen[1]
    assert lengths == [20] * 5 + [1] and tables[5] == [0, 0]
    assert all(page for table in tables[:5] for page in table)


def test_memory_that_moved_is_recorded_anew(at, ask, recorder):
    at.answers(ask(1, prompt_length=5, max_tokens=9))
    recorded = recorder.num_recorded
    at.work.swap({}, at.work.version, flush_cache=True)
    at.answers(ask(1, prompt_length=5, max_tokens=9))
    assert (recorder.num_recorded, recorder.num_forgotten) == (recorded, 0)
    at.work.release_memory()
    assert recorder.num_forgotten == 1
    at.work.resume_memory()
    at.answers(ask(1, prompt_length=5, max_tokens=9))
    assert recorder.num_recorded == 2 * recorded


class Refusing:
    def __init__(self) -> None:
        self.num_asked = 0

    def record(self, function):
        self.num_asked += 1
        raise RuntimeError("operation not permitted when stream is capturing")


def test_where_recording_is_refused_steps_are_taken_one_by_one(tiny, ask, truth, caplog):
    refusing = Refusing()
    at = Desk(
        ModelRunner(
            load_model(str(tiny), device="cpu", max_context_tokens=256),
            model_path=str(tiny),
            num_slots=4,
            max_context_tokens=256,
            kv_layout="pages",
            recorder=refusing,
        )
    )
    caplog.set_level(logging.WARNING)
    request = ask(1, max_tokens=30)
    (result,) = at.answers(request)
    assert result.logprobs == pytest.approx(truth(tiny).logprobs(request.input_ids, result.token_ids), abs=1e-4)
    assert refusing.num_asked == 1 and "without CUDA graphs" in caplog.text


def test_memory_that_is_not_there_is_refused_in_words(at, ask, monkeypatch: pytest.MonkeyPatch):
    at.work.release_memory()

    def short() -> None:
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    monkeypatch.setattr(at.runner.kv, "allocate", short)
    with pytest.raises(EngineRejected, match="keys and values of 10240 tokens"):
        at.work.resume_memory()
