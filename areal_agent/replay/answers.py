"""Recorded answers in the place of an engine, and fresh ones after a turn.

`RecordedAnswers` is a `protocols.Sampler` for the gateway of one episode. A call is known by the tokens of its prompt,
which hold its messages and its tools, whenever it comes; so concurrent calls and branches get their own answers. The
gateway renders a prompt around the recorded tokens of earlier answers, so the same messages are the same tokens. All
images have the same tokens, so an image's digest stands in the place of each of its tokens.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, takewhile
from typing import Any, cast

from areal_agent.errors import RequestError
from areal_agent.gateway.answers import request_id_of
from areal_agent.images import digest_of
from areal_agent.protocols import Sampler
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import (
    Completion,
    GenerateRequest,
    GenerateResult,
    ImageSpan,
    JsonObject,
    SamplingParams,
    TokenChunk,
    Turn,
)

MAX_LINES = 60
"""Lines of a difference that are shown."""

Ids = tuple[int | str, ...]
"""The ids of tokens, and digests for those of images."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A call that is not the recorded one: which, and how it differs."""

    turn: int | None  # the number of the recorded turn that is nearest, from 1
    what: str
    text: str = ""  # the differing lines, as `diff` writes them
    is_bridged: bool = False  # the results of its tools differ, and the recorded ones counted

    def __str__(self) -> str:
        at = "" if self.turn is None else f"turn {self.turn}: "
        return f"{at}{self.what}" + (f"\n{self.text}" if self.text else "")


@dataclass(kw_only=True, slots=True, eq=False)
class _Due:
    """A recorded answer that has not been given yet."""

    number: int  # of its turn, from 1
    turn: Turn
    prompt: Ids
    completion: Completion


class RecordedAnswers:
    """Answers from the first `upto` turns, and then from `then`; without `then`, later calls are differences.

    With `bridges_tools`, a call that differs from a recorded one only in what tools said is answered as that one.
    `differences` are the calls that were not as recorded.
    """

    def __init__(
        self,
        turns: Sequence[Turn],
        renderer: Renderer,
        *,
        upto: int | None = None,
        then: Sampler | None = None,
        bridges_tools: bool = False,
        ending: str = "",
    ) -> None:
        """`ending` says how the session ended, for a call beyond its last turn."""
        every = list(_dues(turns))
        upto = len(turns) if upto is None else upto
        self.differences: list[Difference] = []
        self.num_fresh = 0
        self._due = [one for one in every if one.number <= upto]
        self._later = {one.prompt for one in every if one.number > upto}
        self._renderer = renderer
        self._then = then
        self._bridges_tools = bridges_tools
        self._ending = ending
        self._given: dict[str, str] = {}  # by request id: the recorded completion
        self._bridged: list[tuple[Ids, Ids]] = []  # the prompt of a call, and the recorded one that it stands for
        self._fresh: list[Ids] = []  # prompts with their fresh answers

    @property
    def not_made(self) -> tuple[int, ...]:
        """The numbers of the turns whose answers were never asked for."""
        return tuple(dict.fromkeys(one.number for one in self._due))

    def recorded_id(self, completion_id: str) -> str | None:
        """Return the recorded completion that was given as this one; None if it was sampled afresh."""
        return self._given.get(request_id_of(completion_id))

    async def generate(
        self, request: GenerateRequest, on_chunk: Callable[[TokenChunk], None] | None = None
    ) -> GenerateResult:
        prompt = self._as_recorded(_with_images(request.input_ids, (one.span for one in request.images)))
        found = next((one for one in self._due if one.prompt == prompt), None)
        if found is None and self._then is not None and self._is_fresh(prompt):
            return await self._sample(self._then, request, prompt, on_chunk)
        if found is None and self._bridges_tools:
            found = self._bridge(prompt)
        if found is None:
            difference = self._difference(prompt)
            self.differences.append(difference)
            raise RequestError(f"this call is not a recorded one: {difference.what}", status=409, code="not_recorded")
        self._due.remove(found)
        self._given[request.request_id] = found.completion.id
        self._compare(found, request.sampling)
        answer = found.completion
        if on_chunk is not None and answer.token_ids:
            on_chunk(TokenChunk(token_ids=answer.token_ids, logprobs=answer.logprobs, versions=answer.versions))
        return GenerateResult(
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            versions=answer.versions,
            finish_reason=answer.finish_reason,
        )

    async def abort(self, request_id: str) -> None:
        if self._then is not None:  # an unknown id is no error there
            await self._then.abort(request_id)

    async def _sample(
        self, engine: Sampler, request: GenerateRequest, prompt: Ids, on_chunk: Callable[[TokenChunk], None] | None
    ) -> GenerateResult:
        result = await engine.generate(request, on_chunk)
        self.num_fresh += 1
        self._fresh.append((*prompt, *result.token_ids))
        return result

    def _is_fresh(self, prompt: Ids) -> bool:
        """Return whether a call comes after the recorded turns: what it continues, or all that was due, is past."""
        is_after = any(prompt[: len(path)] == path for path in self._fresh)
        return not self._due or prompt in self._later or is_after

    def _as_recorded(self, prompt: Ids) -> Ids:
        for live, recorded in reversed(self._bridged):
            if prompt[: len(live)] == live:
                return (*recorded, *prompt[len(live) :])
        return prompt

    def _bridge(self, prompt: Ids) -> _Due | None:
        """Return the recorded answer whose call has other results of tools, and is the same otherwise."""
        for one in self._due:
            kept, said = one.turn.fork_at, [text for message in one.turn.request_delta for text in _said(message)]
            is_of_tools = bool(said) and all(message.get("role") == "tool" for message in one.turn.request_delta)
            if not is_of_tools or prompt[:kept] != one.prompt[:kept]:
                continue
            recorded, live = self._text_of(one.prompt[kept:]), self._text_of(prompt[kept:])
            if re.fullmatch(_pattern(recorded, said), live, re.DOTALL):
                self._bridged.append((prompt, one.prompt))
                what = "a tool said something else; what it said in the record counts"
                text = _diff(recorded, live)
                self.differences.append(Difference(turn=one.number, what=what, text=text, is_bridged=True))
                return one
        return None

    def _compare(self, found: _Due, sampling: SamplingParams) -> None:
        """Note the parameters that differ. Seeds follow from the session and the place of the call."""
        before, now = asdict(found.turn.sampling), asdict(sampling)
        changed = [name for name in before if name != "seed" and before[name] != now[name]]
        if changed:
            lines = [f"- {name}: {before[name]!r}\n+ {name}: {now[name]!r}" for name in changed]
            what = "the call is made with other parameters"
            self.differences.append(Difference(turn=found.number, what=what, text="\n".join(lines)))

    def _difference(self, prompt: Ids) -> Difference:
        """Compare a call with the recorded one that has the longest beginning in common with it."""
        if not self._due:
            what = f"all recorded calls were made, and the workflow makes another one{self._ending}"
            return Difference(turn=None, what=what)
        nearest = max(self._due, key=lambda one: _num_common(one.prompt, prompt))
        what = "the call differs from the recorded one (- recorded, + now)"
        return Difference(
            turn=nearest.number, what=what, text=_diff(self._text_of(nearest.prompt), self._text_of(prompt))
        )

    def _text_of(self, prompt: Ids) -> str:
        texts: list[str] = []
        for digest, run in groupby(prompt, lambda one: one if isinstance(one, str) else None):
            ids = [one for one in run if isinstance(one, int)]
            texts.append(self._renderer.detokenizer.text_of(ids) if digest is None else _image(digest))
        return "".join(texts)


