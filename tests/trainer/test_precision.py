"""What the trainer computes in, and attention over a packed row, in one call and in the loop over sequences.

- `auto` is bfloat16 on cuda and float32 on a CPU; a float32 output layer is an option of bfloat16.
- In bfloat16 weights stay float32 and gradients are those of float32 within rounding, summed over micro-batches in
  float32; that holds for each family, with adapters, critic, reference and recomputed layers, and over a resume.
- One rank without FSDP2 gives what FSDP2 gives, over two micro-batches, with experts, adapters and recomputed layers;
  its weights are float32, also after an error, and no copy of them stays.
- Compiled layers give the same, and are compiled for the first two micro-batches alone, whatever follows. Layers run as
  they are where a compiler fails or gives another gradient, and the log says so.
- With `fp32_lm_head` the logits are products in float32. Temperatures are never rounded.
- One call gives what the loop over sequences gives, values and gradients; windows, soft caps, sinks, float32 and odd
  sizes are left to the loop. A kernel that fails or sees other sequences is not used. No verdict rests on how a mean
  is rounded. A kernel without grouped heads gets keys and values repeated; a torch without one is told once.
- On a GPU, the kernel is that of torch or flash-attn, and a train step is that of a CPU within rounding.
- A folder without some weights, and cuda without a device, are refused; test_client.py has one without a model.
- Windows, soft caps and sinks are those of the written-out formula, sequence by sequence, also where queries are taken
  in blocks.
"""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import MistralConfig
from transformers.masking_utils import create_sliding_window_causal_mask

from areal_agent.algorithms.batching import collate, sample_of
from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.algorithms.trees import QUERIES_PER_BLOCK
from areal_agent.engine.embedded.packed import Spans, flash_attn_varlen_func, packed_kernel
from areal_agent.errors import ConfigError
from areal_agent.trainer.attention import ATTENTION_NAME, OneCall, Row, Rule, segment_attention
from areal_agent.trainer.compiled import Compiled
from areal_agent.trainer.config import LoraConfig, TrainerConfig
from areal_agent.trainer.forward import choose_attention
from areal_agent.trainer.halves import Halves
from areal_agent.trainer.model import Policy, choose_device
from areal_agent.trainer.ranks import ALONE, FLOAT32, Group, Precision, whole
from tests.trainer.families import DENSE, PACKED, make
from tests.trainer.lab import CPU, GRADIENT_DESCENT, Lab
from tests.trainer.test_families import SAMPLES

HALF = GRADIENT_DESCENT.model_copy(update={"dtype": "bfloat16"})
BOTH, LAYERS = (Precision(layers=torch.bfloat16, rest=one) for one in (torch.bfloat16, torch.float32))
LENGTHS = (3, 1, 5)
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.fixture
def group() -> Iterator[Group]:
    """A group of this process alone with FSDP2."""
    group = Group.join(0, 1, dist.HashStore(), CPU)
    yield group
    group.leave()


