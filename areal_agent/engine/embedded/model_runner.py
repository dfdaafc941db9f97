"""A transformers model as two functions: `prefill` and `decode`, token ids to logits. Owns weights and KV cache.

It knows nothing of requests, sampling or time. Everything runs in the thread that calls it, under inference_mode; other
threads may only say that the step under way is not needed.
"""

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_agent.engine.embedded.decoder import Decoder, Step, StepGivenUp
from areal_agent.engine.embedded.kv_room import plan_room
from areal_agent.engine.embedded.kv_store import KVStore, Piece
from areal_agent.engine.embedded.model_files import eos_token_ids, load_model
from areal_agent.engine.embedded.paged.best_attention import best_attention
from areal_agent.engine.embedded.paged.decode_graphs import CudaRecorder, DecodeGraphs, Recorder
from areal_agent.engine.embedded.paged.store import PageStore
from areal_agent.engine.embedded.slot_store import SlotStore
from areal_agent.engine.embedded.weights import WeightLayout
from areal_agent.errors import EngineRejected

KVLayout = Literal["auto", "slots", "pages"]
"""`slots`: whole contexts, on a CPU. `pages`: taken as rows grow, on a GPU and, slower, on a CPU. `auto`: by device."""

_NEVER = threading.Event()


class ModelRunner:
    """The model, its keys and values, and the layout of its weights. Rows are slots 0..n-1 of `kv`."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        model_path: str,
        num_slots: int,
        max_context_tokens: int,
        kv_tokens: int | None = None,
        leave_bytes: int | None = None,
        num_sharing: int = 1,
        kv_layout: KVLayout = "auto",
        recorder: Recorder | None = None,
    ) -> None:
        """`recorder` records decode steps over pages. Raises ConfigError."""
        self.model_path = model_path
        self.num_slots = num_slots
        self.max_context_tokens = max_context_tokens
        self.vocab_size: int = model.config.vocab_size
        self.eos_token_ids = eos_token_ids(model)
        self.device = model.device
        self.layout = WeightLayout.of(model)
        self.unneeded = threading.Event()  # set: `prefill` and `decode` raise StepGivenUp between two layers
        self._decoder = Decoder(model, max_positions=max_context_tokens)
        self._graphs: DecodeGraphs | None = None
        shape = self._decoder.kv_shape
        room = plan_room(
            num_slots=num_slots,
            max_context_tokens=max_context_tokens,
            kv_tokens=kv_tokens,
            leave_bytes=leave_bytes,
            num_sharing=num_sharing,
            token_bytes=shape.num_bytes(model.dtype),
            device=model.device,
        )
        sizes = {"num_slots": num_slots, "max_context_tokens": max_context_tokens}
        if kv_layout == "slots" or (kv_layout == "auto" and model.device.type == "cpu"):
            self.kv: KVStore = SlotStore(shape, **sizes, num_tokens=room, device=model.device, dtype=model.dtype)
            return
        attention = best_attention(shape, num_heads=self._decoder.num_heads, device=model.device, dtype=model.dtype)
        self.kv = pages = PageStore(shape, attention, **sizes, num_tokens=room, device=model.device, dtype=model.dtype)
        if recorder is not None:
            self._graphs = DecodeGraphs(partial(self._hidden_over, pages), recorder, pages=pages)

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
        num_sharing: int = 1,
        kv_layout: KVLayout = "auto",
        cuda_graphs: bool = True,
    ) -> Self:
        """Load a Hugging Face folder: float32 on a CPU, bfloat16 on a GPU. Raises ConfigError."""
        model = load_model(model_path, device=device, max_context_tokens=max_context_tokens)
        return cls(
            model,
            model_path=model_path,
            num_slots=num_slots,
            max_context_tokens=max_context_tokens,
            kv_tokens=kv_tokens,
            leave_bytes=leave_bytes,
            num_sharing=num_sharing,
            kv_layout=kv_layout,
            recorder=CudaRecorder() if cuda_graphs and model.device.type == "cuda" else None,
        )

    @torch.inference_mode()
    def prefill(self, pieces: Sequence[Piece]) -> Tensor:
        """Compute keys and values of the pieces; the logits after each one's last token, `[n, V]`."""
        ids = torch.from_numpy(np.concatenate([piece.ids for piece in pieces])).to(self.device)
        positions = np.concatenate([np.arange(piece.begin, piece.begin + len(piece.ids)) for piece in pieces])
        hidden = self._hidden(ids, torch.from_numpy(positions).to(self.device), self.kv.prefill(pieces))
        last = np.cumsum([len(piece.ids) for piece in pieces]) - 1
        return self._decoder.logits(hidden[torch.from_numpy(last).to(self.device)])

    @torch.inference_mode()
    def decode(self, last_ids: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """One more token for each of the first n slots; `lengths` count that token. The logits after it, `[n, V]`."""
        if self._graphs is not None:
            if self.unneeded.is_set():
                raise StepGivenUp
            return self._decoder.logits(self._graphs.hidden(last_ids, lengths))
        step = self.kv.decode(lengths)
        ids = torch.tensor(last_ids, device=self.device)
        return self._decoder.logits(self._hidden(ids, step.positions, step))

    def release_memory(self) -> None:
        """Give the memory of all keys and values back. Nothing can be computed until `resume_memory`."""
        if self._graphs is not None:
            self._graphs.forget()
        self.kv.free()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # torch would keep it for this process

    def resume_memory(self) -> None:
        """Take it again. Raises EngineRejected when it is not there."""
        try:
            self.kv.allocate()
        except (OSError, RuntimeError) as error:  # torch.OutOfMemoryError is the latter
            raise EngineRejected(
                f"there is no memory for the keys and values of {self.kv.num_tokens} tokens in the slots of "
                f"{self.num_slots} requests: {str(error)[:200]}; let the trainer free its memory, and resume again"
            ) from error

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights that `layout` has proved, in place."""
        self.layout.copy(weights)

    def _hidden(self, ids: Tensor, positions: Tensor, step: Step) -> Tensor:
        return self._decoder.hidden(ids, positions, step, unneeded=self.unneeded)

    def _hidden_over(self, pages: PageStore, ids: Tensor, lengths: Tensor, tables: Tensor) -> Tensor:
        """A decode step that is never given up: it is recorded."""
        step = pages.step(tables, lengths)
        return self._decoder.hidden(ids, step.positions, step, unneeded=_NEVER)
