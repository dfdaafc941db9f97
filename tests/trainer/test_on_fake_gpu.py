"""The train step and pushes on a GPU that is not there (tests/fake_gpu.py).

- With every loss, layout, precision, adapters, critic, reference, windows, experts and shared prefixes all tensors of
  an operation are on one device. In float32 metrics are those of the CPU.
- What crosses between host and GPU in a step is known, and grows with the micro-batches, not with the samples.
- What AdamW keeps there is what it keeps on a CPU, and goes on in either place.
- What the trainer pushes is what an engine on the GPU then holds; of adapters alone, what the trainer has.
- A checkpoint is written beside training, unless the machine has too little memory for its copies.
- The fake GPU finds a tensor on the wrong device, one that was not moved, an `item` in a loop, and the same within
  backward passes. It sees what copies to the host or waits, and only that.
"""

import threading
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.engine.embedded.model import ModelRunner
from areal_agent.engine.embedded.weights import take_weights
from areal_agent.trainer import saving
from areal_agent.trainer.config import LoraConfig, TrainerConfig
from areal_agent.trainer.optimizer import Optimizer
from areal_agent.weights.channels import ADAPTER_WEIGHTS, PREFIX
from tests.fake_gpu import CPU, GPU, TO_GPU, TO_HOST, WAITS, FakeGpu, WrongDevice
from tests.trainer.families import PACKED, make

