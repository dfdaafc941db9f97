"""Train steps in trees and in flat rows: the operations and the time that shared prefixes save, on one thread of a CPU.

Run by `python benchmarks/trainer --tree`. Each mixture is trained by both sides in turn; times are CPU-seconds of the
step. Counted are 6 operations for each weight of a layer and position, and of the output layer and loss token, and 12
for each pair of tokens that see each other and number of a head's queries.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from ours import record_of
from transformers import AutoModelForCausalLM, Qwen3Config

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.algorithms.trees import Tree
from areal_agent.doctor.model import ModelShape
from areal_agent.models.tiny import build
from areal_agent.trainer.config import TrainerConfig, TrainerSetup
from areal_agent.trainer.trainer import Trainer
from areal_agent.trainer.wire import StepInput
from areal_agent.types import TokenRecord

Pairs = list[tuple[NDArray[np.int64], NDArray[np.int64]]]
"""Of each sequence what is read, and what is in the loss after it."""
VOCAB_SIZE, NUM_IDS = 512, 250  # the tiny model has fewer ids
CPU_CONFIG: Mapping[str, Any] = {"device": "cpu", "dtype": "float32", "learning_rate": 1e-6}


def groups(num_prompts: int, size: int, prompt: int, shortest: int, longest: int) -> Pairs:
    """Return `size` answers of random lengths to each prompt."""
    rng = np.random.default_rng(0)
    pairs: Pairs = []
    for _ in range(num_prompts):
        asked = tokens(rng, prompt)
        pairs += [(asked, tokens(rng, int(rng.integers(shortest, longest + 1)))) for _ in range(size)]
    return pairs


def stripped(num_turns: int, asked: int, thought: int, answered: int) -> Pairs:
    """Return a conversation whose template leaves the thinking of earlier turns out: a branch for each turn."""
    rng = np.random.default_rng(0)
    pairs: Pairs = []
    history = tokens(rng, asked)
    for _ in range(num_turns):
        answer = tokens(rng, answered)
        pairs.append((history, np.concatenate([tokens(rng, thought), answer])))
        history = np.concatenate([history, answer, tokens(rng, asked)])
    return pairs


def tokens(rng: np.random.Generator, number: int) -> NDArray[np.int64]:
    return rng.integers(2, NUM_IDS, number)


def random_model(folder: Path, hidden_size: int, num_layers: int) -> Path:
    """Save a Qwen3 of random weights with heads of 64."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 128,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def compare(model: Path | None, rounds: int) -> None:
    """Print the table. `model` is the folder of the real model; None leaves it out."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shapes = {512: 2, 1024: 1, 256: 2}  # hidden sizes and layers
        h512, h1024, h256 = (random_model(folder / str(size), size, layers) for size, layers in shapes.items())
        tiny = folder / "tiny"
        build(tiny, seed=0, is_untrained=True)
        mixtures: dict[str, tuple[Path, Pairs, int]] = {
            "quickstart: 16 x 8, 40 + 4 to 12 tokens": (tiny, groups(16, 8, 40, 4, 12), rounds),
            "16 answers, 2k + 1k tokens, hidden 512": (h512, groups(1, 16, 2000, 1000, 1000), 0),
            "the same, hidden 1024, one layer": (h1024, groups(1, 16, 2000, 1000, 1000), 0),
            "128 turns without earlier thinking, hidden 256": (h256, stripped(128, 8, 30, 12), 0),
            "nothing shared: 128 x 60 tokens, hidden 512": (h512, groups(128, 1, 40, 20, 20), rounds),
        }
        if model is not None:
            real = {"the real model: 8 x 8, 45 + 4 to 16 tokens": (model, groups(8, 8, 45, 4, 16), rounds)}
            mixtures = real | mixtures
        print("\n| mixture | positions, flat | tree | cut twice | operations saved | time saved | ratio |")
        print("|---|---|---|---|---|---|---|")
        for title, (weights, pairs, number) in mixtures.items():
            print(f"| {title} | {row(weights, pairs, number)} |", flush=True)


def row(model: Path, pairs: Pairs, rounds: int) -> str:
    records = [record_of(index, *pair, float(index % 2)) for index, pair in enumerate(pairs)]
    flat, shared = (step_of(model, packing, records) for packing in ("balanced", "tree"))
    taken: dict[str, list[float]] = {"flat": [], "tree": []}
    metrics: dict[str, float] = {}  # of the tree
    for number in range(rounds + 1):
        for name, step in (("flat", flat), ("tree", shared)):
            metrics = step(number + 1)
            taken[name].append(metrics["cpu_s"])
    taken = {name: times[1:] or times for name, times in taken.items()}  # the first round warms up, where it is short
    before, after = (operations(ModelShape.read(model), pairs, is_tree=one) for one in (False, True))
    saved = 1 - after / before, 1 - median(taken["tree"]) / median(taken["flat"])
    positions = metrics["num_input_tokens"], metrics["num_input_tokens"] - metrics["shared_positions"]
    repeated = metrics["repeated_positions"] / positions[1]
    ratio = f"{saved[1] / saved[0]:.2f}" if saved[0] > 0.01 else "-"
    return f"{positions[0]:.0f} | {positions[1]:.0f} | {repeated:.1%} | {saved[0]:.1%} | {saved[1]:.1%} | {ratio}"


def step_of(model: Path, packing: str, records: list[TokenRecord]) -> Callable[[int], dict[str, float]]:
    """Return what trains one step in a trainer of its own, and its metrics with the step's CPU-seconds."""
    config = TrainerConfig.model_validate({**CPU_CONFIG, "packing": packing, "tokens_per_micro_batch": 32768})
    algorithm = AlgorithmConfig(proximal="behavior")  # `recompute` would need one more forward pass
    fields = {"model": model, "trainer": config, "algorithm": algorithm, "seed": 0, "shared_memory": model}
    trainer = Trainer(TrainerSetup.model_validate({**fields, "publishes": False}))
    rewards = {one.session_id: float(one.turn_rewards[0]) for one in records}

    def step(number: int) -> dict[str, float]:
        started_s = time.process_time()
        report = trainer.train_step(StepInput(step=number, records=records, rewards=rewards))
        return {**report.metrics, "cpu_s": time.process_time() - started_s}

    return step


def operations(shape: ModelShape, pairs: Pairs, *, is_tree: bool) -> float:
    """Return the floating-point operations of one forward and backward pass."""
    sequences = [torch.from_numpy(np.concatenate(pair)[:-1]) for pair in pairs]
    if is_tree:
        depths = Tree.of(sequences).depths.numpy()
    else:
        depths = np.concatenate([np.arange(len(one)) for one in sequences])
    head = shape.vocab_size * shape.hidden_size
    layers = shape.num_parameters - (2 - shape.is_tied) * head
    seen = float((depths + 1).sum()) * shape.num_layers * shape.query_size
    return 6.0 * layers * len(depths) + 6.0 * head * sum(len(loss) for _, loss in pairs) + 12.0 * seen
