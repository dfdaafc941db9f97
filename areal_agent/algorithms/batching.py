"""From records to the tensors that a model is run on, and from hidden states to log-probabilities.

A `Sample` is what the loss needs of one record. `collate` joins samples into a `MicroBatch`. Packed, the sequences are
concatenated in a single row; each starts at position 0, and attention stays within `segments`. Padded, each has its own
row, filled up on the right, where a causal model never looks. In a tree (trees.py), one row too, prefixes that they
share are there once. Either way no sequence sees another, and the loss tokens are the same.
Shapes: R rows of T tokens, S samples, M loss tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from areal_agent.algorithms.trees import Tree
from areal_agent.types import PromptImage, TokenRecord

CHUNK_BYTES = 2**27
"""The size of the logits that exist at once, and of their gradient, however large the batch and the vocabulary."""
BLOCK_ON_CPU, BLOCK_ON_GPU = 2**18, 2**23
"""The number of logits of which float32 copies exist at once."""
Head = Callable[[Tensor], Tensor]
"""The output layer of a model: hidden states [M, H] -> logits [M, V]."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """One record as the loss sees it. Loss token m is predicted at input position `predicting[m]`.

    A record of tokens `a b C D e`, of which C and D were sampled, has the inputs `a b C`, predicts at 1 and 2, and
    drops what follows its last loss token. A train step fills in the fields that have defaults, as far as the algorithm
    needs them.
    """

    rollout: str  # the session that the record is a branch of
    branch: int = 0  # of that session
    inputs: Tensor  # [T] int64
    predicting: Tensor  # [M] int64, in 0..T-1
    targets: Tensor  # [M] int64
    temperatures: Tensor  # [M] float32
    behavior: Tensor  # [M] float32, the engine's log-probabilities
    versions: Tensor  # [M] int32, WeightVersion.step
    incarnations: Tensor  # [M] int32, WeightVersion.incarnation
    images: tuple[PromptImage, ...] = ()  # among the inputs
    advantages: Tensor | None = None  # [M] float32
    weight: float = 0.0  # of each of its loss tokens in the loss of the optimiser update
    proximal: Tensor | None = None  # [M] float32, log-probabilities at the start of the step
    reference: Tensor | None = None  # [M] float32, the reference model's log-probabilities
    values: Tensor | None = None  # [M] float32, the critic's values at the start of the step
    returns: Tensor | None = None  # [M] float32, the critic's targets

    @property
    def num_tokens(self) -> int:
        """The number of input tokens, which determines the cost."""
        return len(self.inputs)

    @property
    def num_loss_tokens(self) -> int:
        return len(self.targets)

    def emptied(self) -> Self:
        """Return a sample with one input token, no loss token and the same fields set. It trains nothing."""
        of_tokens = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in OF_SAMPLES}
        nothing = {name: value[:0] for name, value in of_tokens.items() if value is not None}
        return replace(self, **(nothing | {"inputs": torch.zeros(1, dtype=torch.long)}))


OF_SAMPLES = ("rollout", "branch", "weight")
"""The fields that are not of tokens."""
JOINED = [one.name for one in fields(Sample) if one.name not in (*OF_SAMPLES, "inputs", "predicting", "images")]
"""The fields that a micro-batch concatenates as they are."""


NO_IMAGES: Mapping[str, bytes] = {}


def sample_of(record: TokenRecord, images: Mapping[str, bytes] = NO_IMAGES) -> Sample:
    """Extract from a record what the loss needs. `images` has the files of its images by their digests.

    Raises ValueError for a record that cannot be trained: its first token or one of an image is in the loss, a loss
    token has no finite log-probability or no positive temperature, or the file of an image is missing.
    """
    _check(record)
    if missing := [one.digest for one in record.images if one.digest not in images]:
        raise ValueError(f"{_where(record)}: the file of image {missing[0]} did not come with it")
    positions = torch.from_numpy(record.loss_mask).nonzero().squeeze(1)  # [M]
    tokens = torch.from_numpy(record.token_ids).long()
    num_inputs = int(positions[-1]) if len(positions) else 0
    return Sample(
        rollout=record.session_id,
        branch=record.branch,
        inputs=tokens[:num_inputs],
        images=tuple(PromptImage(span=one, data=images[one.digest]) for one in record.images if one.end <= num_inputs),
        predicting=positions - 1,
        targets=tokens[positions],
        temperatures=torch.from_numpy(record.temperatures)[positions],
        behavior=torch.from_numpy(record.behavior_logprobs)[positions],
        versions=torch.from_numpy(record.versions)[positions],
        incarnations=torch.from_numpy(record.incarnations)[positions],
    )


def _where(record: TokenRecord) -> str:
    return f"branch {record.branch} of session {record.session_id!r}"


def _check(record: TokenRecord) -> None:
    where = _where(record)
    mask = record.loss_mask
    if mask[:1].any():
        raise ValueError(
            f"{where}: its first token is in the loss, but nothing predicts it; a prompt has to come first"
        )
    if any(mask[one.start : one.end].any() for one in record.images):
        raise ValueError(f"{where}: a token of an image is in the loss, and nobody samples those; mask it")
    logprobs = torch.from_numpy(record.behavior_logprobs[mask])
    if not bool(logprobs.isfinite().all()):
        raise ValueError(f"{where}: a loss token has no finite behaviour log-probability; mask it")
    temperatures = torch.from_numpy(record.temperatures[mask])
    if not bool((temperatures > 0).all()):
        raise ValueError(f"{where}: a loss token has temperature {float(temperatures.min())}; mask greedy tokens")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """Samples that go through the model together. Their M loss tokens are concatenated in order.

    A field is None if the samples do not have it. Packed, `a b c` and `d e` are the row `a b c d e` with the positions
    `0 1 2 0 1` and the segments `(3, 2)`.
    """

    inputs: Tensor  # [R, T] int64
    positions: Tensor  # [R, T] int64, of each token in its own sequence
    segments: tuple[int, ...] | None  # lengths of the sequences in the one row; None: another layout
    tree: Tree | None  # the one row in which prefixes are shared; without it and segments: a row each, padded
    num_input_tokens: int  # of samples with loss tokens; without padding
    num_shared_tokens: int  # those that need no position of their own
    num_pairs: int  # of a token and one that it sees, in plain causal attention
    predicting: Tensor  # [M] int64, positions in the flattened inputs
    sequences: Tensor  # [M] int64, in 0..S-1: the sample of each loss token
    targets: Tensor  # [M]
    temperatures: Tensor  # [M]
    behavior: Tensor  # [M]
    versions: Tensor  # [M]
    incarnations: Tensor  # [M]
    weights: Tensor  # [M] float32
    advantages: Tensor | None  # [M]
    proximal: Tensor | None  # [M]
    reference: Tensor | None  # [M]
    values: Tensor | None  # [M]
    returns: Tensor | None  # [M]
    images: tuple[tuple[PromptImage, ...], ...] = ()  # those of each row; () if there are none

    @property
    def num_loss_tokens(self) -> int:
        return len(self.targets)


def collate(
    samples: Sequence[Sample], device: torch.device, *, is_padded: bool = False, is_tree: bool = False
) -> MicroBatch:
    """Put samples in one row, in a row each, or in a tree, and concatenate their loss tokens, on `device`."""
    lengths = [one.num_tokens for one in samples]
    num_pairs = sum(length * (length + 1) // 2 for length in lengths)
    tree = segments = None
    images = tuple(one.images for one in samples)
    assert is_padded or not any(images), "sequences with images have a row each"
    positions = [torch.arange(length) for length in lengths]
    if is_padded:
        inputs, depths = (pad_sequence(one, batch_first=True) for one in ([one.inputs for one in samples], positions))
        places = [row * inputs.shape[1] + one for row, one in enumerate(positions)]
    elif is_tree:
        tree = Tree.of([one.inputs for one in samples])
        num_pairs = len(tree.depths) + int(tree.depths.sum())
        tree = tree.to(device)
        inputs, depths, places = tree.inputs[None], tree.depths[None], tree.places
    else:
        segments = tuple(lengths)
        inputs, depths = torch.cat([one.inputs for one in samples])[None], torch.cat(positions)[None]
        places = torch.arange(sum(lengths)).split(lengths)
    counts = torch.tensor([one.num_loss_tokens for one in samples])
    weights = torch.tensor([one.weight for one in samples])
    return MicroBatch(
        inputs=inputs.to(device),
        positions=depths.to(device),
        segments=segments,
        tree=tree,
        num_input_tokens=sum(one.num_tokens for one in samples if one.num_loss_tokens),
        num_shared_tokens=0 if tree is None else sum(lengths) - len(tree.inputs),
        num_pairs=num_pairs,
        predicting=torch.cat([place[one.predicting] for place, one in zip(places, samples, strict=True)]).to(device),
        sequences=torch.arange(len(samples)).repeat_interleave(counts).to(device),
        weights=weights.repeat_interleave(counts).to(device),
        **{name: _joined(samples, name, device) for name in JOINED},
        images=images if any(images) else (),
    )


def _joined(samples: Sequence[Sample], field: str, device: torch.device) -> Any:
    """Concatenate one field, which either all samples have or none."""
    parts: list[Tensor | None] = [getattr(one, field) for one in samples]
    present = [part for part in parts if part is not None]
    assert len(present) in (0, len(parts)), f"{len(present)} of {len(parts)} samples have {field}"
    return torch.cat(present).to(device) if present else None


def logprobs_and_entropy(
    hidden: Tensor, targets: Tensor, temperatures: Tensor, head: Head, *, vocab_size: int, chunk_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """The log-probability of each target and the entropy of its distribution, both in nats and differentiable.

    logp_i = log softmax(head(h_i) / temperature_i)[target_i];  H_i = -sum_v p_iv log p_iv.
    `hidden` holds the states at the *predicting* positions (one before each target), so nothing is computed for tokens
    outside the loss. With more than one chunk of `chunk_size` positions, logits are recomputed in the backward pass,
    which changes memory, not values. They stay in the type in which the head computes them; all else is in float32.
    Shapes: hidden [M, H], targets [M], temperatures [M] -> [M], [M].
    """
    num_tokens = len(targets)
    assert hidden.ndim == 2 and len(hidden) == num_tokens, (hidden.shape, targets.shape)
    assert targets.shape == temperatures.shape == (num_tokens,), (targets.shape, temperatures.shape)
    size = chunk_size or max(1, CHUNK_BYTES // (vocab_size * hidden.element_size()))
    measure = _one_chunk if num_tokens <= size or not torch.is_grad_enabled() else _recomputed
    chunks = [
        measure(hidden[i : i + size], targets[i : i + size], temperatures[i : i + size], head)
        for i in range(0, max(num_tokens, 1), size)
    ]
    return torch.cat([logprobs for logprobs, _ in chunks]), torch.cat([entropy for _, entropy in chunks])


def _one_chunk(hidden: Tensor, targets: Tensor, temperatures: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    measured: Any = _OfLogits.apply(head(hidden), targets, temperatures, [])
    return measured


def _recomputed(hidden: Tensor, targets: Tensor, temperatures: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    known: list[tuple[Tensor, Tensor]] = []  # the second time

    def measure(hidden: Tensor) -> Any:
        return _OfLogits.apply(head(hidden), targets, temperatures, known)

    measured: Any = checkpoint(measure, hidden, use_reentrant=False, preserve_rng_state=False)
    return measured


class _OfLogits(torch.autograd.Function):
    """Log-probability and entropy from logits [M, V], of which nothing else is kept, and the gradient in closed form.

    With z the logits over the temperature T:  dlogp / dlogits = (1[v = target] - p_v) / T
                                               dH / dlogits = -p_v (log p_v + H) / T
    `known` has the results where they are known; else they are put there. Float32 is of a block of rows at a time.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperatures: Tensor, known: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        if not known:
            dtype = torch.promote_types(logits.dtype, torch.float32)
            logprobs, entropy = (logits.new_empty(len(logits), dtype=dtype) for _ in range(2))
            for rows in _blocks(logits):
                log_p = torch.log_softmax(logits[rows] / temperatures[rows, None], dim=-1)
                logprobs[rows] = log_p.gather(1, targets[rows, None]).squeeze(1)
                entropy[rows] = -log_p.exp().mul_(log_p).sum(dim=-1)
            known.append((logprobs, entropy))
        ctx.save_for_backward(logits, targets, temperatures, *known[0])
        ctx.set_materialize_grads(False)
        return known[0][0].detach(), known[0][1].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        of_logprobs, of_entropy = gradients
        logits, targets, temperatures, logprobs, entropy = ctx.saved_tensors
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(logprobs)
        of_logits = torch.empty_like(logits)
        for rows in _blocks(logits):
            target, temperature = targets[rows, None], temperatures[rows, None]
            toward = of_logprobs[rows, None] / temperature
            log_p = logits[rows] / temperature
            log_p.sub_(log_p.gather(1, target) - logprobs[rows, None])
            if of_entropy is None:
                block = log_p.exp_().mul_(-toward)
            else:
                p = log_p.exp()
                block = log_p.add_(entropy[rows, None]).mul_(-of_entropy[rows, None] / temperature)
                block.sub_(toward).mul_(p)
            of_logits[rows] = block.scatter_add_(1, target, toward)
        return of_logits, None, None, None


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Yield rows whose float32 fits a CPU's cache, or is enough for a GPU."""
    size = max(1, (BLOCK_ON_GPU if logits.is_cuda else BLOCK_ON_CPU) // logits.shape[1])
    return (slice(start, start + size) for start in range(0, len(logits), size))