def off_by(found: Tensor, expected: Tensor) -> float:
    """The length of the difference as a fraction of what is expected."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize(
    ("values", "device", "layers", "rest"),
    [
        ({}, "cpu", torch.float32, torch.float32),
        ({}, "cuda", torch.bfloat16, torch.bfloat16),
        ({"dtype": "float32"}, "cuda", torch.float32, torch.float32),
        ({"dtype": "bfloat16"}, "cpu", torch.bfloat16, torch.float32),
        ({"fp32_lm_head": True}, "cuda", torch.bfloat16, torch.float32),
    ],
)
def test_what_a_config_asks_for_on_a_device(values, device, layers, rest) -> None:
    assert Precision.of(TrainerConfig(**values), torch.device(device), 64) == Precision(layers=layers, rest=rest)


def test_an_output_layer_cannot_be_more_exact_than_float32() -> None:
    with pytest.raises(ValueError, match="every layer is float32; leave one out"):
        TrainerConfig(dtype="float32", fp32_lm_head=True)
    with pytest.raises(ValueError, match="is float32; leave it out"):
        TrainerConfig(device="cpu", fp32_lm_head=True)
    with pytest.raises(ConfigError, match=r"there is no GPU here, .*; leave it out"):
        Precision.of(TrainerConfig(fp32_lm_head=True), CPU, 64)


ALL = AlgorithmConfig(preset="ppo", reference="initial", kl_coefficient=0.1, minibatches=2)
PENALISED = AlgorithmConfig(reference="initial", kl_coefficient=0.1)


@pytest.mark.parametrize(
    ("changes", "algorithm"),
    [
        ({}, AlgorithmConfig()),
        ({"gradient_checkpointing": True}, AlgorithmConfig()),
        ({"learning_rate": 1e4}, ALL),
        ({"lora": LoraConfig(rank=4, alpha=8.0)}, PENALISED),
    ],
    ids=["plain", "recomputed", "critic and reference", "adapters"],
)
def test_gradients_are_those_of_float32_within_rounding(model_folder, given, changes, algorithm) -> None:
    exact = Lab(model_folder, GRADIENT_DESCENT.model_copy(update=changes), algorithm)
    expected = exact.gradient(given)
    half = Lab(model_folder, HALF.model_copy(update=changes), algorithm, budget=60)
    assert 0 < off_by(half.gradient(given), expected) < 0.06  # of the critic 0.037 on a CPU that multiplies bfloat16
    assert {one.dtype for one in half.policy.trained_parameters().values()} == {torch.float32}


def test_micro_batches_are_summed_in_float32(model_folder, given) -> None:
    """So the gradient is not rounded to the eight bits that it has in the backward pass of one micro-batch."""
    lab = Lab(model_folder, HALF, budget=30)
    assert lab.stepper.train(given)["num_micro_batches"] > 2
    moved = lab.before - lab.weights()
    assert (moved != moved.bfloat16().float()).float().mean() > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("model_type", PACKED)
@pytest.mark.parametrize("precision", [BOTH, LAYERS], ids=["all", "layers"])
def test_each_family_computes_in_bfloat16(model_type, precision) -> None:
    def measured(precision: Precision) -> tuple[Tensor, list[Tensor | None]]:
        policy = Policy(make(model_type, PACKED[model_type]), CPU)
        policy.shard(ALONE, precision)
        with policy.computing():
            logprobs, _ = policy.logprobs_and_entropy(collate(SAMPLES, CPU))
            logprobs.sum().backward()
        return logprobs.detach(), [one.grad for one in policy.trained_parameters().values()]

    found, ours = measured(precision)
    expected, theirs = measured(FLOAT32)
    assert 0 < (found - expected).abs().median() < 0.1  # of all tokens but those that a router sends elsewhere
    assert [one is None for one in ours] == [one is None for one in theirs]
    assert all(bool(one.isfinite().all()) for one in ours if one is not None)


@pytest.mark.parametrize("precision", [BOTH, LAYERS], ids=["all", "layers"])
@pytest.mark.parametrize("is_adapted", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3", "gemma2", "qwen3_moe"])
def test_one_rank_computes_what_fsdp2_does(model_type, is_adapted, precision, group) -> None:
    def measured(within: Group) -> list[Tensor]:
        policy = Policy(make(model_type, PACKED[model_type]), CPU)
        if is_adapted:
            policy.adapt(LoraConfig(target_modules=("q_proj", "v_proj")), 0, precision)
        policy.recompute_layers()
        policy.shard(within, precision)
        found: list[Tensor] = []
        with policy.computing():
            for samples in (SAMPLES, SAMPLES[:1]):
                logprobs, _ = policy.logprobs_and_entropy(collate(samples, CPU))
                logprobs.sum().backward()
                found.append(logprobs.detach())
        trained = policy.trained_parameters().values()
        assert {one.dtype for one in trained} == {torch.float32}
        with torch.no_grad():  # without `computing`
            assert torch.equal(policy.logprobs_and_entropy(collate(SAMPLES, CPU))[0], found[0])
        return found + [whole(one.grad) for one in trained]

    for ours, theirs in zip(measured(ALONE), measured(group), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_copies_are_gone_when_training_fails() -> None:
    linear = nn.Linear(3, 2)
    before, halves = dict(linear.named_parameters()), Halves([linear])
    with pytest.raises(RuntimeError), halves.on(), halves.on():
        copies = list(linear.parameters())
        assert [one.dtype for one in copies] == [torch.bfloat16] * 2
        linear(torch.zeros(4, 5))
    assert dict(linear.named_parameters()) == before
    assert [one.untyped_storage().nbytes() for one in copies] == [0, 0]


def altered(by: float):
    """A compiler whose layers take their input as so many times what it is."""
    return lambda plain: lambda hidden, *args, **more: plain(by * hidden, *args, **more)


WAYS = {
    "the same": (altered(1.0), None),
    "another gradient": (altered(1.5), "their gradient differs by "),
    "not finite": (altered(float("nan")), "their gradient differs by nan"),
    "no compiler": (lambda _: refusing, "RuntimeError: no kernel image is available"),
}


@pytest.mark.parametrize("way", WAYS)
def test_layers_run_compiled_if_that_gives_their_gradient(way, caplog) -> None:
    fuse, fault = WAYS[way]
    policy = Policy(make("qwen3", {**DENSE, "head_dim": 8}), CPU)
    compiled = Compiled(fuse)
    policy.compile_layers(compiled)
    policy.recompute_layers()
    policy.shard(ALONE, BOTH)
    assert policy.is_untried
    with policy.computing():
        policy.try_compiled(collate(SAMPLES, CPU))
    assert (compiled.is_on, policy.is_untried) == (fault is None, False)
    told = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert [str(fault) in one for one in told] == ([] if fault is None else [True])
    assert all(one.grad is None for one in policy.model.parameters())
    assert bool(policy.logprobs_and_entropy(collate(SAMPLES, CPU))[0].isfinite().all())


@pytest.mark.slow
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_compiled_layers_compute_the_same_and_are_compiled_once(is_recomputed) -> None:
    torch._dynamo.reset()
    plain, compiled = (Policy(make("qwen3", {**DENSE, "head_dim": 8}), CPU) for _ in range(2))
    compiled.compile_layers(Compiled())
    if is_recomputed:
        compiled.recompute_layers()
    samples = [SAMPLES[0], *SAMPLES]
    counted: list[int] = []
    for size in (1, 3, 2, 4):
        batch = collate(samples[:size], CPU)
        found = [one.logprobs_and_entropy(batch)[0] for one in (plain, compiled)]
        for one in found:
            one.sum().backward()
        torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)
        counted.append(torch._dynamo.utils.counters["frames"]["total"])
    assert 0 < counted[0] <= counted[1] == counted[2] == counted[3]
    for ours, theirs in zip(compiled.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_a_step_with_compiled_layers_is_the_step(model_folder, make_batch, as_input, open_trainer, caplog) -> None:
    torch._dynamo.reset()
    caplog.set_level("INFO")
    found: list[dict[str, float]] = []
    for is_compiled in (True, False):
        trainer = open_trainer(model_folder, TrainerConfig(learning_rate=1e-3, compile=is_compiled), ALL)
        found.append([trainer.train_step(as_input(make_batch(step))).metrics for step in (1, 2)][1])
    assert [one.getMessage()[:19] for one in caplog.records if "compile" in one.getMessage()] == ["layers run compiled"]
    for name in ("loss", "entropy", "grad_norm", "critic_grad_norm", "kl_policy_reference"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-2, abs=1e-3), name


def test_a_resumed_run_goes_on_exactly(model_folder, make_batch, as_input, open_trainer, tmp_path) -> None:
    config = TrainerConfig(learning_rate=1e-3, dtype="bfloat16")
    steps = [as_input(make_batch(step, num_groups=1)) for step in (1, 2)]
    trainer = open_trainer(model_folder, config, ALL)
    trainer.train_step(steps[0])
    saved = trainer.save(tmp_path / "checkpoints", step=1, incarnation=0)
    expected = trainer.train_step(steps[1]).metrics
    trainer.close()
    found = open_trainer(saved.path, config, ALL).train_step(steps[1]).metrics
    assert expected["kl_policy_reference"] > 0.0
    assert {name: found[name] for name in expected if "seconds" not in name} == {
        name: value for name, value in expected.items() if "seconds" not in name
    }


def test_with_a_float32_output_layer_logits_are_float32(model_folder, given) -> None:
    batch = collate([sample_of(one) for one in given.records], CPU)
    batch = replace(batch, temperatures=torch.full_like(batch.temperatures, 0.7))  # which is none of bfloat16
    away: dict[torch.dtype, float] = {}
    for rest in (torch.float32, torch.bfloat16):
        policy = Policy.load(model_folder, CPU)
        weight = policy.model.lm_head.weight.detach().clone()
        seen: list[tuple[Tensor, Tensor]] = []
        policy.model.lm_head.register_forward_hook(lambda _, given, logits, seen=seen: seen.append((given[0], logits)))
        policy.shard(ALONE, replace(BOTH, rest=rest))
        with torch.no_grad():
            found, _ = policy.logprobs_and_entropy(batch)
        ((hidden, logits),) = seen
        expected = torch.log_softmax(logits[0].float() / 0.7, dim=-1).gather(1, batch.targets[:, None])[:, 0]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        assert hidden.dtype == logits.dtype == rest
        away[rest] = off_by(logits, hidden.float() @ weight.T)
    assert away[torch.float32] < 1e-6 and away[torch.bfloat16] > 1e-3


# ------------------------------------------------------------------------------------------------- one call


def by_mask(query: Tensor, key: Tensor, value: Tensor, spans: Spans, of_keys: Spans, scaling: float) -> Tensor:
    """What a kernel computes, written with a mask made of its offsets: [T, H, D]."""
    lengths = spans.offsets.diff().tolist()
    assert max(lengths) == spans.longest and spans.offsets.dtype == torch.int32 and of_keys is spans
    mask = torch.block_diag(*(torch.ones(one, one) for one in lengths)).bool().tril()
    rows = (one.transpose(0, 1)[None] for one in (query, key, value))
    return scaled_dot_product_attention(*rows, attn_mask=mask, scale=scaling, enable_gqa=True)[0].transpose(0, 1)


def leaking(query: Tensor, key: Tensor, value: Tensor, _: Spans, of_keys: Spans, scaling: float) -> Tensor:
    """A kernel that takes the row for one sequence."""
    whole = Spans.of([len(key)], CPU)
    return by_mask(query, key, value, whole, whole, scaling)


def refusing(*_: object, **__: object) -> Tensor:
    raise RuntimeError("no kernel image is available for execution on the device")


def random_qkv(size: int, dtype: torch.dtype, device: torch.device = CPU, lengths=LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, heads, sum(lengths), size, generator=generator).to(device, dtype).requires_grad_()
        for heads in (4, 2, 2)
    ]


def attend(qkv: list[Tensor], one_call: OneCall | None, lengths=LENGTHS, rule: Rule | None = None, **scores: object):
    row = Row(segments=lengths, one_call=one_call)
    return segment_attention(nn.Identity(), *qkv, rule, scaling=0.3, row=row, **scores)[0]


def test_the_offsets_are_where_sequences_begin_and_the_end_of_the_last() -> None:
    call = OneCall.of(by_mask, LENGTHS, CPU)
    assert (call.spans.offsets.tolist(), call.spans.longest) == ([0, 3, 4, 9], 5)


def test_one_call_is_the_loop_over_sequences() -> None:
    qkv = random_qkv(8, torch.bfloat16)
    found, expected = (attend(qkv, one) for one in (OneCall.of(by_mask, LENGTHS, CPU), None))
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
    toward = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    for ours, theirs in zip(*(torch.autograd.grad(one, qkv, toward) for one in (found, expected)), strict=True):
        assert off_by(ours, theirs) < 0.02


@pytest.mark.parametrize(
    ("size", "dtype", "more"),
    [
        (8, torch.float32, {}),
        (12, torch.bfloat16, {}),
        (264, torch.bfloat16, {}),
        (8, torch.bfloat16, {"softcap": 1.5}),
        (8, torch.bfloat16, {"s_aux": torch.zeros(4)}),
    ],
    ids=["float32", "size 12", "size 264", "soft cap", "sinks"],
)
def test_what_kernels_do_not_compute_is_left_to_the_loop(size, dtype, more) -> None:
    qkv = random_qkv(size, dtype)
    assert torch.equal(attend(qkv, OneCall.of(refusing, LENGTHS, CPU), **more), attend(qkv, None, **more))


@pytest.mark.parametrize(("window", "is_called"), [(5, True), (4, False)])
def test_a_window_that_a_sequence_exceeds_is_left_to_the_loop(window, is_called) -> None:
    lengths, called = (3, 1, 5), []

    def counted(*given: object) -> Tensor:
        called.append(given)
        return by_mask(*given)

    rule = Rule(reach=window, arguments=RULE | {"mask_function": lambda _b, _h, q, k: (k <= q) & (q - k < window)})
    attend(random_qkv(8, torch.bfloat16), OneCall.of(counted, lengths, CPU), lengths, rule)
    assert len(called) == is_called


RULE = {"batch_size": 1, "device": CPU, "use_vmap": True}


@pytest.mark.parametrize("kernel", [by_mask, leaking, refusing])
def test_a_kernel_is_used_only_where_it_gives_the_models_own_logits(kernel, caplog) -> None:
    model = make("qwen3", {**DENSE, "head_dim": 8})
    chosen = choose_attention(model, is_padded=False, kernel=kernel)
    assert chosen is (by_mask if kernel is by_mask else None)
    assert [one.message.split(",")[0] for one in caplog.records] == (
        [] if chosen else ["attention runs sequence by sequence"]
    )


def test_a_padded_row_needs_no_kernel() -> None:
    assert choose_attention(make("llama", DENSE), is_padded=True, kernel=by_mask) is None


class MeansBelow(TorchFunctionMode):
    """Every mean is one rounding lower than the exact one, as a GPU's may be."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        return found.nextafter(found - 1) if function in (torch.mean, Tensor.mean) else found


