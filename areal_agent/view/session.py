"""One session as a conversation: its turns and answers, where it branched, its versions, and what is in the loss.

A turn shows the messages that it added. Its heading says where it stands in the forest of turns: a turn that does not
continue the answer before it is a branch, with the reason that the gateway recorded.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, cast

import orjson
from PIL import Image

from areal_agent.errors import LedgerError
from areal_agent.images import FORMATS, ImageFolder, digest_of
from areal_agent.ledger.questions import RolloutSummary
from areal_agent.tokens.transcript import Transcript
from areal_agent.types import Completion, JsonObject, SessionPurpose, Trajectory, Turn
from areal_agent.view.terminal import LABEL_WIDTH, Screen

STYLES = {"system": "dim", "developer": "dim", "user": "cyan", "tool": "yellow"}
MAX_SIBLINGS = 32
"""Rollouts shown of a group that is not the subject; a group of an evaluation has one for every task."""
NUM_COMPARED = 50
"""A new root is compared with so many turns before it: messages that it repeats are not printed again."""
REASONING, ANSWER, CALL = "dim italic", "green", "bold magenta"


@dataclass(frozen=True, slots=True)
class SessionView:
    """Prints a session. Where it has no text, answers are counts of tokens."""

    screen: Screen
    transcript: Transcript
    session_id: str
    siblings: Sequence[RolloutSummary]  # itself among them
    turns: Sequence[Turn]
    trajectory: Trajectory | None  # None: it is open
    images: ImageFolder

    def show(self) -> None:
        """Print the session."""
        (one,) = (one for one in self.siblings if one.session_id == self.session_id)
        masks = self.transcript.masks(self.trajectory) if self.trajectory else {}
        self._show_heading(one)
        self._show_loss(one)
        whole = self.transcript.conversations(self.turns)
        for number, (turn, place) in enumerate(zip(self.turns, places_of(self.turns), strict=True), start=1):
            self.screen.line()
            self.screen.line((f"turn {number}", "bold"), (place and f"  {place}", "yellow"))
            num_known = 0
            if turn.parent is None and number > 1:
                known, num_known = most_alike(turn, self.turns[: number - 1], whole)
                if num_known:
                    self.screen.line((f"its first {num_known} messages are those of turn {known + 1}", "dim"))
            if not turn.request_delta and self.transcript.has_text:  # a plain completion
                self.screen.block("prompt", self.transcript.text_of(turn.new_prompt_ids) or "", STYLES["user"])
            for message in turn.request_delta[num_known:]:
                self._show_message(message, str(message.get("role")))
            for index, completion in enumerate(turn.completions, start=1):
                self._show_answer(turn, completion, f"answer {index}" if len(turn.completions) > 1 else "answer")
                self._show_facts(turn, completion, one, masks)

    def _show_heading(self, one: RolloutSummary) -> None:
        line, rewards = self.screen.line, one.rewards
        line((one.session_id, "bold cyan"), f"  group {one.group_id}  task {one.task_id}")
        reward = ("none", "red") if rewards.is_missing else reward_of(one)
        line(f"{one.status or 'open'}, reward ", reward, "  ", fate_of(one))
        for what, values in (("by answer", rewards.by_completion), ("parts, not in the reward", rewards.parts)):
            if values:
                line(f"{what}: ", ", ".join(f"{name} {value:g}" for name, value in values.items()))
        if one.error:
            line("error: ", (one.error, "red"))
        if self.trajectory is not None and self.trajectory.logged:
            line("logged: ", orjson.dumps(self.trajectory.logged).decode())
        duration = "" if one.ended_s is None else f" in {one.ended_s - one.started_s:.1f} s"
        branches = Counter(turn.fork_reason for turn in self.turns if turn.fork_reason)
        reasons = ", ".join(f"{number} {reason}" for reason, number in branches.most_common())
        chains = f"{1 + branches.total()} chains ({reasons})" if branches else "1 chain"
        line(f"{len(self.turns)} turns in {chains}, {one.num_sampled_tokens:,} sampled tokens{duration}")
        if 1 < len(self.siblings) <= MAX_SIBLINGS:
            line(
                "siblings:",
                *(part for other in self.siblings for part in (f"  {other.session_id} ", reward_of(other))),
            )

    def _show_loss(self, one: RolloutSummary) -> None:
        """Print how many tokens were leased for the loss; of the rest, those that no mask explains were too old."""
        if one.num_loss_tokens is None or self.trajectory is None:
            return
        masks = self.transcript.loss_rule.masks(self.trajectory)
        answers = [completion for turn in self.turns for completion in turn.completions]
        num_left_out = sum(len(answer.token_ids) for answer in answers if answer.id not in masks) - one.num_loss_tokens
        rest = f"; {num_left_out:,} were too old, or of another conversation" if num_left_out else ""
        self.screen.line(f"in the loss of step {one.leased_step}: {one.num_loss_tokens:,} tokens{rest}")

    def _show_answer(self, turn: Turn, completion: Completion, label: str) -> None:
        if self.transcript.has_text:
            self._show_message(self.transcript.message(turn, completion), label, ANSWER)
        else:
            self.screen.block(label, f"{len(completion.token_ids)} tokens; --tokenizer FOLDER shows their text", "dim")

    def _show_message(self, message: JsonObject, label: str, style: str = "") -> None:
        calls = cast(Sequence[Mapping[str, Any]], message.get("tool_calls") or ())
        if reasoning := message.get("reasoning_content"):
            self.screen.block("reasoning", str(reasoning), REASONING)
        if (text := self._content(message.get("content"))) or not calls:
            self.screen.block(label, text, style or STYLES.get(label, ""))
        for function in (call.get("function") or call for call in calls):
            self.screen.block("call", str(function.get("name")), CALL)
            for name, value in _arguments(function.get("arguments")).items():
                self.screen.block(f"  {name}", _text(value), CALL)

    def _content(self, content: object) -> str:
        """Return the content of a message as text, in which an image is a line about it."""
        parts = cast(list[Any], content) if isinstance(content, list) else []
        digests = [digest_of(part) for part in parts]
        if not any(digests):
            return _text(content)
        return "\n".join(
            self._image(digest) if digest else _text([part]) for part, digest in zip(parts, digests, strict=True)
        )

    def _image(self, digest: str) -> str:
        spans = (one for turn in self.turns for one in turn.images if one.digest == digest)
        tokens = next((f", {one.end - one.start} tokens" for one in spans), "")
        try:
            with Image.open(BytesIO(self.images.read(digest)), formats=FORMATS) as image:
                return f"[image {image.format} {image.width}x{image.height}{tokens}]"
        except (LedgerError, OSError, Image.DecompressionBombError):
            return f"[image {digest[:12]}, which cannot be read{tokens}]"

    def _show_facts(self, turn: Turn, completion: Completion, one: RolloutSummary, masks: Mapping[str, str]) -> None:
        versions = ", ".join(f"{span.end - span.start:,} by {span.version}" for span in completion.versions)
        logprob = statistics.fmean(completion.logprobs) if completion.logprobs else 0.0
        reward = one.rewards.by_completion.get(completion.id)
        self.screen.line(
            f"{'':<{LABEL_WIDTH}} └ ",
            (
                f"{len(completion.token_ids):,} tokens ({versions or 'of no version'}), {completion.finish_reason}, "
                f"{completion.distribution}, mean logprob {logprob:.3f}, {turn.ended_s - turn.started_s:.2f} s; ",
                "dim",
            ),
            loss_of(completion, one, masks),
            "" if reward is None else f"; reward {reward:g}",
        )


def reward_of(one: RolloutSummary) -> tuple[str, str]:
    """Return the reward of a rollout and its style; without one, how it ended."""
    if one.status is None:
        return "open", "yellow"
    if one.rewards.is_missing:
        return one.status, "red"
    return f"{one.rewards.total:.3g}", "green" if one.rewards.total > 0 else "red"


def fate_of(one: RolloutSummary) -> tuple[str, str]:
    """Return what became of a rollout, and its style."""
    if one.purpose == SessionPurpose.EVAL:
        return "never trained", "dim"
    if one.fate is not None:
        return str(one.fate), "yellow" if one.fate.dropped else "green"
    if one.leased_step is not None:
        return f"leased for {one.leased_step}", "dim"
    return "" if one.status is None else "waiting", "dim"


def loss_of(completion: Completion, one: RolloutSummary, masks: Mapping[str, str]) -> tuple[str, str]:
    """Return whether an answer is in the loss, or why not, and the style of that."""
    if one.purpose == SessionPurpose.EVAL:
        return "not in the loss: for evaluation", "yellow"
    if one.fate is not None and one.fate.dropped:
        return f"not in the loss: {one.fate}", "yellow"
    if completion.id in masks:
        return f"not in the loss: {masks[completion.id]}", "yellow"
    return ("not yet in a loss", "dim") if one.leased_step is None else ("in the loss", "green")


def places_of(turns: Sequence[Turn]) -> Sequence[str]:
    """Return for each turn of which answer it is a branch, and why, or which it continues; of the one before: ""."""
    places: list[str] = []
    names: dict[str | None, str] = {None: ""}  # by answer
    before: str | None = None
    for number, turn in enumerate(turns, start=1):
        if turn.fork_reason or (turn.parent is None and number > 1):
            kept = f"; it keeps {turn.fork_at:,} tokens up to {names[turn.parent]}" if turn.parent else ""
            places.append(f"branch: {turn.fork_reason or 'no reason was recorded'}{kept}")
        else:
            places.append("" if turn.parent == before else f"continues {names[turn.parent]}")
        answers = [answer.id for answer in turn.completions]
        names |= {one: f"turn {number}" for one in answers}
        if len(answers) > 1:
            names |= {one: f"answer {index} of turn {number}" for index, one in enumerate(answers, start=1)}
        before = answers[0] if len(answers) == 1 else None
    return places


def most_alike(turn: Turn, earlier: Sequence[Turn], whole: Callable[[Turn], Sequence[JsonObject]]) -> tuple[int, int]:
    """Return the index of the earlier request with the longest common beginning, and the length of that."""
    messages = turn.request_delta
    lengths = [
        next((i for i, (a, b) in enumerate(zip(messages, one, strict=False)) if a != b), min(len(messages), len(one)))
        for one in map(whole, earlier[-NUM_COMPARED:])
    ]
    best = max(range(len(lengths)), key=lengths.__getitem__)
    return len(earlier) - len(lengths) + best, lengths[best]


def _arguments(arguments: object) -> Mapping[str, Any]:
    """Return a call's arguments by name; what is no object has no name."""
    try:
        given: object = orjson.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        given = arguments
    return cast(Mapping[str, Any], given) if isinstance(given, Mapping) else {"": given}


def _text(content: object) -> str:
    """Return the content of a message as text: parts of text one after the other, anything else as JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = cast(list[Any], content) if isinstance(content, list) else []
    texts = [cast(Mapping[str, Any], part).get("text") for part in parts if isinstance(part, Mapping)]
    if parts and len(texts) == len(parts) and all(isinstance(text, str) for text in texts):
        return "".join(map(str, texts))
    return orjson.dumps(content).decode()
