"""Two ranks that load models of every family: `python -m tests.trainer.family_ranks FOLDER TYPE...`.

They are forked, for what such a test costs is importing torch. Rank 0 writes what differs from one rank, a line each.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from areal_agent.algorithms.batching import collate
from areal_agent.trainer.model import Policy
from areal_agent.trainer.ranks import ALONE, Group, whole
from tests.trainer.families import PADDED
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


def main(rank: int, folder: Path, model_types: list[str]) -> None:
    torch.set_num_threads(1)
    group = Group.join(rank, NUM_RANKS, dist.FileStore(str(folder / "rendezvous"), NUM_RANKS), CPU)
    lines = [line for model_type in model_types for line in differences(folder, model_type, group)]
    if rank == 0:
        (folder / "differences").write_text("\n".join(lines))
    group.leave()


if __name__ == "__main__":
    for number in range(NUM_RANKS):
        if os.fork() == 0:
            main(number, Path(sys.argv[1]), sys.argv[2:])
            os._exit(0)
    sys.exit(any(os.wait()[1] for _ in range(NUM_RANKS)))
