"""All answers of a session, by what the conversation up to and including each one says.

Identity is causal: a request belongs under an answer because it repeats, as data, the whole conversation that ends with
it; never because of when it came. Knows nothing of text and tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from areal_agent.tokens.canonical import (
    call_ids,
    has_same_asides,
    is_reasoning_repeated,
)
from areal_agent.tokens.continuation import Normalise
from areal_agent.tokens.prompt import Answer, Key
from areal_agent.tokens.requests import change_between
from areal_agent.types import ForkReason, JsonObject


@dataclass(kw_only=True, slots=True)
class AnswersByData:
    """The answers of a forest. An answer is found by its messages alone; head and tools are compared afterwards."""

    _by_body: dict[bytes, list[Answer]] = field(default_factory=dict[bytes, list[Answer]])

    def add(self, answer: Answer) -> None:
        """Make an answer known."""
        self._by_body.setdefault(answer.body, []).append(answer)

    def of(self, key: Key) -> list[Answer]:
        """The answers with which a conversation of this key ends."""
        return [answer for answer in self._by_body.get(key.body, ()) if _is_same_scope(answer.prompt.key, key)]

    def find(
        self, messages: Sequence[JsonObject], bodies: Sequence[bytes], key: Key, normalise: Normalise
    ) -> tuple[Answer | None, ForkReason | None]:
        """The answer that ends the longest prefix of normalised `messages`; if none does, why one nearly did.

        `key` has the head and the tools of the request, `bodies` identifies the prefixes of what follows the head.
        """
        reason = None
        for body in reversed(bodies):
            answers = self._by_body.get(body, ())
            same = [
                answer
                for answer in answers
                if _is_same_scope(answer.prompt.key, key) and _has_same_asides(answer, messages, normalise)
            ]
            if same:
                return _best(same, messages), None
            reason = reason or change_between(key, (answer.prompt.key for answer in answers))
        return None, reason


def best_by_echo(answers: Iterable[Answer], echo: JsonObject) -> Answer | None:
    """Of answers to the same prompt that say the same: the one whose call ids `echo` has, then the least continued."""
    same = [answer for answer in answers if is_reasoning_repeated(answer.reasoning, echo)]
    ids = call_ids(echo)
    return min(same, key=lambda answer: (answer.call_ids != ids, answer.num_continuations), default=None)


def _best(answers: Sequence[Answer], messages: Sequence[JsonObject]) -> Answer:
    """The answer whose call ids are repeated, and those before it, the newest first; then the least continued."""
    if len(answers) == 1:
        return answers[0]
    return min(answers, key=lambda answer: (_changed_ids(answer, messages), answer.num_continuations))


def _changed_ids(answer: Answer, messages: Sequence[JsonObject]) -> tuple[bool, ...]:
    return tuple(one.call_ids != call_ids(messages[one.prompt.num_messages]) for one in answer.lineage())


def _is_same_scope(one: Key, other: Key) -> bool:
    return one.head == other.head and one.tools == other.tools


def _has_same_asides(answer: Answer, messages: Sequence[JsonObject], normalise: Normalise) -> bool:
    """Whether reasoning is repeated or left out where it was sampled, and it and names repeated where the agent brought
    them."""
    for one in answer.lineage():
        if not is_reasoning_repeated(one.reasoning, messages[one.prompt.num_messages]):
            return False
        first = one.prompt.num_messages - len(one.prompt.new_messages)
        for index, recorded in enumerate(one.prompt.new_messages, first):
            if recorded.get("role") == "assistant" and not has_same_asides(messages[index], normalise(recorded, index)):
                return False
    return True
