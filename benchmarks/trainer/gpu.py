"""Train steps on a GPU, in one command: tokens per second, MFU and memory of autocast and of what the trainer does.

    python benchmarks/trainer/gpu.py [--shapes 0.6B 1.7B] [--tokens 8192] [--length 512] [--steps 5]
    python benchmarks/trainer/gpu.py --shapes tiny --device cpu --tokens 256 --length 64        # the same code on a CPU

`doctor GiB` is what areal_agent.doctor expects of a trainer with such micro-batches.

Models have random weights of Qwen3's shapes. A step is two micro-batches, each one packed row of equally long random
sequences whose second halves are in the loss: forward, backward, then AdamW. Sides:

    autocast        bfloat16 products by torch.autocast, attention sequence by sequence: the trainer before
    one call        bfloat16 by copies of the weights, one attention call for a row
    compiled        the same with compiled layers, on a GPU alone: the trainer's default there
    loop            by copies, attention sequence by sequence
    FSDP2           bfloat16 by FSDP2, one attention call for a row: the trainer of several ranks
    float32 head    the trainer with trainer.fp32_lm_head
    tree            one call (FlexAttention), but the sequences of a row share their first halves, computed once

MFU is that of `trainer/mfu` (docs/metrics.md), but what is shared counts as if it was computed for each sequence.
"""

import argparse
import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from areal_agent.algorithms.batching import MicroBatch, Sample, collate
from areal_agent.config import Config
from areal_agent.doctor.memory import TrainerMemory
from areal_agent.doctor.model import ModelShape
from areal_agent.trainer.compiled import Compiled
from areal_agent.trainer.config import TrainerConfig
from areal_agent.trainer.forward import LossTokenForward, decoder_layers, decoder_of
from areal_agent.trainer.metrics import PEAK_TFLOPS, peak_rate
from areal_agent.trainer.model import Computing, Policy, computing_in
from areal_agent.trainer.optimizer import Optimizer
from areal_agent.trainer.ranks import ALONE, Group, Precision

HALF, FULL = torch.bfloat16, torch.float32
SIDES: dict[str, Precision | None] = {
    "autocast": None,
    "one call": Precision(layers=HALF, rest=HALF),
    "compiled": Precision(layers=HALF, rest=HALF),
    "loop": Precision(layers=HALF, rest=HALF),
    "FSDP2": Precision(layers=HALF, rest=HALF),
    "float32 head": Precision(layers=HALF, rest=FULL),
    "tree": Precision(layers=HALF, rest=HALF),
}
SHAPES = {  # hidden, intermediate, layers, heads, head size, vocabulary
    "tiny": (64, 192, 2, 4, 16, 512),
    "0.6B": (1024, 3072, 28, 16, 128, 151_936),
    "1.7B": (2048, 6144, 28, 16, 128, 151_936),
}
MICRO_BATCHES = 2
WARM_UP = 2