def test_the_proof_does_not_rest_on_how_a_mean_is_rounded() -> None:
    with MeansBelow():
        assert torch.ones(209).mean() < 1.0
        choose_attention(make("llama", DENSE), is_padded=False)


def each_head(query: Tensor, key: Tensor, value: Tensor, *told: Any, scale: float, window_size: object) -> Tensor:
    """torch 2.11's kernel, which wants a key and a value for each query head."""
    assert key.shape == value.shape == query.shape and window_size == (-1, 0) and told[0] is told[1]
    spans = Spans(offsets=told[0], longest=told[2])
    return by_mask(query, key, value, spans, spans, scale)


@pytest.mark.skipif(torch.__version__ < "2.11", reason="an older torch has no such kernel")
def test_the_kernel_of_torch_is_called_as_it_asks_to_be() -> None:
    kernel = packed_kernel()
    assert kernel is not None
    query, key, value = (torch.empty(9, heads, 8, device="meta", dtype=torch.bfloat16) for heads in (4, 2, 2))
    spans = Spans.of(LENGTHS, CPU)
    assert kernel(query, key, value, spans, spans, 0.3).shape == (9, 4, 8)


def test_a_kernel_for_equally_many_heads_gets_keys_and_values_repeated() -> None:
    qkv = random_qkv(8, torch.bfloat16)
    once = OneCall.of(packed_kernel(each_head), LENGTHS, CPU)
    torch.testing.assert_close(attend(qkv, once), attend(qkv, None), atol=0.02, rtol=0.02)


