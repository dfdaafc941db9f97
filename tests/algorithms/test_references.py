"""Gradients of our losses equal those of TRL's and verl's own functions, with ratios that moved and stale tokens.

Every preset; dual clip; the bounds of the importance weight by name; the divergence in the loss. Their packages are in
the folder AREAL_AGENT_REFERENCES, which .ci/run makes; they run in a process of their own (references.py).
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_agent.algorithms.config import PRESETS, AlgorithmConfig
from areal_agent.algorithms.losses import LossTokens, choose_objective, policy_loss
from areal_agent.algorithms.packing import token_weights

pytestmark = pytest.mark.slow  # imports two frameworks

LENGTHS = (9, 4, 6, 1, 7)
PRODUCT = {"behavior_weight_level": "sequence"}
PENALISED = {"reference": "initial", "kl_coefficient": 0.2, "behavior_weight_level": "none"}


def trl(loss_type: str = "dapo", level: str = "token", clip: tuple[float, float] = (0.2, 0.2), **more: Any) -> Any:
    own = {"importance_sampling_level": level, "epsilon_low": clip[0], "epsilon_high": clip[1]}
    return {"library": "trl", "loss_type": loss_type, **own, **more}


def verl(loss: str = "vanilla", clip: tuple[float, float] = (0.2, 0.2), **more: Any) -> Any:
    clips = {"clip_ratio_low": clip[0], "clip_ratio_high": clip[1]}
    by_sequence = {"aggregation": "seq-mean-token-mean" if loss == "gspo" else "token-mean"}
    return {"library": "verl", "loss": loss, "clip": clips, **by_sequence, **more}


TIS = {"is": ["token", 5.0]}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(({"preset": preset}, trl(cap=5.0)) for preset in ("grpo", "rloo", "ppo")),
    *(({"preset": preset}, verl(**TIS)) for preset in ("grpo", "rloo", "ppo")),
    ({"preset": "gspo", "behavior_weight_level": "none"}, trl("grpo", "sequence", (3e-4, 4e-4))),
    ({"preset": "gspo"}, verl("gspo", (3e-4, 4e-4), **TIS)),
    ({"preset": "gspo", "clip_low": 0.3, "clip_high": 0.3}, verl("gspo", (0.3, 0.3), **TIS)),
    ({"preset": "cispo", "clip_high": 0.5}, trl("cispo", clip=(1.0, 1.5), old="behavior")),  # 1.5: of the ratio itself
    ({"preset": "cispo", "clip_high": 0.5}, verl("cispo", (1.0, 0.5), old="behavior")),
    ({"preset": "dapo"}, trl(clip=(0.2, 0.28), cap=5.0)),
    ({"preset": "dapo"}, verl(clip=(0.2, 0.28), **TIS)),
    ({"dual_clip": 1.3}, verl(clip_ratio_c=1.3, **TIS)),
    ({"behavior_weight_high": 1.2}, verl(**{"is": ["token", 1.2]})),  # TIS
    ({**PRODUCT, "behavior_weight_high": 1.2}, verl(**{"is": ["sequence", 1.2]})),
    (
        {"behavior_weight_mode": "mask", "behavior_weight_low": 0.8, "behavior_weight_high": 1.3},  # IcePop
        verl(**{"is": ["token", "0.8_1.3"]}),
    ),
    (
        {**PRODUCT, "behavior_weight_mode": "mask", "behavior_weight_high": 1.3},  # MIS by sequence
        verl(**{"is": ["sequence", 1e9], "rs": ["seq_sum_k1", f"{1 / 1.3}_1e9"]}),  # bounds of pi_behav / pi_prox
    ),
    ({**PENALISED}, trl(beta=0.2)),
    ({**PENALISED, "preset": "dapo"}, trl(clip=(0.2, 0.28), beta=0.2)),
]


@pytest.fixture(scope="module")
def given() -> Mapping[str, torch.Tensor]:
    """Five sequences in float64, padded on the right. All ratios are below the cap of 5."""
    generator = torch.Generator().manual_seed(3)
    shape = (len(LENGTHS), max(LENGTHS))

    def draw(scale: float) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64).clamp(-2, 2)

    logprobs = -2.0 + draw(0.5)
    proximal = logprobs + draw(0.3)
    of_sequence = torch.tensor([1.5, -0.5, 0.7, -1.2, 0.3], dtype=torch.float64)
    return {
        "logprobs": logprobs,
        "proximal": proximal,
        "behavior": proximal + draw(0.3),
        "reference": logprobs + draw(0.7),
        "advantages": of_sequence[:, None].expand(shape).contiguous(),
        "mask": (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).double(),
    }


@pytest.fixture(scope="module")
def theirs(given: Mapping[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, torch.Tensor]:
    folder = os.environ.get("AREAL_AGENT_REFERENCES")
    if folder is None:
        pytest.skip("AREAL_AGENT_REFERENCES does not name a folder with TRL and verl (.ci/run makes one)")
    files = [tmp_path_factory.mktemp("references") / name for name in ("cases.json", "in", "out")]
    files[0].write_text(json.dumps([case for _, case in CASES]))
    save_file(dict(given), files[1])
    script = Path(__file__).with_name("references.py")
    done = subprocess.run(
        [sys.executable, script, *files], env={**os.environ, "PYTHONPATH": folder}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return load_file(files[2])


def gradient(given: Mapping[str, torch.Tensor], config: AlgorithmConfig) -> torch.Tensor:
    """Of our loss, by logprobs: [B, T]."""
    mask = given["mask"].bool()
    behavior = given["behavior"][mask]
    logprobs = given["logprobs"].clone().requires_grad_()
    weights = token_weights(LENGTHS, [str(number) for number in range(len(LENGTHS))], config)
    tokens = LossTokens(
        logprobs=logprobs[mask],
        entropy=torch.zeros_like(behavior),
        proximal=behavior if config.proximal == "behavior" else given["proximal"][mask],
        behavior=behavior,
        advantages=given["advantages"][mask],
        weights=torch.tensor(weights, dtype=torch.float64).repeat_interleave(torch.tensor(LENGTHS)),
        sequences=torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)),
        reference=given["reference"][mask],
    )
    loss, stats = policy_loss(tokens, config, choose_objective(config))
    assert stats.metrics()["ratio_max"] > 1.1, "the ratio has moved"
    return torch.autograd.grad(loss, logprobs)[0]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_gradient_is_theirs(
    number: int, given: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> None:
    ours = gradient(given, AlgorithmConfig.model_validate(CASES[number][0]))
    torch.testing.assert_close(ours, theirs[str(number)], rtol=1e-7, atol=1e-12)


def test_every_preset_is_compared_with_both() -> None:
    compared = {(ours.get("preset", "grpo"), case["library"]) for ours, case in CASES}
    assert compared == {(preset, library) for preset in PRESETS for library in ("trl", "verl")}