LORA = LoraConfig(rank=2, alpha=4.0)
PENALISED = {"reference": "initial", "kl_coefficient": 0.1, "entropy_coefficient": 0.01}
BY_SEQUENCE = {"preset": "gspo", "aggregation": "sequence_mean", "behavior_weight_level": "sequence"}
WINDOWS = {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
CASES: dict[str, tuple] = {
    "ppo_clip": ({"packing": "balanced"}, {"dual_clip": 3.0}),
    "gspo": ({"packing": "first_fit", "gradient_checkpointing": True}, BY_SEQUENCE),
    "cispo": ({"packing": "padded"}, {"preset": "cispo", **PENALISED}),
    "tree": ({"packing": "tree"}, {**PENALISED, "kl_in": "reward", "kl_estimator": "k2", "minibatches": 2}),
    "tree, gspo": ({"packing": "tree", "gradient_checkpointing": True}, {**BY_SEQUENCE, "minibatches": 1}),
    "tree, cispo": ({"packing": "tree"}, {"preset": "cispo", "aggregation": "constant", "aggregation_tokens": 16}),
    "tree, windows": ({"packing": "tree"}, {}, ("qwen3", WINDOWS)),
    "experts": ({"packing": "balanced"}, {}, ("qwen3_moe", {})),
    "tree, experts, half": ({"packing": "tree", "dtype": "bfloat16"}, {}, ("qwen3_moe", {})),
    "tree, half": ({"packing": "tree", "dtype": "bfloat16"}, {}),
    "tree, critic": ({"packing": "tree"}, {"preset": "ppo", "minibatches": 2}),
    "critic, half": ({"packing": "balanced", "dtype": "bfloat16"}, {"preset": "ppo"}),
    "adapters": ({"lora": LORA}, PENALISED),
    "adapters, critic": ({"lora": LORA}, {"preset": "ppo"}),
    "adapters, half": ({"lora": LORA, "dtype": "bfloat16", "packing": "balanced"}, PENALISED),
    "float32 head": (
        {"dtype": "bfloat16", "fp32_lm_head": True, "packing": "padded"},
        {"proximal": "approximate", "minibatches": 2},
    ),
}
FROM_GPU = {
    "algorithms/losses.py of",  # sums of a micro-batch, in one transfer
    "algorithms/losses.py sequence_sums",  # the number of sequences
    "algorithms/losses.py value_loss",
    "trainer/digests.py weights_digest",  # of each parameter, after the step
    "trainer/forward.py hidden_states",  # transformers looks for packed sequences, once a forward pass
    "trainer/metrics.py of",
    "trainer/model.py backward",
    "trainer/optimizer.py update",  # the norm of the gradient
    "trainer/step.py _backward",
    "trainer/step.py _keep",
    "trainer/step.py _measure",
}
"""The places at which a step may wait for the GPU."""


@pytest.fixture
def step_input(make_batch, as_input):
    """The input of a step in which all rollouts begin with the same ten tokens."""

    def make(step: int, num_groups: int):
        batch = make_batch(step, num_groups=num_groups)
        same = np.arange(10, dtype=np.int32)
        ids = [np.append(same, one.token_ids[10:])[: len(one.token_ids)] for one in batch.records]
        return as_input(batch, [replace(one, token_ids=own) for one, own in zip(batch.records, ids, strict=True)])

    return make


@pytest.mark.parametrize("case", CASES)
def test_a_step(case, model_folder, step_input, open_trainer, tmp_path):
    changes, algorithm, *other = CASES[case]
    for model_type, fields in other:
        model_folder = tmp_path / "model"
        make(model_type, {**PACKED[model_type], **fields}).save_pretrained(model_folder)
    config = TrainerConfig(**({"device": "cuda", "dtype": "float32"} | changes))
    more = {"token_records": tmp_path, "token_records_share": 1.0}
    small, large = step_input(1, 1), step_input(2, 3)
    with FakeGpu() as gpu:
        trainer = open_trainer(model_folder, config, AlgorithmConfig(**algorithm), **more)
        counted = []
        for given in (small, large):
            gpu.copies.clear()
            metrics = trainer.train_step(given).metrics
            counted.append((metrics["num_micro_batches"], dict(gpu.copies)))
    (of_small, few), (of_large, many) = counted
    assert {where for kind, where in many if kind in (TO_HOST, WAITS)} <= FROM_GPU
    assert {one: n for one, n in many.items() if n > few[one] * max(1, of_large / of_small)} == {}
    assert 0.0 < metrics["mfu"] < 1.0
    assert (metrics["shared_positions"] > 0) is config.packing.startswith("tree")
    if config.dtype == "float32":
        plain = open_trainer(model_folder, config.model_copy(update={"device": "cpu"}), AlgorithmConfig(**algorithm))
        plain.train_step(small)
        expected = plain.train_step(large).metrics
        names = [name for name in expected if "seconds" not in name]
        assert [metrics[one] for one in names] == pytest.approx([expected[one] for one in names], rel=1e-2, abs=1e-4)


@pytest.mark.parametrize(("before", "after"), [(CPU, GPU), (GPU, CPU)], ids=str)
def test_an_optimiser_goes_on_where_another_stopped(before, after):
    def made(weights: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Optimizer]:
        weights = weights.to(device).requires_grad_()
        return weights, Optimizer([weights], TrainerConfig(learning_rate=0.1))

    def update(weights: torch.Tensor, optimizer: Optimizer) -> torch.Tensor:
        weights.grad = (weights.detach() + 1.0) / 10.0
        optimizer.update()
        return weights.detach()

    with FakeGpu():
        first, optimizer = made(torch.arange(6.0).reshape(2, 3), before)
        second, other = made(update(first, optimizer), after)
        kept = optimizer.adamw.state_dict()["state"]
        kept = {number: {name: one.cpu() for name, one in of.items()} for number, of in kept.items()}  # in a checkpoint
        other.adamw.load_state_dict(other.adamw.state_dict() | {"state": kept})
        assert other.adamw.state[second]["step"].device == after
        torch.testing.assert_close(update(second, other).cpu(), update(first, optimizer).cpu())
        assert other.adamw.state[second]["step"] == 2


@pytest.mark.parametrize("changes", [{"transfer": "shared_memory"}, {"transfer": "disk"}, {"lora": LORA}], ids=str)
def test_a_push(changes, model_folder, step_input, open_trainer):
    with FakeGpu() as gpu:
        config = TrainerConfig(device="cuda", dtype="float32", **changes)
        trainer = open_trainer(model_folder, config, AlgorithmConfig())
        runner = ModelRunner(str(model_folder), device="cuda", num_slots=2, max_context_tokens=64, kv_tokens=512)
        trainer.train_step(step_input(1, 1))
        proved = take_weights(trainer.publish(), runner.layout, runner.device)
        assert not runner.layout.holds(proved)
        assert {one.device for one in proved.values()} == {GPU}, "they are there before the swap"
        gpu.copies.clear()
        runner.layout.copy(proved)
        assert not gpu.copies
        assert runner.layout.holds(proved)


def test_a_push_of_adapters_alone(model_folder, step_input, open_trainer):
    with FakeGpu() as gpu:
        config = TrainerConfig(device="cuda", dtype="float32", lora=LORA.model_copy(update={"push": "adapter"}))
        trainer = open_trainer(model_folder, config, AlgorithmConfig())
        trainer.train_step(step_input(1, 1))
        held = {PREFIX + name: one.tolist() for name, one in trainer._policy.whole_adapter().items()}
        gpu.copies.clear()
        pushed = load_file(Path(trainer.publish().path) / ADAPTER_WEIGHTS)
    assert sum(gpu.copies.values()) == len(held)
    assert {name: one.tolist() for name, one in pushed.items()} == held


def test_a_save(model_folder, step_input, open_trainer, tmp_path, monkeypatch):
    may_write = threading.Event()
    with FakeGpu():
        trainer = open_trainer(model_folder, TrainerConfig(device="cuda", dtype="float32"), AlgorithmConfig())
        trainer.train_step(step_input(1, 1))
        monkeypatch.setattr(saving, "machine_memory", lambda: (2**40, 2**10))
        at_once = trainer.saver.save(tmp_path, lambda write: "published")
        monkeypatch.setattr(saving, "machine_memory", lambda: (2**40, 2**30))
        trainer.saver._thread.submit(may_write.wait, 30)
        beside = trainer.save(tmp_path, step=1, incarnation=0)
        held = {name: one.tolist() for name, one in trainer._policy.whole_parameters(torch.float32)}
        trainer.train_step(step_input(2, 1))
    may_write.set()
    trainer.saver.close()
    assert (at_once, beside) == ("published", None)
    saved = load_file(trainer.saver.ended().path / "model.safetensors")
    assert {name: one.tolist() for name, one in saved.items()} == held


class Reading(torch.autograd.Function):
    """Doubles, and reads values on the host in its backward pass."""

    @staticmethod
    def forward(ctx, values):
        return 2.0 * values

    @staticmethod
    def backward(ctx, *gradients):
        (gradient,) = gradients
        gradient.cpu()
        assert (gradient.device, float(gradient[0])) == (GPU, 1.0)
        with pytest.raises(WrongDevice):
            gradient + torch.zeros(3)  # made on the host
        return 2.0 * gradient


def test_what_the_fake_gpu_finds():
    with FakeGpu() as gpu:
        weights = torch.nn.Linear(3, 2).to(GPU)
        assert (weights.weight.device, weights.weight.is_cuda) == (GPU, True)
        with pytest.raises(WrongDevice, match="two devices"):
            weights(torch.ones(4, 3))  # not moved
        loss = weights(torch.ones(4, 3).to(GPU)).sum()
        loss.backward()
        assert weights.weight.grad.device == GPU
        with pytest.raises(WrongDevice):
            weights.weight.grad + torch.zeros(2, 3)  # made on the host
        with pytest.raises(WrongDevice):
            loss.detach().numpy()
        loss = loss.detach()
        assert float(loss * torch.tensor(2.0)) == pytest.approx(2 * float(loss)), "a number may come from the host"
        gpu.copies.clear()
        sums = [row.sum().item() for row in torch.ones(5, 3, device=GPU)]
        assert (sums, gpu.copies[WAITS, "a test"]) == ([3.0] * 5, 5)
        torch.ones(5, device=GPU)[torch.ones(5, device=GPU) > 0].cpu()
        assert (gpu.copies[WAITS, "a test"], gpu.copies[TO_HOST, "a test"]) == (6, 1)
        weights = torch.ones(3, device=GPU).requires_grad_()
        hooked = []
        weights.register_hook(lambda gradient: hooked.append(gradient.device))
        for differentiate in (torch.Tensor.backward, lambda loss: torch.autograd.grad(loss, weights)):
            gpu.copies.clear()
            differentiate(Reading.apply(weights).sum())
            assert gpu.copies == {(TO_HOST, "a test"): 1, (WAITS, "a test"): 1}
        assert (hooked, weights.grad.device) == ([GPU, GPU], GPU)
    with pytest.raises(AssertionError):
        Reading.apply(torch.ones(3).requires_grad_()).sum().backward()  # outside, a host is a host


NUMBERS = torch.tensor([2, 0, 1])
causal = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)


