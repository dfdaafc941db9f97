"""A program in its sandbox that does what its tests ask: started when it is needed, killed when its time is over.

It knows no tests. What it answers is data from a hostile process: `run_tests.py` takes it as plain values alone.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, cast

from sandboxes.judge.bundle import bundle
from sandboxes.judge.conversation import Conversation
from sandboxes.judge.verdict import MAX_TEXT, OUTCOME_OF, CaseVerdict, Outcome, ending_of
from sandboxes.limits import Limits
from sandboxes.result import ExecResult, Status
from sandboxes.sandbox import Sandbox

SERVE = bundle("plain", "serve_program")

MAX_NAMES_CHARACTERS = 256 * 1024
"""Of all names of a program together, as JSON: without a bound they could fill the memory of its tests' sandbox."""

Names = dict[str, tuple[str, list[str]]]
"""Each name of a program, what it is, and the built-in exceptions that it comes of."""


class RemoteProgram:
    """Made without a process; `stop` it at last."""

    def __init__(self, box: Sandbox, code: str, module: str, limits: Limits) -> None:
        self._box = box
        self._code = code
        self._module = module
        self._limits = limits
        self._conversation: Conversation | None = None
        self._stopping = asyncio.Lock()
        self.failure = CaseVerdict(outcome=Outcome.CRASHED)  # of its last end
        self.num_ends = 0

    @property
    def wall_s(self) -> float:
        return self._limits.wall_s

    async def start(self) -> Names | None:
        """Its names; None, and `failure`, when it cannot be loaded."""
        conversation = self._conversation = Conversation(await self._box.spawn_python(SERVE))
        await conversation.tell({"code": self._code, "module": self._module, "serial": self.num_ends})
        try:
            async with asyncio.timeout(self.wall_s):
                hello = await conversation.hear_message() or {}
        except TimeoutError:
            await self.stop(Outcome.TIMEOUT)
            return None
        names = names_of(hello)
        if names is None:
            await self.stop(detail=told(hello.get("raised")))
        return names

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Its reply, or that it is gone."""
        if self._conversation is None and await self.start() is None:
            return {"gone": self.failure.detail}
        conversation = self._conversation
        reply: dict[str, Any] | None = None
        if conversation is not None:
            await conversation.tell(request)
            reply = await conversation.hear_message()
        if reply is None or not reply.keys() & {"value", "raised", "gone"}:
            await self.stop()
            return {"gone": self.failure.detail}
        return reply

    async def stop(self, outcome: Outcome | None = None, detail: str = "") -> None:
        """Kill it and keep why; `outcome` None: what the kernel says."""
        async with self._stopping:  # who comes second finds it stopped, and `failure` set
            conversation, self._conversation = self._conversation, None
            if conversation is None:
                return
            result, stderr = await conversation.end()
            self.num_ends += 1
            said = detail or ending_of(stderr) or "the program ended"
            self.failure = CaseVerdict(outcome=outcome or outcome_of_end(result), detail=said)


def names_of(hello: Mapping[str, Any]) -> Names | None:
    """What a program says of its names, if it is what it should be."""
    names = hello.get("names")
    if not isinstance(names, dict) or len(json.dumps(names)) > MAX_NAMES_CHARACTERS:
        return None
    for kind in cast(dict[str, Any], names).values():
        match kind:
            case [str(), list(bases)] if all(isinstance(base, str) for base in cast(list[Any], bases)):
                continue
            case _:
                return None
    return cast(Names, names)


def told(raised: Any) -> str:
    """An exception as `serve_program.py` describes it, in one line; nothing when it is none.

    >>> told({"names": ["KeyError", "LookupError"], "message": "'x'"})
    "KeyError: 'x'"
    """
    match raised:
        case {"names": [str(name), *_], "message": str(message)}:
            return f"{name}: {message}"[:MAX_TEXT]
        case _:
            return ""


def outcome_of_end(result: ExecResult) -> Outcome:
    """Why a program is gone that should have waited for requests; that it exited with 0 is no excuse."""
    return Outcome.CRASHED if result.status is Status.OK else OUTCOME_OF[result.status]
