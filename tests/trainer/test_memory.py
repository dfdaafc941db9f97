"""The private memory of each of four ranks, with a model of 12 equal layers.

- While it loads, a rank has a quarter of the model, two layers of it that are gathered, and the trial that proves the
  attention; when it publishes and exports, it needs no more than a layer besides.
- After a step it has the quarters of Adam's two moments, and while it steps that of the gradients, gathered layers and
  a micro-batch.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BATCH = 24 * 2**20
"""The activations and logits of the trial at load, or of a micro-batch, of 12 layers of this size."""


@pytest.mark.slow
def test_no_rank_has_more_than_a_quarter_a_layer_and_the_batch() -> None:
    command = [sys.executable, "benchmarks/trainer/memory.py", "--layers", "12", "--hidden", "384", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    peak, left = ({phase: max(ranks) for phase, ranks in found[name].items()} for name in ("peak", "left"))
    (model,), (layer,), (rest,) = (found["size"][name] for name in ("model", "layer", "rest"))
    quarter, gathered = model // 4, 2 * layer + rest
    assert peak["load"] < quarter + gathered + BATCH < model
    assert peak["publish"] < layer > peak["export"]
    assert left["first step"] < 2 * quarter + BATCH
    assert peak["step"] < quarter + gathered + layer + BATCH + quarter
