"""The private memory of every rank of a trainer, on a CPU: at load, at a step, at a publish and at an export.

    python benchmarks/trainer/memory.py [--ranks 4] [--layers 12] [--hidden 512] [--json]

A random model in bfloat16 is trained in float32 by ranks that talk over gloo. What is counted are a process's anonymous
pages, which are its own: neither files that it has mapped nor new weights in /dev/shm. A thread looks every 2 ms, and
glibc gives back what is freed at once (it would keep some for later). The table has what each phase added to its
beginning: `load` begins after a model of a few kilobytes has been through all phases, every other where the one before
ended.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging as transformers_logging

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.process import ENDING_WITH_US
from areal_agent.trainer.config import TrainerConfig, TrainerSetup
from areal_agent.trainer.ranks import Group
from areal_agent.trainer.state import write_export
from areal_agent.trainer.trainer import Trainer
from areal_agent.trainer.wire import StepInput
from areal_agent.types import TokenRecord

CPU = torch.device("cpu")
MIB = 2**20
EVERY_S = 0.002
NUM_RECORDS, NUM_TOKENS, VOCAB_SIZE = 16, 32, 2048
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**16), "MALLOC_TRIM_THRESHOLD_": str(2**16)}


def private_bytes() -> int:
    """Return the bytes of this process's anonymous pages."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


class Memory:
    """The peaks of phases, in bytes above the phase's beginning."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self.left: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        before = highest = private_bytes()
        is_over = threading.Event()

        def watch() -> None:
            nonlocal highest
            while not is_over.wait(EVERY_S):
                highest = max(highest, private_bytes())

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            yield
        finally:
            is_over.set()
            watching.join()
        after = private_bytes()
        self.peaks[name], self.left[name] = max(highest, after) - before, after - before


def make_model(folder: Path, *, num_layers: int, hidden_size: int) -> dict[str, int]:
    """Save a model with random weights, and return its sizes in float32: of all, of a layer, of the rest."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    whole, layer = (4 * sum(one.numel() for one in part.parameters()) for part in (model, model.model.layers[0]))
    return {"model": whole, "layer": layer, "rest": whole - num_layers * layer}


def batch(step: int) -> StepInput:
    """Return a step's input of random records in groups of four."""
    rng = np.random.default_rng(step)
    is_sampled = np.arange(NUM_TOKENS) >= NUM_TOKENS // 4
    records = [
        TokenRecord(
            session_id=f"s{number}",
            group_id=f"g{number // 4}",
            branch=0,
            parent_branch=None,
            token_ids=rng.integers(0, VOCAB_SIZE, NUM_TOKENS).astype(np.int32),
            loss_mask=is_sampled,
            turn_index=np.zeros(NUM_TOKENS, dtype=np.int32),
            behavior_logprobs=np.where(is_sampled, -7.0, 0.0).astype(np.float32),
            temperatures=np.ones(NUM_TOKENS, dtype=np.float32),
            versions=np.where(is_sampled, step - 1, -1).astype(np.int32),
            turn_rewards=np.array([number % 2], dtype=np.float32),
        )
        for number in range(NUM_RECORDS)
    ]
    return StepInput(
        step=step, records=records, rewards={one.session_id: float(one.turn_rewards[0]) for one in records}
    )


def run_rank(rank: int, size: int, folder: Path) -> None:
    """Be one rank. Rank 0 writes what all of them measured."""
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    group = Group.join(rank, size, dist.FileStore(str(folder / "rendezvous"), size), CPU)  # pyright: ignore[reportPrivateImportUsage]
    go_through(folder / "small", group, Memory())  # imports, connections and threads
    memory = Memory()
    go_through(folder / "model", group, memory)
    found = {
        name: {phase: [int(row[0]) for row in group.gather([float(one)])] for phase, one in by_phase.items()}
        for name, by_phase in (("peak", memory.peaks), ("left", memory.left))
    }
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    group.leave()


def go_through(model: Path, group: Group, memory: Memory) -> None:
    """Train the model of a folder for two steps, and hand it on in every way."""
    folder = model.with_name(f"of_{model.name}")
    folder.mkdir(exist_ok=True)
    config = TrainerConfig(num_ranks=group.size, tokens_per_micro_batch=2 * NUM_TOKENS)
    setup = TrainerSetup(model=model, trainer=config, algorithm=AlgorithmConfig(), seed=0, shared_memory=folder)
    gc.collect()
    with memory.phase("load"):
        trainer = Trainer(setup, device=CPU, group=group)
    with memory.phase("first step"):
        trainer.train_step(batch(1))
    with memory.phase("step"):
        trainer.train_step(batch(2))
    with memory.phase("publish"):
        trainer.publish()
    with memory.phase("export"):
        write_export(folder, cast(Any, trainer)._policy, model)
    with memory.phase("save"):
        trainer.save(folder / "checkpoints", step=2, incarnation=0)


def measure(size: int, *, num_layers: int, hidden_size: int) -> dict[str, dict[str, list[int]]]:
    """Return bytes: `size` of the model and its parts; by phase and rank what was added at its `peak`, or `left`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "small", num_layers=1, hidden_size=16)
        sizes = make_model(folder / "model", num_layers=num_layers, hidden_size=hidden_size)
        command = [*ENDING_WITH_US, sys.executable, __file__, "--ranks", str(size), "--folder", name, "--rank"]
        ranks = [subprocess.Popen([*command, str(rank)], env={**os.environ, **GIVE_BACK}) for rank in range(size)]
        try:
            codes = [rank.wait() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        assert not any(codes), f"ranks exited with {codes}"
        return {"size": {part: [one] for part, one in sizes.items()}, **json.loads((folder / "found.json").read_text())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--json", action="store_true", help="print all numbers, in bytes")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(arguments.rank, arguments.ranks, arguments.folder)
        return
    started_s = time.monotonic()
    found = measure(arguments.ranks, num_layers=arguments.layers, hidden_size=arguments.hidden)
    if arguments.json:
        print(json.dumps(found))
        return
    sizes = ", ".join(f"{part} {one / MIB:.0f}" for part, (one,) in found["size"].items())
    print(f"MiB in float32: {sizes}; {arguments.ranks} ranks; {time.monotonic() - started_s:.0f} s")
    print("| phase | added at its peak, by rank | left |\n|---|---|---|")
    for phase, peaks in found["peak"].items():
        columns = (", ".join(f"{one / MIB:.0f}" for one in ones) for ones in (peaks, found["left"][phase]))
        print(f"| {phase} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