@pytest.mark.parametrize(
    ("use", "seen"),
    [
        (np.asarray, WrongDevice),
        (lambda x: np.asarray([*x]), WrongDevice),
        (lambda x: torch.tensor([x[0], x[1]]), {TO_HOST: 2}),
        (lambda x: torch.tensor([x[0], 5], device=GPU), {TO_HOST: 1, TO_GPU: 1}),
        (lambda x: torch.as_tensor(x, device=CPU), {TO_HOST: 1}),
        (lambda x: torch.rand(2, device=GPU, generator=torch.Generator()), WrongDevice),
        (lambda x: x.float().normal_(generator=torch.Generator()), WrongDevice),
        (lambda x: torch.multinomial(x.float(), 1, generator=torch.Generator()), WrongDevice),
        (lambda x: torch.rand(2, generator=torch.Generator()), {}),
        (lambda x: x.tolist(), {TO_HOST: 1}),
        (str, {TO_HOST: 1}),
        (lambda x: torch.save({"of": [x, x]}, BytesIO()), {TO_HOST: 2}),
        (lambda x: x.repeat_interleave(x), {WAITS: 1}),
        (torch.bincount, {WAITS: 1}),
        (torch.unique, {WAITS: 1}),
        (torch.unique_consecutive, {WAITS: 1}),
        (lambda x: x[:, None].unique(dim=0), {WAITS: 1}),
        (lambda x: torch.allclose(x, x), {WAITS: 1}),
        (lambda x: [int(one) for one in x], {WAITS: 3}),
        (list, {}),
        (lambda x: causal(*(x[:size].float().expand(1, 1, 3, size) for size in (3, 3, 2))), {}),  # torch makes a mask
        (lambda x: torch.as_tensor(x, device=GPU), {}),
        (lambda x: x.repeat_interleave(2), {}),
        (lambda x: x.repeat_interleave(x, output_size=3), {}),
    ],
)
def test_what_crosses(use, seen):
    with FakeGpu() as gpu:
        numbers = NUMBERS.to(GPU)
        gpu.copies.clear()
        if seen is WrongDevice:
            with pytest.raises(WrongDevice):
                use(numbers)
            return
        use(numbers)
    assert gpu.copies == {(kind, "a test"): n for kind, n in seen.items()}