def main() -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/trainer/gpu.py", description="Train steps on a GPU.")
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=["0.6B", "1.7B"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch (default %(default)s)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence (default %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="of which the median is told (default %(default)s)")
    parser.add_argument("--peak-tflops", type=float, help="of a GPU other than " + ", ".join(PEAK_TFLOPS))
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "torch sees no CUDA device, so nothing was measured; `--shapes tiny --device cpu` tries the code on a CPU"
        )
        return 1
    device = torch.device(args.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    peak = 1e12 * args.peak_tflops if args.peak_tflops else peak_rate(device)
    print(f"{name}, torch {torch.__version__}, {args.tokens} tokens in sequences of {args.length}")
    print(
        "\n| shape | side | tokens/s | to autocast | MFU | peak GiB | doctor GiB |\n|---|---|---|---|---|---|---|",
        flush=True,
    )
    group = Group.join(0, 1, dist.HashStore(), device)  # pyright: ignore[reportPrivateImportUsage]
    for shape in args.shapes:
        base, expected = 0.0, expected_bytes(shape, device, args.tokens)
        for side in SIDES:
            measured = step_s(shape, side, device, group, [args.length] * (args.tokens // args.length), args.steps)
            if measured is None:
                print(
                    f"| {shape} | {side} | not run: no kernel gives the model's own logits here | | | | |", flush=True
                )
                continue
            seconds, num_bytes, work = measured
            rate = MICRO_BATCHES * args.tokens / seconds
            base = base or rate
            mfu = f"{work / seconds / peak:.3f}" if peak else "-"
            memory = f"{num_bytes / 2**30:.1f}" if num_bytes else "-"
            print(
                f"| {shape} | {side} | {rate:.0f} | {rate / base:.2f} | {mfu} | {memory} | {expected / 2**30:.2f} |",
                flush=True,
            )
    group.leave()
    return 0


def step_s(
    shape: str, side: str, device: torch.device, group: Group, lengths: Sequence[int], num_steps: int
) -> tuple[float, int, float] | None:
    """Return a step's median seconds, peak of allocated bytes, and operations; None without a kernel for one call."""
    gc.collect()  # the model of the side before
    policy = Policy(build(shape, device), device)
    if side in ("FSDP2", "one call", "compiled") and policy.kernel is None:
        return None
    precision = SIDES[side]
    forward = LossTokenForward(policy.model, None if side in ("autocast", "loop") else policy.kernel)
    layers = decoder_layers(decoder_of(policy.model))
    if side == "compiled":
        Compiled().take(layers)
    casting = torch.autocast(device.type, dtype=HALF) if precision is None else contextlib.nullcontext()
    computing: Computing = contextlib.nullcontext
    if precision is not None:
        within = group if side == "FSDP2" else ALONE
        within.shard(layers, forward, precision)
        computing = computing_in(forward, layers, within, precision)
    optimizer = Optimizer(policy.model.parameters(), TrainerConfig())
    is_tree = side == "tree"
    batches = [batch_of(lengths, SHAPES[shape][-1], device, seed, is_tree=is_tree) for seed in range(MICRO_BATCHES)]
    is_gpu = device.type == "cuda"
    work = sum(policy.work.count(batch_of(lengths, SHAPES[shape][-1], device, seed)) for seed in range(MICRO_BATCHES))
    times: list[float] = []
    for number in range(WARM_UP + num_steps):
        if is_gpu and number == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        started_s = time.perf_counter()
        with computing():
            for batch in batches:
                with casting:
                    logprobs, _ = forward(batch)
                (-logprobs.mean() / len(batches)).backward()
        optimizer.update()
        if is_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times[WARM_UP:]), torch.cuda.max_memory_allocated() if is_gpu else 0, work


def build(shape: str, device: torch.device) -> Qwen3ForCausalLM:
    hidden, intermediate, layers, heads, head_size, vocabulary = SHAPES[shape]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=head_size,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )
    with device:
        return Qwen3ForCausalLM(config)


def batch_of(
    lengths: Sequence[int], vocabulary: int, device: torch.device, seed: int, *, is_tree: bool = False
) -> MicroBatch:
    """Return one row of random sequences, in a tree with a common first half."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randint(0, vocabulary, (max(lengths),), generator=generator)
    samples: list[Sample] = []
    for length in lengths:
        ids = torch.randint(0, vocabulary, (length + 1,), generator=generator)
        if is_tree:
            ids[: length // 2] = common[: length // 2]
        predicting = torch.arange(length // 2, length)
        ones = torch.ones(len(predicting))
        samples.append(
            Sample(
                rollout="",
                inputs=ids[:-1],
                predicting=predicting,
                targets=ids[predicting + 1],
                temperatures=ones,
                behavior=-ones,
                versions=ones.int(),
                incarnations=ones.int(),
            )
        )
    return collate(samples, device, is_tree=is_tree)


def expected_bytes(shape: str, device: torch.device, num_tokens: int) -> int:
    """Return what the doctor expects at the trainer's peak, for micro-batches of so many tokens."""
    keys = ("engine.max_context_tokens", "trainer.tokens_per_micro_batch")
    config = Config.load("configs/quickstart.yaml", ["rollout.max_tokens=1", *(f"{key}={num_tokens}" for key in keys)])
    of_model = ModelShape.of(build(shape, torch.device("meta")).config.to_dict())
    return TrainerMemory(shape=of_model, config=config, is_gpu=device.type == "cuda").at_peak().total()


if __name__ == "__main__":
    sys.exit(main())
