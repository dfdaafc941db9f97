"""Adapters (LoRA) on a real, tiny model.

- New adapters change nothing. Their gradients are those of merged weights, by the chain rule; layers that are computed
  again give the same.
- Merged weights give the log-probabilities that the policy gives; they are what is published and exported.
- A train step changes adapters alone; optimiser and gradients hold nothing else.
- The reference is the model without them, in the same memory; a critic is trained whole.
- A checkpoint goes on bit for bit beside the weights that the run began with, and beside nothing else.
- The adapter's own folder holds what PEFT reads.
- On a GPU frozen weights are held in bfloat16 where that loses nothing.
- A name that no layer has is refused, as is one that is given twice.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from areal_agent.algorithms.batching import collate, sample_of
from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.errors import ConfigError
from areal_agent.trainer.config import LoraConfig, TrainerConfig
from areal_agent.trainer.model import Adapter, LoraLinear, halve
from areal_agent.trainer.trainer import Trainer
from tests.trainer.lab import CPU, GRADIENT_DESCENT, PLAIN, Lab, train_alike
from tests.trainer.two_ranks import flat

LORA = LoraConfig(rank=4, alpha=8.0)
DESCENT = GRADIENT_DESCENT.model_copy(update={"lora": LORA})
LEARNING = TrainerConfig(learning_rate=2e-2, warmup_fraction=0.0, weight_decay=0.0, lora=LORA)
REFERRED = AlgorithmConfig(reference="initial", kl_coefficient=0.1)


def randomise(lab: Lab) -> None:
    """New adapters are nothing: let them be something."""
    generator = torch.Generator().manual_seed(5)
    for matrix in lab.policy.trained_parameters().values():
        matrix.data.normal_(0.0, 0.05, generator=generator)


def measured(lab: Lab, given, measure=None) -> torch.Tensor:
    """Log-probabilities of all loss tokens, by the policy or by what stands in for it."""
    batches = [collate([sample_of(one)], CPU) for one in given.records]
    with torch.no_grad():
        return torch.cat([(measure or lab.policy.logprobs_and_entropy)(batch)[0] for batch in batches])


def test_new_adapters_change_nothing(model_folder, given):
    assert torch.equal(measured(Lab(model_folder, DESCENT), given), measured(Lab(model_folder), given))


def test_gradients_are_those_of_merged_weights_by_the_chain_rule(model_folder, make_batch, as_input):
    record = make_batch(1).records[0]
    lab = Lab(model_folder, DESCENT)
    randomise(lab)
    matrices = lab.policy.trained_parameters()
    lab.logprobs(record).sum().backward()
    ours = {name: matrix.grad for name, matrix in matrices.items()}

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    leaves = {name: matrix.detach().clone().requires_grad_() for name, matrix in matrices.items()}
    weights = dict(model.named_parameters())
    for name in {one.rpartition(".lora_")[0] for one in leaves}:
        product = leaves[f"{name}.lora_B.weight"] @ leaves[f"{name}.lora_A.weight"]
        weights[f"{name}.weight"] = weights[f"{name}.weight"].detach() + 2.0 * product  # alpha / rank
    ids = torch.from_numpy(record.token_ids).long()
    logits = functional_call(model, weights, kwargs={"input_ids": ids[None]}).logits[0, :-1]
    logprobs = torch.log_softmax(logits / torch.from_numpy(record.temperatures)[1:, None], dim=-1)
    logprobs.gather(1, ids[1:, None]).sum().backward()
    assert len(leaves) == 2 * 2 * 7  # two matrices, two layers, seven linear layers each
    for name, leaf in leaves.items():
        torch.testing.assert_close(ours[name], leaf.grad, atol=1e-4, rtol=1e-4, msg=name)


def test_merged_weights_give_the_same_log_probabilities(model_folder, given):
    lab = Lab(model_folder, LEARNING)
    for _ in range(3):
        lab.stepper.train(given)
    before = measured(Lab(model_folder), given)
    ours = measured(lab, given)
    assert (ours - before).abs().max() > 1e-2
    merged = Lab(model_folder)
    merged.policy.model.load_state_dict(dict(lab.policy.whole_parameters()), strict=False)
    plain = [merged.logprobs(one).detach()[torch.from_numpy(one.loss_mask)[1:]] for one in given.records]
    torch.testing.assert_close(torch.cat(plain), ours, atol=1e-5, rtol=0)


def test_a_train_step_changes_adapters_alone(model_folder, make_batch, as_input):
    lab = Lab(model_folder, LEARNING)
    before = {name: one.detach().clone() for name, one in lab.policy.model.named_parameters()}
    lab.stepper.train(as_input(make_batch(1, num_groups=1)))
    after = dict(lab.policy.model.named_parameters())
    moved = {name for name, one in before.items() if not torch.equal(one, after[name])}
    # the first update moves B alone, for the gradient of A goes through it
    assert moved == {name for name in lab.policy.trained_parameters() if ".lora_B." in name}
    lab.stepper.train(as_input(make_batch(1, num_groups=1)))
    moved = {name for name, one in before.items() if not torch.equal(one, after[name])}
    assert moved == set(lab.policy.trained_parameters())


def test_the_optimiser_holds_adapters_alone(model_folder, make_batch, as_input, load_trainer):
    trainer = load_trainer(model_folder)
    trainer.train_step(as_input(make_batch(1, num_groups=1)))
    states = trainer._training.optimizer.adamw.state
    sizes = sum(one.numel() for state in states.values() for one in state.values() if one.ndim)
    # two moments of 4 (inputs + outputs) numbers: q and o 32, k and v 16, gate and up 48, down 32 of 48; two layers
    each_layer = 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))
    assert sizes == 2 * 2 * each_layer
    frozen = trainer._policy.named_parameters().values()
    assert all(one.grad is None and not one.requires_grad for one in frozen)


def test_the_reference_is_the_model_without_adapters(model_folder, given):
    lab = Lab(model_folder, DESCENT)
    randomise(lab)
    ours = measured(lab, given)
    reference = measured(lab, given, lab.policy.logprobs_without_adapter)
    torch.testing.assert_close(reference, measured(Lab(model_folder), given), atol=0, rtol=0)
    assert torch.equal(measured(lab, given), ours)


def test_a_divergence_from_the_reference_needs_no_second_model(load_trainer, model_folder, make_batch, as_input):
    trainer = load_trainer(model_folder, algorithm=REFERRED)
    first = trainer.train_step(as_input(make_batch(1, num_groups=1))).metrics
    second = trainer.train_step(as_input(make_batch(2, num_groups=1))).metrics
    assert first["kl_policy_reference"] == pytest.approx(0.0, abs=1e-6)
    assert second["kl_policy_reference"] > 1e-5
    assert trainer._training.reference is None


def test_a_critic_is_trained_whole(load_trainer, model_folder, make_batch, as_input):
    trainer = load_trainer(model_folder, algorithm=AlgorithmConfig(preset="ppo"))
    critic = trainer._training.critic
    assert critic is not None
    before = {name: one.detach().clone() for name, one in critic.model.named_parameters()}
    assert not any("lora" in name for name in before)
    for step in (1, 2):  # at first its output layer is zero, and no gradient goes through it
        trainer.train_step(as_input(make_batch(step, num_groups=1)))
    assert all(not torch.equal(one, before[name]) for name, one in critic.model.named_parameters())


# ---------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture
def load_trainer(open_trainer):
    def load(folder: Path, base: Path | None = None, *, lora: LoraConfig | None = LORA, algorithm=PLAIN) -> Trainer:
        config = TrainerConfig(learning_rate=1e-2, warmup_fraction=0.0, lora=lora)
        return open_trainer(folder, config, algorithm, base=base)

    return load


@pytest.fixture
def trained(load_trainer, model_folder, make_batch, as_input, tmp_path):
    """A trainer after two steps, and its checkpoint."""
    trainer = load_trainer(model_folder, algorithm=REFERRED)
    for step in (1, 2):
        trainer.train_step(as_input(make_batch(step, num_groups=1)))
    return trainer, trainer.save(tmp_path / "checkpoints", step=2, incarnation=0).path


def test_a_checkpoint_goes_on_exactly(trained, load_trainer, model_folder, make_batch, as_input):
    steady, saved = trained
    resumed = load_trainer(saved, model_folder, algorithm=REFERRED)
    assert resumed.info.step == 2
    for step in (3, 4):
        train_alike(steady, resumed, as_input(make_batch(step, num_groups=1)))
        assert torch.equal(flat(steady), flat(resumed))


def test_a_checkpoint_has_the_merged_model_and_no_second_one_and_what_peft_reads(trained, model_folder):
    trainer, saved = trained
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert torch.equal(flat(trainer), torch.cat([one.flatten() for one in model.parameters()]))
    tensors = [name for file in (saved / "training").glob("*.safetensors") for name in load_file(file)]
    assert sum(name.startswith("adapter.") for name in tensors) == 28
    assert all(".lora_" in name for name in tensors if name != "generator")
    config = json.loads((saved / "adapter" / "adapter_config.json").read_bytes())
    assert (config["peft_type"], config["task_type"], config["r"], config["lora_alpha"]) == ("LORA", "CAUSAL_LM", 4, 8)
    assert config["base_model_name_or_path"] == str(model_folder)
    matrices = load_file(saved / "adapter" / "adapter_model.safetensors")
    weights = load_file(model_folder / "model.safetensors")
    exported = load_file(saved / "model.safetensors")
    for name in ("model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj"):
        a, b = (matrices[f"base_model.model.{name}.lora_{one}.weight"] for one in "AB")
        assert b.abs().max() > 0
        torch.testing.assert_close(exported[f"{name}.weight"], weights[f"{name}.weight"] + 2.0 * b @ a)
    assert len(matrices) == 28


def test_other_adapters_than_the_checkpoints_are_refused(trained, load_trainer, model_folder):
    for lora in (None, LoraConfig(rank=4, alpha=9.0), LoraConfig(rank=8, alpha=8.0)):
        with pytest.raises(
            ConfigError, match=r"was saved with trainer\.lora = .*; resume with the setting that the run"
        ):
            load_trainer(trained[1], model_folder, lora=lora, algorithm=REFERRED)


def test_a_checkpoint_of_the_whole_model_is_no_adapters(load_trainer, model_folder, tmp_path):
    saved = load_trainer(model_folder, lora=None).save(tmp_path / "checkpoints", step=0, incarnation=0)
    with pytest.raises(ConfigError, match=r"was saved with trainer\.lora = None, but the config now has"):
        load_trainer(saved.path, model_folder)


def test_other_weights_than_those_that_the_run_began_with_are_refused(trained, load_trainer, model_folder, tmp_path):
    _, saved = trained  # its weights are merged already
    other = shutil.copytree(model_folder, tmp_path / "other")  # these are a little other
    weights = load_file(other / "model.safetensors")
    save_file({name: 1.0005 * one for name, one in weights.items()}, other / "model.safetensors", {"format": "pt"})
    for base in (saved, other):
        with pytest.raises(ConfigError, match="were trained on weights that differ from those loaded now"):
            load_trainer(saved, base, algorithm=REFERRED)


# ----------------------------------------------------------------------------------------------- the layers


def two_linear_layers() -> nn.Module:
    torch.manual_seed(3)
    return nn.ModuleDict({"first": nn.Linear(6, 5), "second": nn.Linear(5, 4, bias=False)})


def test_a_bias_stays_and_untargeted_layers_are_plain():
    model = two_linear_layers()
    inputs = torch.randn(3, 6)
    expected = model["first"](inputs)
    Adapter.attach(model, [model], LoraConfig(rank=2, target_modules=("first",)), seed=0)
    assert isinstance(model["first"], LoraLinear) and not isinstance(model["second"], LoraLinear)
    assert torch.equal(model["first"](inputs), expected)
    assert [name for name, one in model.named_parameters() if one.requires_grad] == [
        "first.lora_A.weight",
        "first.lora_B.weight",
    ]


def test_frozen_weights_are_held_in_bfloat16_on_a_gpu_where_that_loses_nothing():
    model = two_linear_layers()
    model["first"].weight.data = model["first"].weight.data.to(torch.bfloat16).float()
    exact = model["first"].weight.detach().clone()
    halve(model, [model], {})
    adapter = Adapter.attach(model, [model], LoraConfig(rank=2, target_modules=("first", "second")), seed=0)
    assert (model["first"].weight.dtype, model["second"].weight.dtype) == (torch.bfloat16, torch.float32)
    merged = adapter.merged("first.weight", dict(model.named_parameters()), torch.float32)
    assert merged.dtype == torch.float32
    assert torch.equal(merged, exact)
    assert all(one.dtype == torch.float32 for one in adapter.parameters().values())


def test_a_name_that_no_layer_has_or_that_is_given_twice_is_refused(load_trainer, model_folder):
    with pytest.raises(ConfigError, match=r"names 'query', but .*; the names are down_proj, gate_proj, k_proj"):
        load_trainer(model_folder, lora=LoraConfig(target_modules=("q_proj", "query")))
    with pytest.raises(ValidationError, match="names 'q_proj' twice"):
        LoraConfig(target_modules=("q_proj", "q_proj"))
