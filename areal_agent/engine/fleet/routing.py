"""Which of several servers a request goes to: the one with its beginning in the cache, unless that has too much to do.

A prompt is cut into blocks; each block's key depends on all before it. The deepest block that is known names the server
that computed it. Knows servers by their names alone, which may come and go, and no model.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b

import numpy as np

BLOCK_TOKENS = 64
MAX_KEYS = 2**18
MAX_LEAD = 8
"""How many requests more than the idlest a server may have and still be given what its cache has."""


class Router:
    """Chooses among servers by name. What it chose is where the blocks are from then on."""

    def __init__(self, *, max_lead: int = MAX_LEAD, max_keys: int = MAX_KEYS) -> None:
        self._max_lead = max_lead
        self._max_keys = max_keys
        self._home_of: OrderedDict[bytes, str] = OrderedDict()  # the server that has this block, by its key

    def choose(self, input_ids: Sequence[int], loads: Mapping[str, int]) -> str:
        """The name of a server; `loads` are the requests in flight at each that may be chosen.

        >>> router, prompt = Router(), range(100)
        >>> router.choose(prompt, {"a": 1, "b": 0})
        'b'
        >>> router.choose([*prompt, 5], {"a": 0, "b": 3})      # its first block is there
        'b'
        >>> router.choose([*prompt, 5], {"a": 0, "b": 9})      # too much to do there
        'a'
        >>> router.choose([*prompt, 5], {"b": 9})
        'b'
        """
        keys = list(_keys(input_ids))
        home = next((known for key in reversed(keys) if (known := self._home_of.get(key)) in loads), None)
        idlest = min(loads, key=loads.__getitem__)
        chosen = idlest if home is None or loads[home] > loads[idlest] + self._max_lead else home
        for key in keys:
            self._home_of[key] = chosen
            self._home_of.move_to_end(key)
        while len(self._home_of) > self._max_keys:
            self._home_of.popitem(last=False)
        return chosen


def _keys(input_ids: Sequence[int]) -> Iterator[bytes]:
    """One a whole block."""
    packed = np.asarray(input_ids, dtype=np.int32).tobytes()
    state = blake2b(digest_size=16)
    for start in range(0, len(packed) - len(packed) % (4 * BLOCK_TOKENS), 4 * BLOCK_TOKENS):
        state.update(packed[start : start + 4 * BLOCK_TOKENS])
        yield state.copy().digest()
