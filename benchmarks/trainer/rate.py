"""The rate of train steps on one thread of a CPU, as a share of that of one large product in the same dtype.

    python benchmarks/trainer/rate.py --model FOLDER [--dtypes float32 bfloat16] [--sequences 68] [--rounds 3]

A step trains one row of sequences of 64 tokens, whose last 13 are in the loss: one forward and backward pass, and the
update. Counted are the model's own operations, 6 for each weight and token (of the output layer for loss tokens alone)
and causal attention's. The product is 2048 x 576 x 1536, right after the steps. Times are CPU-seconds.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import torch
from ours import record_of
from torch.nn.functional import linear

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.doctor.model import ModelShape
from areal_agent.trainer.config import TrainerConfig, TrainerSetup
from areal_agent.trainer.trainer import Trainer
from areal_agent.trainer.wire import StepInput

INPUTS, LOSS_TOKENS = 64, 13  # of a sequence; its last token is no input
ROWS, INNER, COLUMNS = 2048, 576, 1536


def main() -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/trainer/rate.py", description="The rate of train steps.")
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="a Hugging Face folder")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32"])
    parser.add_argument("--sequences", type=int, default=68, help="of a step (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="steps whose median is printed (default %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = ModelShape.read(args.model)
    head = shape.vocab_size * shape.hidden_size
    layers = shape.num_parameters - (2 - shape.is_tied) * head
    layers += shape.num_layers * shape.query_size * INPUTS  # q k^T and its product with v, over half of the row
    done = 6.0 * args.sequences * (INPUTS * layers + LOSS_TOKENS * head)
    print(f"\n| dtype, {args.sequences * INPUTS} tokens a step | s | GFLOP/s | of a large product | ratio |")
    print("|---|---|---|---|---|", flush=True)
    for name in args.dtypes:
        dtype: torch.dtype = getattr(torch, name)
        seconds = step_s(args.model, shape.vocab_size, name, args.sequences, args.rounds)
        product = partial(linear, torch.randn(ROWS, INNER).to(dtype), torch.randn(COLUMNS, INNER).to(dtype))
        rate, peak = done / seconds, 2 * ROWS * INNER * COLUMNS / median_s(product, rounds=30)
        print(f"| {name} | {seconds:.1f} | {rate / 1e9:.0f} | {peak / 1e9:.0f} | {rate / peak:.2f} |", flush=True)
    return 0


def step_s(folder: Path, vocab_size: int, dtype: str, num_sequences: int, rounds: int) -> float:
    """Return the median of a step, of random tokens; the sequences share no prefix."""
    ids = np.random.default_rng(0).integers(0, vocab_size, (num_sequences, INPUTS + 1))
    records = [record_of(index, one[:-LOSS_TOKENS], one[-LOSS_TOKENS:], index % 2) for index, one in enumerate(ids)]
    rewards = {one.session_id: float(one.turn_rewards[0]) for one in records}
    config = TrainerConfig.model_validate({"dtype": dtype, "device": "cpu", "learning_rate": 1e-6})
    algorithm = AlgorithmConfig(proximal="behavior")  # `recompute` would need one more forward pass
    fields = {"model": folder, "trainer": config, "algorithm": algorithm, "seed": 0, "shared_memory": folder}
    trainer = Trainer(TrainerSetup.model_validate({**fields, "publishes": False}))
    for record, logprobs in zip(records, trainer.measure(records), strict=True):
        record.behavior_logprobs[record.loss_mask] = logprobs.numpy()
    steps = (StepInput(step=step, records=records, rewards=rewards) for step in count(1))
    return median_s(lambda: trainer.train_step(next(steps)), rounds)


def median_s(action: Callable[[], object], rounds: int) -> float:
    """Return the median CPU-seconds of some rounds, after one that warms up."""
    times: list[float] = []
    for _ in range(rounds + 1):
        started_s = time.process_time()
        action()
        times.append(time.process_time() - started_s)
    return statistics.median(times[1:])


if __name__ == "__main__":
    sys.exit(main())
