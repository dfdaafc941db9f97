"""Gradients by the losses of TRL and verl, in a process that has them: python references.py CASES.json IN OUT.

IN (safetensors) has `logprobs`, `proximal`, `behavior`, `reference`, `advantages` and `mask`, all [B, T]. OUT gets one
gradient with respect to `logprobs` for each case, [B, T] by its number. A case names the library, and its options.
"""

import json
import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]


def by_trl(given: Tensors, case: dict[str, Any]) -> Tensor:
    """The loss of GRPOTrainer in evaluation, which accumulates nothing. `cap` is its truncated importance sampling."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    logprobs, mask = given["logprobs"], given["mask"]
    nothing = torch.zeros_like(mask)
    trainer = MagicMock()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, nothing, None)
    trainer.aux_loss_enabled = trainer._entropy_bonus_enabled = trainer.model.training = False
    trainer.top_entropy_quantile, trainer.off_policy_mask_threshold = 1.0, None
    trainer.args = SimpleNamespace(delta=None, use_bias_correction_kl=True)
    trainer.accelerator.num_processes = 1
    trainer.accelerator.gather = trainer.accelerator.reduce = lambda values, **_: values
    trainer.beta = case.get("beta", 0.0)
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = "cap" in case
    for name in ("loss_type", "importance_sampling_level", "epsilon_low", "epsilon_high"):
        setattr(trainer, name, case[name])
    inputs = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": nothing,
        "completion_mask": mask,
        "advantages": given["advantages"],
        "old_per_token_logps": given[case.get("old", "proximal")],
        "ref_per_token_logps": given["reference"],
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": (given["proximal"] - given["behavior"]).exp().clamp(max=case.get("cap", 1.0)),
    }
    return GRPOTrainer._compute_loss(trainer, trainer.model, inputs)


def by_verl(given: Tensors, case: dict[str, Any]) -> Tensor:
    """A policy loss of verl with its rollout correction (`is`, `rs`: level and thresholds)."""
    for name in ("ray", "ray.experimental", "ray.experimental.state", "ray.experimental.state.api", "ray.util"):
        stub = MagicMock(__spec__=ModuleSpec(name, None), __path__=[])  # its functions start no processes
        sys.modules.setdefault(name, stub)
    from verl.trainer.ppo import core_algos, rollout_corr_helper
    from verl.workers.config import ActorConfig

    mask = given["mask"]
    log_weights = given["proximal"] - given["behavior"]
    weights = None
    if "is" in case:
        weights, _ = rollout_corr_helper.compute_rollout_correction_weights(log_weights, mask, *case["is"])
    if "rs" in case:
        kept, _ = rollout_corr_helper.compute_rollout_rejection_mask(log_weights, mask, *case["rs"])
        weights = kept if weights is None else weights * kept
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, clip_ratio_c=case.get("clip_ratio_c", 1e9), **case["clip"]
    )
    loss, _ = core_algos.get_policy_loss_fn(case["loss"])(
        old_log_prob=given[case.get("old", "proximal")],
        log_prob=given["logprobs"],
        advantages=given["advantages"],
        response_mask=mask,
        loss_agg_mode=case["aggregation"],
        config=config,
        rollout_is_weights=weights,
    )
    return loss


def main() -> None:
    cases, given_file, out_file = sys.argv[1:]
    gradients: Tensors = {}
    with open(cases) as file:
        for number, case in enumerate(json.load(file)):
            given = load_file(given_file)
            given["logprobs"].requires_grad_()
            loss = (by_trl if case["library"] == "trl" else by_verl)(given, case)
            (gradients[str(number)],) = torch.autograd.grad(loss, given["logprobs"])
    save_file(gradients, out_file)


if __name__ == "__main__":
    main()
