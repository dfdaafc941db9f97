"""The forward pass of a train step, and the proof that it computes what the model's own forward pass does.

    micro-batch ─▶ decoder ─▶ last hidden states [M, H] ─▶ tail, in chunks ─▶ log-probabilities and entropy [M]

Decoder and tail are transformers' own code. The tail is what a model does after its decoder: the output layer, and a
scale or a soft cap of the logits; to save memory it is computed chunk by chunk, and again in the backward pass.

`choose_attention` compares the logits of a batch of three sequences with those of each sequence alone, under the
model's own attention. So no list of families is needed: one that passes state from token to token in another way
(convolutions, linear attention), or whose attention does not use transformers' interface, is found by its logits.
A kernel that attends within all sequences at once has to give the same in bfloat16, as far as that tells.
"""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from areal_agent.algorithms.batching import Head, MicroBatch, Sample, collate, logprobs_and_entropy
from areal_agent.engine.embedded.packed import Kernel
from areal_agent.errors import ConfigError
from areal_agent.trainer.attention import ATTENTION_NAME, OneCall, Row, use_segment_attention
from areal_agent.trainer.context import Context
from areal_agent.trainer.tree_attention import TreeCall
from areal_agent.trainer.vision import Vision
from areal_agent.types import PromptImage

logger = logging.getLogger(__name__)


class LossTokenForward(nn.Module):
    """The forward pass as one module, because FSDP2 gathers parameters per module."""

    def __init__(self, model: PreTrainedModel, kernel: Kernel | None = None, vision: Vision | None = None) -> None:
        super().__init__()
        self._vision = vision
        self.model = model
        self._kernel = kernel
        self._vocab_size = vocab_size(model)
        self.context: Context | None = None

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        own = batch if self.context is None else self.context.part(batch)
        hidden = hidden_states(decoder_of(self.model), own, self._kernel, self.context, self._vision)  # [M, H]
        found = logprobs_and_entropy(
            hidden, own.targets, own.temperatures, tail_of(self.model), vocab_size=self._vocab_size
        )
        if self.context is None:
            return found
        return self.context.gather(found[0], batch), self.context.gather(found[1], batch)


def vocab_size(model: PreTrainedModel) -> int:
    """Return the number of logits of each token."""
    return int(model.config.get_text_config().vocab_size)


def hidden_states(
    decoder: nn.Module,
    batch: MicroBatch,
    kernel: Kernel | None = None,
    context: Context | None = None,
    vision: Vision | None = None,
) -> Tensor:
    """Return the last hidden states that loss tokens are predicted from, [M, H].

    With `kernel`, plain causal attention within the sequences of one row is one call. With `context`, `batch` is
    this rank's part of one. Images need `vision`: raises ValueError without.
    """
    if batch.images and vision is None:
        raise ValueError(
            "a sequence has images, and the model was loaded as one of text; docs/models.md has what sees them"
        )
    packed: dict[str, Any] = {}
    if batch.segments is not None:
        one_call = OneCall.of(kernel, batch.segments, batch.inputs.device) if kernel else None
        row = Row(segments=batch.segments, one_call=one_call, context=context)
        packed = {"position_ids": batch.positions, "row": row}
    elif batch.tree is not None:
        one_call = TreeCall.of(batch.tree) if kernel else None
        packed = {"position_ids": batch.positions, "row": Row(tree=batch.tree, one_call=one_call)}
    with nullcontext(packed) if vision is None or not batch.images else vision.shown(decoder, batch) as more:
        states = decoder(input_ids=batch.inputs, use_cache=False, **more).last_hidden_state  # [R, T, H]
    return states.flatten(0, 1)[batch.predicting]


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return everything below the output layer: the part that holds the input embeddings."""
    return model.get_submodule(_decoder_name(model))


def _decoder_name(model: PreTrainedModel) -> str:
    embeddings = model.get_input_embeddings()
    parts = model.named_children()
    return next((name for name, part in parts if embeddings in part.modules()), model.base_model_prefix)


def decoder_layers(decoder: nn.Module) -> list[nn.Module]:
    """Return the layers of a decoder, each of which is gathered and released as a unit."""
    text = decoder.get_decoder() if isinstance(decoder, PreTrainedModel) else decoder  # of a model with images, too
    return [layer for one in text.children() if isinstance(one, nn.ModuleList) for layer in one]


def tail_of(model: PreTrainedModel) -> Head:
    """Return what the model's own forward pass does with last hidden states, [M, H] -> [M, V].

    It is the model with a decoder that hands on what it is given; all else is shared.
    """
    tail, name = copy.copy(model), _decoder_name(model)
    vars(tail)["_modules"] = {**vars(model)["_modules"], name: _HandsOn(model.get_submodule(name))}
    return lambda hidden: tail(inputs_embeds=hidden[None], use_cache=False).logits[0]


class _HandsOn(nn.Module):
    """Has all else that a tail asks of its decoder: Falcon-H1 keeps the factor of its logits there."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        vars(self)["_decoder"] = decoder  # and not as a part

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_decoder"], name)

    def forward(self, *_: Any, inputs_embeds: Tensor, **more: Any) -> "_LastStates":
        return _LastStates(last_hidden_state=cast(Any, inputs_embeds))


