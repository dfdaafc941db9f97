"""The model: turns token ids into logits.

`ModelRunner` owns the model's weights and KV cache. Use it from one thread, which computes under inference_mode; others
may only set `unneeded` to end the current step.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from areal_agent.dtype import DType, slowness
from areal_agent.engine.embedded.decoder import (
    Decoder,
    PackedPrefillStep,
    Piece,
    ScoringStep,
    decode_step,
    prefill_step,
)
from areal_agent.engine.embedded.fixed_shapes import FixedShapes
from areal_agent.engine.embedded.kv_cache import KVCache, SlotStore, plan_room, whole_positions
from areal_agent.engine.embedded.loading import eos_token_ids, load_model, place_of
from areal_agent.engine.embedded.packed import Kernel, packed_kernel, proved, takes
from areal_agent.engine.embedded.weights import WeightLayout
from areal_agent.errors import EngineRejected

logger = logging.getLogger(__name__)

SCORED = 256
"""Tokens whose logits are computed at once when a sequence is scored: they bound the memory of large vocabularies."""

SEEN_TOKENS = 65_536
"""Tokens of prompts, with those before them, whose keys and values are copied side by side for one call."""


class ModelRunner:
    """The model, its keys and values, and the layout of its weights. Rows are slots 0..n-1 of `kv`."""

    def __init__(
        self,
        model_path: str,
        *,
        device: Literal["auto", "cpu", "cuda"],
        dtype: DType = "auto",
        num_slots: int,
        max_context_tokens: int,
        kv_tokens: int | None = None,
        leave_bytes: int | None = None,
        num_sharing: int = 1,
        fixed_shapes: bool | None = None,
    ) -> None:
        """Load a Hugging Face folder and allocate the KV cache.

        With `fixed_shapes`, by default on a GPU, decode steps have fixed shapes. Raises ConfigError, also when there is
        no room for one context.
        """
        place = place_of(device)
        if slow := slowness("engine.dtype", dtype, is_gpu=place.type == "cuda"):
            logger.warning("%s", slow)
        model = load_model(model_path, place, dtype, max_context_tokens=max_context_tokens)
        self.model_path = model_path
        self.max_context_tokens = max_context_tokens
        self.vocab_size: int = model.config.vocab_size
        self.eos_token_ids = eos_token_ids(model)
        self.device = model.device  # with its index
        self.layout = WeightLayout(model)
        self.unneeded = threading.Event()  # when set, `prefill` and `decode` raise StepGivenUp between two layers
        is_gpu = self.device.type == "cuda"
        if is_gpu:
            torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for each new shape, in 1.3 ms a call
        num_positions = whole_positions(max_context_tokens)
        self._decoder = Decoder(model, max_positions=num_positions)
        self.kernel = self._choose_kernel() if is_gpu else None
        room = plan_room(
            num_slots=num_slots,
            max_context_tokens=max_context_tokens,
            kv_tokens=kv_tokens,
            leave_bytes=leave_bytes,
            num_sharing=num_sharing,
            token_bytes=self._decoder.kv_shape.num_bytes(self._decoder.dtype),
            device=self.device,
        )
        self.num_slots = room.num_slots
        cache = KVCache(
            self._decoder.kv_shape,
            num_slots=room.num_slots,
            num_positions=num_positions,
            device=self.device,
            dtype=self._decoder.dtype,
        )
        self.kv = SlotStore(cache, room, max_context_tokens=max_context_tokens)
        is_fixed = is_gpu if fixed_shapes is None else fixed_shapes
        self.fixed = None
        if is_fixed:
            self.fixed = FixedShapes(
                self._decoder, cache, max_context_tokens=max_context_tokens, vocab_size=self.vocab_size
            )

    def _choose_kernel(self) -> Kernel | None:
        """Return a proved kernel for prefills in one call; None where there is none, in float32 for example."""
        shape, dtype = self._decoder.kv_shape, self._decoder.dtype
        kernel = packed_kernel() if takes(dtype, shape.head_dim) else None
        like = torch.empty(0, dtype=dtype, device=self.device)
        heads = {"num_heads": self._decoder.num_heads, "num_kv_heads": shape.num_kv_heads, "head_size": shape.head_dim}
        return None if kernel is None else proved(kernel, **heads, like=like)

    @torch.inference_mode()
    def prefill(self, pieces: Sequence[Piece]) -> Tensor:
        """Compute keys and values of the pieces; return the logits after the last token of each, `[n, V]`."""
        ids = torch.from_numpy(np.concatenate([piece.ids for piece in pieces])).to(self.device)
        positions = np.concatenate([np.arange(piece.begin, piece.begin + len(piece.ids)) for piece in pieces])
        num_seen = sum(piece.begin + len(piece.ids) for piece in pieces)
        if self.kernel is None or num_seen > SEEN_TOKENS:
            step = prefill_step(self.kv.cache, pieces, in_parts=self.device.type == "cpu")
        else:
            step = PackedPrefillStep.of(self.kv.cache, self.kernel, pieces)
        last = torch.from_numpy(np.cumsum([len(piece.ids) for piece in pieces]) - 1).to(self.device)
        hidden = self._decoder.hidden(ids, torch.from_numpy(positions).to(self.device), step, unneeded=self.unneeded)
        return self._decoder.logits(hidden[last])

    @torch.inference_mode()
    def decode(self, last_ids: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Compute one more token in each of the first n slots, counted by `lengths`; return its logits, `[n, V]`."""
        if self.fixed is not None and self.fixed.takes(lengths):
            return self.fixed.logits(last_ids, lengths, unneeded=self.unneeded)
        step = decode_step(self.kv.cache, lengths)
        ids = torch.tensor(last_ids, device=self.device)
        return self._decoder.logits(self._decoder.hidden(ids, step.positions, step, unneeded=self.unneeded))

    @torch.inference_mode()
    def score(self, ids: Sequence[int], start: int, temperature: float) -> list[float]:
        """Return the log-probability of each token after position `start`, given all before it: `[T - 1 - start]`."""
        tokens = torch.tensor(ids, device=self.device)
        positions = torch.arange(len(tokens), device=self.device)
        hidden = self._decoder.hidden(tokens, positions, ScoringStep(), unneeded=threading.Event())  # runs to its end
        scores: list[float] = []
        for part, targets in zip(hidden[start:-1].split(SCORED), tokens[start + 1 :].split(SCORED), strict=True):
            rows = torch.log_softmax(self._decoder.logits(part) / temperature, dim=-1)  # [n, V]
            scores += rows.gather(1, targets[:, None])[:, 0].tolist()
        return scores

    def swap_in(self, proved: Mapping[str, Tensor]) -> None:
        """Copy new weights, which `layout` has proved, into the model."""
        self.layout.copy(proved)
        self._decoder.pack()

    def release_memory(self) -> None:
        """Free the memory of all keys and values. Nothing can be computed until `resume_memory`."""
        if self.fixed is not None:
            self.fixed.forget()
        self.kv.cache.free()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # otherwise torch would keep it for this process

    def resume_memory(self) -> None:
        """Allocate the memory again. Raises EngineRejected when there is not enough."""
        try:
            self.kv.cache.allocate()
        except (OSError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
            raise EngineRejected(
                f"there is no memory for the keys and values of {self.kv.num_tokens} tokens in the slots of "
                f"{self.num_slots} requests: {str(error)[:200]}; let the trainer free its memory, and resume again"
            ) from error
        if self.fixed is not None:
            self.fixed.record()