@pytest.mark.skipif(flash_attn_varlen_func is not None, reason="flash-attn has one")
def test_a_torch_without_a_kernel_is_told_once(caplog) -> None:
    assert [packed_kernel(None) for _ in range(2)] == [None, None]
    assert [one.message.split(",")[0] for one in caplog.records] == ["attention runs sequence by sequence"]


# ------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.cuda
@cuda
@pytest.mark.parametrize("size", [64, 128])
def test_the_kernel_of_a_gpu_is_the_loop(size) -> None:
    kernel, lengths, device = packed_kernel(), (300, 1, 77, 513), torch.device("cuda")
    assert kernel is not None
    qkv = random_qkv(size, torch.bfloat16, device, lengths)
    found, expected = (attend(qkv, one, lengths) for one in (OneCall.of(kernel, lengths, device), None))
    assert off_by(found, expected) < 0.01
    toward = torch.randn_like(found)
    for ours, theirs in zip(*(torch.autograd.grad(one, qkv, toward) for one in (found, expected)), strict=True):
        assert off_by(ours, theirs) < 0.02


@pytest.mark.cuda
@cuda
def test_a_train_step_on_a_gpu_is_that_of_a_cpu_within_rounding(model_folder, given, open_trainer) -> None:
    algorithm = AlgorithmConfig(preset="ppo")
    found, expected = (
        open_trainer(model_folder, TrainerConfig(device=device), algorithm).train_step(given).metrics
        for device in ("cuda", "cpu")
    )
    assert Policy.load(model_folder, torch.device("cuda")).kernel is packed_kernel() is not None
    for name in ("grad_norm", "entropy", "value_loss"):
        assert found[name] == pytest.approx(expected[name], rel=0.03)


