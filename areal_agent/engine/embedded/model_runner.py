"""A transformers model as two functions: `prefill` and `decode`, token ids to logits. Owns weights and KV cache.

It knows nothing of requests, sampling or time. Everything runs in the thread that calls it, under inference_mode; other
threads may only say that the step under way is not needed.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from areal_agent.engine.embedded.attention import decode_step, prefill_step
from areal_agent.engine.embedded.decoder import Decoder, Step
from areal_agent.engine.embedded.kv_cache import KVCache, KVShape
from areal_agent.engine.embedded.kv_room import plan_room
from areal_agent.engine.embedded.model_files import eos_token_ids, load_model
from areal_agent.engine.embedded.weights import WeightLayout
from areal_agent.errors import EngineRejected


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Tokens of one sequence whose keys and values are to be computed: positions `[begin, begin + T)` in `slot`."""

    slot: int
    begin: int
    ids: NDArray[np.int32]  # [T]


class ModelRunner:
    """The model, its KV cache and the layout of its weights. Rows are slots 0..n-1."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        model_path: str,
        num_slots: int,
        max_context_tokens: int,
        kv_tokens: int | None = None,
        leave_bytes: int | None = None,
    ) -> None:
        config = model.config
        self.model_path = model_path
        self.max_context_tokens = max_context_tokens
        self.vocab_size: int = config.vocab_size
        self.eos_token_ids = eos_token_ids(model)
        self.device = model.device
        self.layout = WeightLayout.of(model)
        self.unneeded = threading.Event()  # set: `prefill` and `decode` raise StepGivenUp between two layers
        self._decoder = Decoder(model, max_positions=max_context_tokens)
        shape = KVShape(
            num_layers=self._decoder.num_layers,
            num_kv_heads=self._decoder.num_kv_heads,
            head_dim=self._decoder.head_dim,
        )
        room = plan_room(
            num_slots=num_slots,
            max_context_tokens=max_context_tokens,
            kv_tokens=kv_tokens,
            leave_bytes=leave_bytes,
            token_bytes=shape.num_bytes(model.dtype),
            device=model.device,
        )
        self.num_slots = room.num_slots
        self.kv_tokens = room.kv_tokens
        self.reserved_tokens = room.reserved_tokens
        self._like = torch.empty(0, device=model.device, dtype=model.dtype)
        self._cache = KVCache(
            shape, num_slots=room.num_slots, num_positions=max_context_tokens, device=model.device, dtype=model.dtype
        )

    @classmethod
    def load(
        cls,
        model_path: str,
        *,
        device: Literal["auto", "cpu", "cuda"],
        num_slots: int,
        max_context_tokens: int,
        kv_tokens: int | None = None,
        leave_bytes: int | None = None,
    ) -> Self:
        """Load a Hugging Face folder: float32 on a CPU, bfloat16 on a GPU. Raises ConfigError."""
        return cls(
            load_model(model_path, device=device, max_context_tokens=max_context_tokens),
            model_path=model_path,
            num_slots=num_slots,
            max_context_tokens=max_context_tokens,
            kv_tokens=kv_tokens,
            leave_bytes=leave_bytes,
        )

    @torch.inference_mode()
    def prefill(self, pieces: Sequence[Piece]) -> Tensor:
        """Compute keys and values of the pieces; the logits after each one's last token, `[n, V]`."""
        places = [(piece.slot, piece.begin, len(piece.ids)) for piece in pieces]
        step = prefill_step(self._cache, places)
        ids = torch.from_numpy(np.concatenate([piece.ids for piece in pieces])).to(self.device)
        positions = np.concatenate([np.arange(begin, begin + length) for _, begin, length in places])
        hidden = self._hidden(ids, torch.from_numpy(positions).to(self.device), step)
        last = torch.tensor([segment.stop - 1 for segment in step.segments], device=self.device)
        return self._decoder.logits(hidden[last])

    @torch.inference_mode()
    def decode(self, last_ids: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """One more token for each of the first n slots; `lengths` count that token. The logits after it, `[n, V]`."""
        step = decode_step(self._cache, lengths, like=self._like)
        ids = torch.tensor(last_ids, device=self.device)
        return self._decoder.logits(self._hidden(ids, step.positions, step))

    @torch.inference_mode()
    def move(self, source: int, target: int, num_positions: int) -> None:
        """Give the row in slot `source` the slot `target`."""
        self._cache.move(source, target, num_positions)

    @torch.inference_mode()
    def copy_out(self, slot: int, start: int, stop: int) -> Tensor:
        """Keys and values of positions `[start, stop)` of a slot, for `copy_in` into any slot."""
        return self._cache.copy_out(slot, start, stop)

    @torch.inference_mode()
    def copy_in(self, slot: int, parts: Sequence[Tensor]) -> None:
        """Begin a slot with keys and values that were copied out, part after part."""
        self._cache.copy_in(slot, parts)

    @torch.inference_mode()
    def wipe(self) -> None:
        """Leave nothing of all keys and values."""
        self._cache.wipe()

    def release(self, slot: int) -> None:
        """Nothing in this slot is needed any more."""
        self._cache.release(slot)

    def release_memory(self) -> None:
        """Give the memory of all keys and values back. Nothing can be computed until `resume_memory`."""
        self._cache.free()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # torch would keep it for this process

    def resume_memory(self) -> None:
        """Take it again. Raises EngineRejected when it is not there."""
        try:
            self._cache.allocate()
        except (OSError, RuntimeError) as error:  # torch.OutOfMemoryError is the latter
            raise EngineRejected(
                f"there is no memory for the keys and values of {self.num_slots} requests of {self.max_context_tokens} "
                f"tokens: {str(error)[:200]}; let the trainer free its memory, and resume again"
            ) from error

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights that `layout` has proved, in place."""
        self.layout.copy(weights)

    def _hidden(self, ids: Tensor, positions: Tensor, step: Step) -> Tensor:
        return self._decoder.hidden(ids, positions, step, unneeded=self.unneeded)