def _dues(turns: Sequence[Turn]) -> Iterator[_Due]:
    paths: dict[str | None, Ids] = {None: ()}  # by completion: all tokens up to its end
    for number, turn in enumerate(turns, start=1):
        prompt = (*paths[turn.parent][: turn.fork_at], *_with_images(turn.new_prompt_ids, turn.images))
        for completion in turn.completions:
            paths[completion.id] = (*prompt, *completion.token_ids)
            yield _Due(number=number, turn=turn, prompt=prompt, completion=completion)


def _with_images(token_ids: Sequence[int], images: Iterable[ImageSpan]) -> Ids:
    ids: list[int | str] = list(token_ids)
    for one in images:
        ids[one.start : one.end] = [one.digest] * (one.end - one.start)
    return tuple(ids)


def _image(digest: str) -> str:
    return f"[image {digest[:12]}]"


def _said(message: JsonObject) -> Sequence[str]:
    """Return the parts of what a message says, as they stand in the text of a prompt."""
    content: Any = message.get("content")
    if not isinstance(content, list):
        return [str(content)]
    parts = cast(list[dict[str, Any]], content)
    texts = [_image(digest) if (digest := digest_of(part)) else str(part.get("text", "")) for part in parts]
    return [text for text in texts if text.strip()]


def _num_common(one: Ids, other: Ids) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _pattern(text: str, contents: Sequence[str]) -> str:
    """Return an expression for a text in which each of these contents, in their order, may be another.

    >>> _pattern("<4>, <5>", ["4", "5"])
    '<.*>,\\\\ <.*>'
    """
    parts: list[str] = []
    for content in contents:
        before, found, after = text.partition(content.strip() or "\0")
        if not found:
            break
        parts.append(re.escape(before))
        text = after
    return ".*".join([*parts, re.escape(text)])


def _diff(recorded: str, live: str) -> str:
    lines = list(difflib.unified_diff(recorded.splitlines(), live.splitlines(), lineterm="", n=2))[2:]
    rest = [f"... and {len(lines) - MAX_LINES} more lines"] if len(lines) > MAX_LINES else []
    return "\n".join([*lines[:MAX_LINES], *rest])