@pytest.fixture(scope="module")
def policy(model_folder):
    return Policy.load(model_folder, CPU)


def test_weights_that_are_missing_from_the_files_are_a_config_error(model_folder, tmp_path):
    shutil.copyfile(model_folder / "config.json", tmp_path / "config.json")
    weights = load_file(model_folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"its files lack the weights \['model\.norm\.weight'\]"):
        Policy.load(tmp_path, CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_a_config_error():
    with pytest.raises(ConfigError, match=r"trainer\.device is 'cuda'"):
        choose_device("cuda")


def dense(qkv: list[torch.Tensor], window: int, softcap: float | None, sinks: torch.Tensor | None) -> torch.Tensor:
    """Attention within one sequence, written out: [1, T, H, D]."""
    query, key, value = qkv[0], *(one.repeat_interleave(2, dim=1) for one in qkv[1:])
    scores = 0.3 * query @ key.transpose(2, 3)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])
    weights = scores.masked_fill((distance < 0) | (distance >= window), float("-inf")).exp()
    rest = 0.0 if sinks is None else sinks.exp()[:, None, None]
    return (weights / (weights.sum(-1, keepdim=True) + rest) @ value).transpose(1, 2)


@pytest.mark.usefixtures("policy")  # which registers the attention
@pytest.mark.parametrize("window", [2 * QUERIES_PER_BLOCK, 100, 1])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_windows_soft_caps_and_sinks_in_blocks_are_the_formula(window, softcap, has_sinks):
    generator = torch.Generator().manual_seed(0)
    lengths = (7, QUERIES_PER_BLOCK + 50)
    qkv = [torch.randn(1, heads, sum(lengths), 8, generator=generator).requires_grad_() for heads in (4, 2, 2)]
    sinks = torch.randn(4, generator=generator).requires_grad_() if has_sinks else None
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    config = MistralConfig(sliding_window=window, attn_implementation=ATTENTION_NAME)
    states = torch.zeros(1, sum(lengths), 1)
    rule = create_sliding_window_causal_mask(config, states, None, None, positions)
    found, _ = segment_attention(
        nn.Identity(),
        *qkv,
        rule,
        scaling=0.3,
        softcap=softcap,
        s_aux=sinks,
        row=Row(segments=lengths),
        sliding_window=window,
    )
    parts = zip(*(one.split(lengths, dim=2) for one in qkv), strict=True)
    expected = torch.cat([dense(list(part), window, softcap, sinks) for part in parts], dim=1)
    torch.testing.assert_close(found, expected)
    inputs = [*qkv, *([] if sinks is None else [sinks])]
    toward = torch.randn(found.shape, generator=generator)
    for ours, theirs in zip(*(torch.autograd.grad(one, inputs, toward) for one in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
