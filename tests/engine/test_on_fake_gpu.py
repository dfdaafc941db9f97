"""The embedded engine's code on a GPU that is not there (tests/fake_gpu.py).

- Answers are those of the CPU, token by token: prefills in chunks and over a prefix, one by one and in one call, every
  kind of sampling, a grammar, a swap of weights, memory that is released and taken again. All tensors of an operation
  are on one device.
- In bfloat16, log-probabilities are nearly those of float32, also after a swap of weights.
- A decode step crosses between host and GPU as often for six rows as for two, and launches so few kernels a layer.
"""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from areal_agent.engine.embedded.model import ModelRunner
from areal_agent.engine.embedded.packed import Kernel
from areal_agent.engine.embedded.workload import Row, Workload
from areal_agent.types import GenerateRequest, SamplingParams, WeightVersion
from tests import fake_gpu
from tests.fake_gpu import FakeGpu

KINDS = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "filtered": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.02},
    "penalised": {"frequency_penalty": 0.4, "presence_penalty": 0.2, "repetition_penalty": 1.3},
    "biased": {"logit_bias": ((3, 4.0), (5, -2.0))},
    "held open": {"min_tokens": 4, "stop_token_ids": (7, 8)},
}


class EvenIds:
    """The grammar of answers in even ids."""

    def allowed(self):
        return np.arange(97) % 2 == 0

    def follow(self, token_id: int) -> None:
        assert token_id % 2 == 0

    def failure(self) -> None:
        return None


def work_on(folder, device: str, kernel: Kernel | None = None, dtype: str = "float32") -> Workload:
    runner = ModelRunner(
        str(folder), device=device, dtype=dtype, num_slots=8, max_context_tokens=512, kv_tokens=16 * 512
    )
    runner.kernel = kernel
    return Workload(runner, WeightVersion(step=7))


def answers(work: Workload, *rows: Row):
    for row in rows:
        work.add(row)
    while work.has_work():
        work.step()
    return [row.answer.result() for row in rows]


def conversation(folder, other, device: str, ask, kernel: Kernel | None = None, dtype="float32", **sampling):
    """Answers of several rows, of two that go on from them, after new weights, and after a release of memory."""
    work = work_on(folder, device, kernel, dtype)
    rows = [
        Row(request=ask(n, prompt_length=9 + 5 * n, **sampling), matcher=EvenIds() if n == 2 else None)
        for n in range(4)
    ]
    found = answers(work, *rows)
    ids = [(*row.request.input_ids, *one.token_ids, 1, 2) for row, one in zip(rows, found, strict=True)]
    later = [
        GenerateRequest(request_id=f"later-{n}", input_ids=ids[n], sampling=rows[n].request.sampling) for n in (0, 3)
    ]
    found += answers(work, *(Row(request=one) for one in later))
    work.swap(
        work._runner.layout.prove(load_file(other / "model.safetensors")), WeightVersion(step=8), flush_cache=True
    )
    found += answers(work, Row(request=ask(20, **sampling)))
    work.release_memory()
    work.resume_memory()
    return found + answers(work, Row(request=ask(21, **sampling)))


@pytest.mark.parametrize(("kind", "kernel"), [("plain", None), *((kind, fake_gpu.kernel) for kind in KINDS)])
def test_answers_are_those_of_the_cpu(kind, kernel, tiny, other, ask):
    expected = conversation(tiny, other, "cpu", ask, **KINDS[kind])
    with FakeGpu():
        found = conversation(tiny, other, "cuda", ask, kernel, **KINDS[kind])
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.token_ids, ours.cached_tokens) == (theirs.token_ids, theirs.cached_tokens)
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)
    assert found[4].cached_tokens > 10, "it began as an answer before"


def test_half_precision(tiny, other, ask, truth):
    with FakeGpu():
        found = conversation(tiny, other, "cuda", ask, fake_gpu.kernel, "bfloat16")
    assert found[4].cached_tokens > 10
    for n, place, folder in ((0, 0, tiny), (1, 1, tiny), (3, 3, tiny), (20, 6, other), (21, 7, other)):
        prompt = ask(n, prompt_length=9 + 5 * n if n < 4 else 10).input_ids
        exact = truth(folder).logprobs(prompt, found[place].token_ids)
        assert found[place].logprobs == pytest.approx(exact, abs=0.1)
        assert found[place].logprobs != pytest.approx(exact, abs=1e-3), "it was not in 16 bits"


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_crosses_as_often_for_many_rows_as_for_few(kind, tiny):
    def crossed(num_rows: int) -> Counter[tuple[str, str]]:
        with FakeGpu() as gpu:
            work = work_on(tiny, "cuda", fake_gpu.kernel)
            sampling = SamplingParams(**({"max_tokens": 6, "ignore_eos": True} | KINDS[kind]))
            for n in range(num_rows):
                request = GenerateRequest(
                    request_id=str(n), input_ids=(n, 40 + n, 3), sampling=sampling, num_top_logprobs=2
                )
                work.add(Row(request=request, matcher=EvenIds() if kind == "plain" else None))
            for _ in range(2):  # the prefill, and a step for which what the rows ask is put together
                work.step()
            gpu.copies.clear()
            for _ in range(2):
                work.step()
        return gpu.copies

    few, many = crossed(2), crossed(6)
    assert few == many
    assert {site for kind, site in many if kind == "to host"} == {
        "engine/embedded/sampler.py sample",
        "engine/embedded/sampler.py _likeliest",
    }
    assert not any(kind == "waits" for kind, _ in many)


class Launches(TorchDispatchMode):
    """Counts operations that are no views, each of which is one kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        one = found[0] if isinstance(found, (list, tuple)) else found
        is_view = args and isinstance(args[0], Tensor) and one.untyped_storage() is args[0].untyped_storage()
        self.number += func._schema.is_mutable or not is_view
        return found


@pytest.mark.parametrize(("family", "of_layer"), [("llama", 13), ("qwen3", 15)])
def test_a_decode_step_launches_few_kernels(family, of_layer, make_model):
    numbers: list[int] = []
    for num_layers in (1, 3):
        folder = make_model(family, num_hidden_layers=num_layers)
        with FakeGpu():
            runner = work_on(folder, "cuda")._runner
            with Launches() as launches:
                runner.decode([1, 2, 3], [4, 5, 6])
        numbers.append(launches.number)
    few, many = numbers
    assert (many - few) / 2 == of_layer  # on a GPU one more, which copies what attention returns
    assert few - of_layer <= 11  # of the step: inputs, mask, embedding, rotations, head norms, last norm, logits
