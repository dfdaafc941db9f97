"""Keys and values in slots of whole contexts, and beside them what is kept for others. What a CPU has.

Room is counted in tokens: what rows have comes first, what they do not need is prefix cache.
"""

from collections.abc import Sequence
from functools import partial

import torch

from areal_agent.engine.embedded.attention import DecodeStep, PrefillStep, decode_step, prefill_step
from areal_agent.engine.embedded.kv_cache import KVCache, KVShape
from areal_agent.engine.embedded.kv_store import HEADROOM_TOKENS, Ids, Piece
from areal_agent.engine.embedded.prefix_cache import PrefixCache
from areal_agent.errors import ConfigError


class SlotStore:
    """A KVStore for CPUs."""

    def __init__(
        self,
        shape: KVShape,
        *,
        num_slots: int,
        max_context_tokens: int,
        num_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Raises ConfigError on a GPU, where a slot would take its whole context at once."""
        if device.type != "cpu":
            raise ConfigError(
                f"engine.kv_layout is 'slots', which is for CPUs, and the device is {device}; use 'pages'"
            )
        self.num_tokens = num_tokens
        # What rows and the cache may hold together is less than all slots: memory is given back, and not all is kept.
        self._is_tight = num_tokens < num_slots * max_context_tokens
        self._prefixes = PrefixCache()
        self._like = torch.empty(0, device=device, dtype=dtype)
        self._cache = KVCache(shape, num_slots=num_slots, num_positions=max_context_tokens, device=device, dtype=dtype)

    @property
    def num_kept(self) -> int:
        return self._prefixes.num_tokens

    @property
    def always_keeps(self) -> bool:
        return not self._is_tight

    def num_used(self, lengths: Sequence[int]) -> int:
        return sum(lengths)

    def num_known(self, ids: Ids) -> int:
        return self._prefixes.match(ids).num_tokens

    def can_begin(self, ids: Ids, lengths: Sequence[int]) -> bool:
        return sum(lengths) + len(ids) + HEADROOM_TOKENS * (len(lengths) + 1) <= self.num_tokens

    def begin(self, ids: Ids, lengths: Sequence[int]) -> int:
        self._make_room([*lengths, len(ids)])
        prefix = self._prefixes.match(ids[:-1])
        self._cache.copy_in(len(lengths), prefix.parts)
        return prefix.num_tokens

    def fit(self, lengths: Sequence[int]) -> bool:
        if sum(lengths) > self.num_tokens:
            return False
        self._make_room(lengths)
        return True

    def keep(self, slot: int, ids: Ids, lengths: Sequence[int]) -> None:
        if len(ids) <= self.num_tokens - sum(lengths):
            self._prefixes.hold(ids, partial(self._cache.copy_out, slot))
            self._make_room(lengths)

    def move(self, source: int, target: int, num_tokens: int) -> None:
        self._cache.move(source, target, num_tokens)

    def drop(self, slot: int) -> None:
        if self._is_tight:
            self._cache.release(slot)

    def forget(self) -> None:
        self._prefixes.clear()

    def wipe(self) -> None:
        self._cache.wipe()

    def free(self) -> None:
        self._cache.free()

    def allocate(self) -> None:
        self._cache.allocate()

    def prefill(self, pieces: Sequence[Piece]) -> PrefillStep:
        return prefill_step(self._cache, [(piece.slot, piece.begin, len(piece.ids)) for piece in pieces])

    def decode(self, lengths: Sequence[int]) -> DecodeStep:
        return decode_step(self._cache, lengths, like=self._like)

    def _make_room(self, lengths: Sequence[int]) -> None:
        self._prefixes.shrink(self.num_tokens - sum(lengths))
