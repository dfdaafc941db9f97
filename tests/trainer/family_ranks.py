"""Two ranks that load models of every family: `python -m tests.trainer.family_ranks FOLDER TYPE...`.

Then they share out random forests. They are forked, for what such a test costs is importing torch. Rank 0 writes what
differs from one rank, a line each.
"""

import os
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from areal_agent.algorithms.batching import Sample, collate
from areal_agent.algorithms.packing import deal, siblings
from areal_agent.algorithms.trees import in_order
from areal_agent.trainer.model import Policy
from areal_agent.trainer.ranks import ALONE, Group, Precision, whole
from tests.trainer.families import EXACT, PADDED, make
from tests.trainer.lab import CPU
from tests.trainer.test_families import SAMPLES

NUM_RANKS = 2


def computed(folder: Path, *, is_padded: bool, group: Group) -> tuple[Policy, dict[str, torch.Tensor]]:
    """A policy, and by name the log-probabilities of the samples and their gradients."""
    policy = Policy.load(folder, CPU, is_padded=is_padded, group=group)
    policy.shard(group)
    logprobs, _ = policy.logprobs_and_entropy(collate(SAMPLES, CPU, is_padded=is_padded))
    (logprobs.sum() / group.size).backward()
    gradients = {name: whole(one.grad) for name, one in policy.named_parameters().items() if one.grad is not None}
    return policy, {"logprobs": logprobs.detach(), **gradients}


def differences(folder: Path, model_type: str, group: Group) -> Iterator[str]:
    files = folder / model_type
    is_padded = model_type in PADDED
    policy, found = computed(files, is_padded=is_padded, group=group)
    alone, expected = computed(files, is_padded=is_padded, group=ALONE)
    saved, published = load_file(files / "model.safetensors"), dict(policy.whole_parameters())
    if group.rank:
        return
    if policy.published() != alone.published() or list(published) != [one.name for one in policy.published()]:
        yield f"{model_type}: the layout"
    if published.keys() != saved.keys():
        yield f"{model_type}: published are {sorted(published.keys() ^ saved.keys())}"
    for name in published.keys() & saved.keys():
        if not torch.equal(published[name], saved[name]):
            yield f"{model_type}: {name}"
    if found.keys() != expected.keys():
        yield f"{model_type}: gradients of {sorted(found.keys() ^ expected.keys())}"
    for name in found.keys() & expected.keys():
        if not torch.allclose(found[name], expected[name], atol=1e-4, rtol=1e-4):
            yield f"{model_type}: {name} by {float((found[name] - expected[name]).abs().max()):.2g}"


class Exact(Precision):
    """Float64 throughout, also where gradients are added up."""

    def policies(self) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
        return MixedPrecisionPolicy(), MixedPrecisionPolicy()


def forest(seed: int) -> list[Sample]:
    """Draw sequences over three tokens, at any temperature and weight."""
    draw = random.Random(seed)
    made: list[Sample] = []
    for _ in range(draw.randint(2, 9)):
        length = draw.randint(1, 9)
        ones = torch.ones(length, dtype=torch.float64)
        sample = replace(SAMPLES[0], predicting=torch.arange(length), behavior=-ones, versions=ones.int())
        ids, targets = (torch.tensor([draw.randint(3, 5) for _ in ones]) for _ in range(2))
        of_tokens = {"inputs": ids, "targets": targets, "temperatures": ones * draw.uniform(0.5, 2.0)}
        made.append(replace(sample, **of_tokens, incarnations=ones.int(), weight=draw.uniform(-1, 1)))
    return made


def gradient(policy: Policy, batches: list[list[Sample]], *, is_tree: bool) -> Tensor:
    """Return the gradient of sum of weight * (logp + 0.3 entropy), of all ranks."""
    policy.model.zero_grad()
    for samples in batches:
        batch = collate(samples, CPU, is_tree=is_tree)
        logprobs, entropy = policy.logprobs_and_entropy(batch)
        (batch.weights * (logprobs + 0.3 * entropy)).sum().backward()
    return torch.cat([whole(one.grad).flatten() for one in policy.named_parameters().values() if one.grad is not None])


def forests(group: Group) -> Iterator[str]:
    alone, policy = (Policy(make("gpt2", EXACT).double(), CPU) for _ in range(2))
    policy.shard(group, Exact())
    for seed in range(20):
        drawn = forest(seed)
        order, overlaps = in_order([one.inputs for one in drawn])
        samples = [drawn[index] for index in order]
        lengths = [one.num_tokens for one in samples]
        shares = deal(siblings(lengths, overlaps, 12), lengths, group.size, overlaps)
        mine = [[samples[index] for index in part] or [drawn[0].emptied()] for part in shares[group.rank]]
        found = gradient(policy, mine, is_tree=True)
        expected = gradient(alone, [[one] for one in drawn], is_tree=False)
        if not torch.allclose(found, expected, atol=1e-9, rtol=1e-9):
            yield f"forest {seed} by {float((found - expected).abs().max()):.2g}"


def main(rank: int, folder: Path, model_types: list[str]) -> None:
    torch.set_num_threads(1)
    group = Group.join(rank, NUM_RANKS, dist.FileStore(str(folder / "rendezvous"), NUM_RANKS), CPU)
    lines = [line for model_type in model_types for line in differences(folder, model_type, group)]
    lines += forests(group)
    if rank == 0:
        (folder / "differences").write_text("\n".join(lines))
    group.leave()


if __name__ == "__main__":
    for number in range(NUM_RANKS):
        if os.fork() == 0:
            main(number, Path(sys.argv[1]), sys.argv[2:])
            os._exit(0)
    sys.exit(any(os.wait()[1] for _ in range(NUM_RANKS)))
