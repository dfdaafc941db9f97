"""The tools of requests, checked and their strict schemas compiled: once for each text, since an agent repeats them.

What a set of tools is remembered by is its JSON, to the byte: `1`, `1.0` and `true` are equal in Python and not there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import orjson

from areal_agent.gateway.endpoints.conversation import read_tools
from areal_agent.gateway.endpoints.strict_tools import Accepts, strict_tools
from areal_agent.types import JsonObject

MAX_SETS = 64
MAX_SET_BYTES = 2**16
"""A longer set is checked anew each time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tools:
    """A set of tools that was checked. Requests share it: nobody changes the definitions."""

    definitions: Sequence[JsonObject]
    accepts: Accepts | None  # what a call must be, where a tool is strict

    @classmethod
    def read(cls, value: object) -> Self:
        """Check `tools`; raises RequestError naming the place."""
        definitions = read_tools(value)
        return cls(definitions=definitions, accepts=strict_tools(definitions))


class KnownTools:
    """The sets of tools that were used last."""

    def __init__(self) -> None:
        self._sets: dict[bytes, Tools] = {}  # by their JSON; the one used last is the last

    def read(self, value: object) -> Tools:
        """As `Tools.read`, which is asked only for what is new. What is wrong is not remembered."""
        try:
            text = orjson.dumps(value)
        except orjson.JSONEncodeError:  # too deep to be written: it will be refused
            return Tools.read(value)
        tools = self._sets.pop(text, None) or Tools.read(value)
        if len(text) <= MAX_SET_BYTES:
            self._sets[text] = tools
        if len(self._sets) > MAX_SETS:
            del self._sets[next(iter(self._sets))]
        return tools
