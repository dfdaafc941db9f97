"""What `auto` computes in: by the processor's instructions and the model's size; the engine and the trainer agree."""

from pathlib import Path

import numpy as np
import pytest
import torch

from areal_agent import dtype as rules
from areal_agent.engine.embedded.decoder import Piece
from areal_agent.engine.embedded.model import ModelRunner
from areal_agent.engine.embedded.weights import take_weights
from areal_agent.types import DiskWeights

XEON = "processor\t: 0\nflags\t\t: fpu sse2 avx512f avx512_bf16 amx_bf16\n"
EPYC = "processor\t: 0\nflags\t\t: fpu sse2 avx2\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd i8mm bf16\n"


@pytest.mark.parametrize(("cpuinfo", "is_native"), [(XEON, True), (EPYC, False), (ARM, True), ("", False)])
def test_the_processor_says_what_it_multiplies(cpuinfo: str, is_native: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert rules.multiplies_bfloat16(tmp_path / "cpuinfo") is is_native
    assert not rules.multiplies_bfloat16(tmp_path / "none")


@pytest.mark.parametrize("is_native", [True, False])
def test_auto_is_bfloat16_where_that_is_faster(is_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "multiplies_bfloat16", lambda: is_native)
    assert rules.computed_in("auto", rules.LARGE, is_gpu=False) == ("bfloat16" if is_native else "float32")
    assert rules.computed_in("auto", rules.LARGE - 1, is_gpu=False) == "float32"
    assert rules.computed_in("auto", 1, is_gpu=True) == "bfloat16"
    assert rules.computed_in("bfloat16", 1, is_gpu=False) == "bfloat16"
    assert ("slowly" in rules.slowness("engine.dtype", "bfloat16", is_gpu=False)) is not is_native
    assert rules.slowness("engine.dtype", "auto", is_gpu=False) == ""
    assert rules.slowness("engine.dtype", "bfloat16", is_gpu=True) == ""


def test_an_engine_in_bfloat16_has_logits_in_float32(small_model: Path) -> None:
    """Keys and layers are bfloat16, and logits those of float32 but for the layers' rounding; also after a push."""
    runner = ModelRunner(str(small_model), device="cpu", dtype="bfloat16", num_slots=1, max_context_tokens=64)
    exact = ModelRunner(str(small_model), device="cpu", dtype="float32", num_slots=1, max_context_tokens=64)
    assert (runner.kv.cache.dtype, exact.kv.cache.dtype) == (torch.bfloat16, torch.float32)
    source = DiskWeights(path=str(small_model))
    runner.swap_in(take_weights(source, runner.layout, runner.device, needs_manifest=False))
    piece = Piece(slot=0, begin=0, ids=np.arange(5, 25, dtype=np.int32))
    found, expected = runner.prefill([piece]), exact.prefill([piece])
    assert found.dtype == torch.float32
    assert not torch.equal(found, found.bfloat16().float())
    assert 0 < float((found - expected).norm() / expected.norm()) < 0.02