class _LastStates(BaseModelOutput):
    """Has None for what decoders of some kind return besides: routers' logits, caches, states of images."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


# ------------------------------------------------------------------------------------------------- the proof

LENGTHS = (9, 160, 40)
"""Of the sequences of the proof. The second one crosses a window of 128 tokens (gpt-oss)."""

TOLERANCE = 1e-3
"""The largest difference of two logits in float32 that is rounding, as a fraction of the logits' standard deviation."""
NEARLY_ALL = 0.95
FLIPPED = 0.05
"""With experts a few tokens may differ so much: rounding may make a router choose another of two that score alike."""

AS_NEAR = 2.0
"""Two ways of rounding to bfloat16 have errors of one size; what sees another sequence is off by far more."""

PACKED_WAYS = (ATTENTION_NAME,)
OWN_WAYS = ("sdpa", "eager")
"""transformers' own attention, by preference: a vision tower's, where all patches of an image see each other, too."""
PADDED_WAYS = (ATTENTION_NAME, *OWN_WAYS)
"""Attention for rows that hold one sequence each, by preference."""


def choose_attention(
    model: PreTrainedModel, *, is_padded: bool, kernel: Kernel | None = None, vision: Vision | None = None
) -> Kernel | None:
    """Give the model an attention with which a micro-batch gets the model's own logits. Raises ConfigError.

    Returns `kernel` if packed rows get them with it too, else None. With `vision`, two of the sequences have images.
    """
    rows = _rows(_probe(vocab_size(model), model.device), vision)
    try:
        plain = [_plain_logits(model, row, vision) for row in rows]
    except Exception as error:  # a boundary: models of any kind
        raise ConfigError(f"{_type(model)} cannot be trained: its forward pass fails: {_line(error)}") from error
    found: list[str] = []
    padded_ways = PADDED_WAYS if vision is None else OWN_WAYS
    for way in padded_ways if is_padded else PACKED_WAYS:
        difference = _difference(model, rows, plain, way, vision=vision, is_padded=is_padded)
        if difference is None:
            return None if is_padded or kernel is None else _proved(model, rows, plain, kernel)
        found.append(difference)
    rows_used = "each in a row of its own" if is_padded else "in one row"
    can_be_padded = any(
        _difference(model, rows, plain, way, vision=vision, is_padded=True) is None for way in padded_ways
    )
    remedy = "set trainer.packing to 'padded'" if can_be_padded else "use a causal language model of another type"
    raise ConfigError(
        f"{_type(model)} cannot be trained on sequences {rows_used}: the logits of each have to be those that it gets "
        f"alone, but {found[0]}; {remedy}"
    )


def tree_fault(model: PreTrainedModel, kernel: Kernel | None) -> str | None:
    """Say how logits in a tree of sequences that share prefixes differ from the model's own; None if they do not.

    `model` has, and keeps, the attention that `choose_attention` gave it in packed rows; it returned `kernel`.
    """
    short, long, other = _probe(vocab_size(model), model.device)
    half = len(long) // 2
    rows = _rows([other, long[:2], torch.cat([long[:half], short]), long, torch.cat([long[: half - 1], other])])
    fault = _difference(model, rows, [_plain_logits(model, row) for row in rows], kernel=kernel, is_tree=True)
    use_segment_attention(model)
    return fault


def _proved(model: PreTrainedModel, rows: Sequence[Sample], plain: Sequence[Tensor], kernel: Kernel) -> Kernel | None:
    """Return `kernel` if its logits are as near to `plain`, which are in float32, as those of the loop over sequences.

    Both are computed in bfloat16, and compared by the mean distance within each sequence.
    """
    batch = collate(rows, model.device)

    def distances(of_kernel: Kernel | None) -> list[float]:
        with torch.no_grad(), torch.autocast(model.device.type, dtype=torch.bfloat16):
            logits = tail_of(model)(hidden_states(decoder_of(model), batch, of_kernel)).float()
        return [float((one - ours).abs().mean()) for one, ours in zip(plain, logits.split(LENGTHS), strict=True)]

    loop = distances(None)
    try:
        once = distances(kernel)
    except Exception as error:  # a boundary: kernels refuse some GPUs and sizes
        logger.warning("attention runs sequence by sequence, since one call for all of them fails: %s", _line(error))
        return None
    if all(ours <= AS_NEAR * theirs for ours, theirs in zip(once, loop, strict=True)):  # false for NaN
        return kernel
    logger.warning(
        "attention runs sequence by sequence, since with one call for all of them logits differ from those in float32 "
        "by %s on average in each sequence of a trial, and without by %s",
        *(", ".join(f"{one:.2g}" for one in found) for found in (once, loop)),
    )
    return None


@torch.no_grad()
def _plain_logits(model: PreTrainedModel, row: Sample, vision: Vision | None = None) -> Tensor:
    """Return the logits of one sequence alone, [T, V]."""
    model.set_attn_implementation("eager")  # what a model defines itself by: others leave out soft caps and sinks
    images = {} if vision is None else vision.plainly(row.images, row.num_tokens, model.device)
    return model(input_ids=row.inputs[None].to(model.device), use_cache=False, **images).logits[0]


def _observe(model: PreTrainedModel, compute: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Return what the parts of the layers return in a forward pass, in their order, by name and class."""
    names = {id(module): f"{name} ({type(module).__name__})" for name, module in model.named_modules()}
    outputs: dict[str, Tensor] = {}

    def note(module: nn.Module, _: Any, output: Any) -> None:
        value = output[0] if isinstance(output, tuple) else output
        if isinstance(value, Tensor):
            outputs[names[id(module)]] = value

    parts = [part for layer in decoder_layers(decoder_of(model)) for part in (*layer.children(), layer)]
    hooks = [part.register_forward_hook(note) for part in parts]
    try:
        compute()
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def _difference(
    model: PreTrainedModel,
    rows: Sequence[Sample],
    plain: Sequence[Tensor],
    attention: str = ATTENTION_NAME,
    *,
    kernel: Kernel | None = None,
    vision: Vision | None = None,
    **layout: bool,
) -> str | None:
    """Say how the logits of one batch of all rows differ from `plain`, those of each alone; None if they do not."""
    batch = collate(rows, model.device, **layout)

    @torch.no_grad()
    def compute() -> Tensor:
        if attention == ATTENTION_NAME:
            use_segment_attention(model)
        else:
            model.set_attn_implementation(attention)
        return tail_of(model)(hidden_states(decoder_of(model), batch, kernel, vision=vision))

    try:
        logits = compute()
    except Exception as error:  # a boundary: models of any kind
        return f"the forward pass of a batch fails: {_line(error)}"
    expected = torch.cat(list(plain))
    distance = (logits - expected).abs().amax(dim=1)  # [M]
    spread = float(expected.std())
    is_same = distance <= TOLERANCE * spread
    has_experts = any(word in name for name, _ in model.named_modules() for word in ("expert", "moe", "router"))
    enough = NEARLY_ALL if has_experts else 1.0
    if int(is_same.sum()) >= enough * len(is_same) and bool((distance <= FLIPPED * spread).all()):
        return None
    alone = [_observe(model, lambda row=row: _plain_logits(model, row, vision)) for row in rows]
    token = int(is_same.long().argmin())
    sequence = int(batch.sequences[token])
    return (
        f"they differ by up to {float(distance.max()):.2g} (their standard deviation is {spread:.2g}), first at token "
        f"{token - sum(row.num_tokens for row in rows[:sequence])} of sequence {sequence}; inside the model, first "
        f"after {_first_to_differ(_observe(model, compute), alone, batch)}"
    )


def _first_to_differ(found: Mapping[str, Tensor], plain: Sequence[Mapping[str, Tensor]], batch: MicroBatch) -> str:
    for name, output in found.items():
        alone = [one[name][0] for one in plain if name in one and len(one[name]) == 1]
        if output.shape[:2] == batch.inputs.shape and len(alone) == len(plain):
            expected = torch.cat(alone)
            ours = output.flatten(0, 1)[batch.predicting]
            if ours.shape == expected.shape and not torch.allclose(
                ours, expected, rtol=TOLERANCE, atol=TOLERANCE * float(expected.std())
            ):
                return name
    return "what follows its layers"


def _probe(num_ids: int, device: torch.device) -> list[Tensor]:
    ids = (17 * torch.arange(sum(LENGTHS)) + 5) % min(num_ids, 251)  # high ids may stand for images
    return list(ids.to(device).split(LENGTHS))


def _rows(rows: Sequence[Tensor], vision: Vision | None = None) -> list[Sample]:
    """Return sequences of which every token predicts. With `vision` one has two images, and another one of them."""
    if vision is None:
        return [_predicting_all(row) for row in rows]
    return [_predicting_all(*vision.illustrated(row, count)) for row, count in zip(rows, (0, 2, 1), strict=True)]


def _predicting_all(row: Tensor, images: tuple[PromptImage, ...] = ()) -> Sample:
    zeros = torch.zeros(len(row))
    return Sample(
        rollout="",
        inputs=row.cpu(),
        images=images,
        predicting=torch.arange(len(row)),
        targets=row.cpu(),
        temperatures=zeros + 1,
        behavior=zeros,
        versions=zeros.int(),
        incarnations=zeros.int(),
    )


def _type(model: PreTrainedModel) -> str:
    return f"a model of type {model.config.model_type!r}"


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
