"""One session as a conversation: its turns and answers, where it branched, its versions, and what is in the loss.

A turn shows the messages that it added. Its heading says where it stands in the forest of turns: a turn that does not
continue the answer before it is a branch, with the reason that the gateway recorded.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import orjson

from areal_agent.ledger import questions
from areal_agent.ledger.questions import RolloutSummary
from areal_agent.tokens.loss_rule import LossRule, Mask
from areal_agent.tokens.transcript import Transcript
from areal_agent.types import Completion, JsonObject, SessionPurpose, Trajectory, Turn
from areal_agent.view.rollouts import MAX_SIBLINGS, fate_of, reward_of
from areal_agent.view.terminal import LABEL_WIDTH, Screen

STYLES = {"system": "dim", "developer": "dim", "user": "cyan", "tool": "yellow"}
NUM_COMPARED = 50
"""A new root is compared with so many turns before it: messages that it repeats are not printed again."""
REASONING, ANSWER, CALL = "dim italic", "green", "bold magenta"


class SessionView:
    """Prints sessions. Without a transcript, answers are counts of tokens."""

    def __init__(self, screen: Screen, transcript: Transcript | None, rule: LossRule) -> None:
        self._screen = screen
        self._transcript = transcript
        self._rule = rule

    def show(
        self,
        one: RolloutSummary,
        turns: Sequence[Turn],
        trajectory: Trajectory | None,
        siblings: Sequence[RolloutSummary],
    ) -> None:
        """Print a session. `trajectory` is None while it is open."""
        masks = {} if trajectory is None else self._rule.masks(trajectory)
        self._show_heading(one, turns, trajectory, siblings)
        self._show_loss(one, turns, masks)
        whole = questions.conversations(turns, self._message)
        number_of = {completion.id: number for number, turn in enumerate(turns, 1) for completion in turn.completions}
        newest: str | None = None
        for number, turn in enumerate(turns, start=1):
            self._screen.line()
            self._screen.line((f"turn {number}", "bold"), (_place(turn, newest, number_of), "yellow"))
            num_known = 0
            if turn.parent is None and number > 1:
                known, num_known = _most_alike(whole[turn.id], [whole[one.id] for one in turns[: number - 1]])
                if num_known:
                    self._screen.line((f"its first {num_known} messages are those of turn {known + 1}", "dim"))
            self._show_messages(turn, turn.request_delta[num_known:])
            for index, completion in enumerate(turn.completions, start=1):
                self._show_answer(turn, completion, f"answer {index}" if len(turn.completions) > 1 else "answer")
                self._show_facts(turn, completion, one, masks)
                newest = completion.id

    def _show_heading(
        self,
        one: RolloutSummary,
        turns: Sequence[Turn],
        trajectory: Trajectory | None,
        siblings: Sequence[RolloutSummary],
    ) -> None:
        line, rewards = self._screen.line, one.rewards
        line((one.session_id, "bold cyan"), f"  group {one.group_id}  task {one.task_id}")
        reward = ("none", "red") if one.rewards.is_missing else reward_of(one)
        line(f"{one.status or 'open'}, reward ", reward, "  ", fate_of(one))
        for what, values in (("by answer", rewards.by_completion), ("parts, not in the reward", rewards.parts)):
            if values:
                line(f"{what}: ", ", ".join(f"{name} {value:g}" for name, value in values.items()))
        if one.error:
            line("error: ", (one.error, "red"))
        if trajectory is not None and trajectory.logged:
            line("logged: ", orjson.dumps(trajectory.logged).decode())
        duration = "" if one.ended_s is None else f" in {one.ended_s - one.started_s:.1f} s"
        branches = Counter(turn.fork_reason for turn in turns if turn.fork_reason)
        reasons = ", ".join(f"{number} {reason}" for reason, number in branches.most_common())
        chains = f"{1 + branches.total()} chains ({reasons})" if branches else "1 chain"
        line(f"{len(turns)} turns in {chains}, {one.num_sampled_tokens:,} sampled tokens{duration}")
        if 1 < len(siblings) <= MAX_SIBLINGS:
            line("siblings:", *(part for other in siblings for part in (f"  {other.session_id} ", reward_of(other))))

    def _show_loss(self, one: RolloutSummary, turns: Sequence[Turn], masks: Mapping[str, Mask]) -> None:
        """Print how many tokens are in the loss; what the masks do not explain was left out by the train step."""
        if one.num_loss_tokens is None:
            return
        answers = [completion for turn in turns for completion in turn.completions]
        num_left_out = sum(len(answer.token_ids) for answer in answers if answer.id not in masks) - one.num_loss_tokens
        rest = f"; {num_left_out:,} were too old, or of another conversation" if num_left_out else ""
        self._screen.line(f"in the loss of step {one.leased_step}: {one.num_loss_tokens:,} tokens{rest}")

    def _message(self, turn: Turn, completion: Completion) -> JsonObject:
        if self._transcript is None:
            return {"role": "assistant", "content": completion.id}
        return self._transcript.message(turn, completion)

    def _show_messages(self, turn: Turn, messages: Sequence[JsonObject]) -> None:
        if not turn.request_delta and self._transcript is not None:  # a plain completion
            self._screen.block("prompt", self._transcript.text_of(turn.new_prompt_ids), STYLES["user"])
        for message in messages:
            self._show_message(message, str(message.get("role")))

    def _show_answer(self, turn: Turn, completion: Completion, label: str) -> None:
        if self._transcript is None:
            self._screen.block(label, f"{len(completion.token_ids)} tokens; --tokenizer FOLDER shows their text", "dim")
        else:
            self._show_message(self._transcript.message(turn, completion), label, ANSWER)

    def _show_message(self, message: JsonObject, label: str, style: str = "") -> None:
        calls = cast(Sequence[Mapping[str, Any]], message.get("tool_calls") or ())
        if reasoning := message.get("reasoning_content"):
            self._screen.block("reasoning", str(reasoning), REASONING)
        if (text := _text(message.get("content"))) or not calls:
            self._screen.block(label, text, style or STYLES.get(label, ""))
        for function in (call.get("function") or call for call in calls):
            self._screen.block("call", str(function.get("name")), CALL)
            for name, value in _arguments(function.get("arguments")).items():
                self._screen.block(f"  {name}", _text(value), CALL)

    def _show_facts(self, turn: Turn, completion: Completion, one: RolloutSummary, masks: Mapping[str, Mask]) -> None:
        versions = ", ".join(f"{span.end - span.start:,} by {span.version}" for span in completion.versions)
        logprob = statistics.fmean(completion.logprobs) if completion.logprobs else 0.0
        reward = one.rewards.by_completion.get(completion.id)
        self._screen.line(
            f"{'':<{LABEL_WIDTH}} └ ",
            (
                f"{len(completion.token_ids):,} tokens ({versions or 'of no version'}), {completion.finish_reason}, "
                f"{completion.distribution}, mean logprob {logprob:.3f}, {turn.ended_s - turn.started_s:.2f} s; ",
                "dim",
            ),
            _loss_of(completion, one, masks),
            "" if reward is None else f"; reward {reward:g}",
        )


def _loss_of(completion: Completion, one: RolloutSummary, masks: Mapping[str, Mask]) -> tuple[str, str]:
    """Return whether an answer is in the loss, or why not, and the style of that."""
    if one.purpose == SessionPurpose.EVAL:
        return "not in the loss: for evaluation", "yellow"
    if one.fate is not None and one.fate.dropped:
        return f"not in the loss: {one.fate}", "yellow"
    if completion.id in masks:
        return f"not in the loss: {masks[completion.id]}", "yellow"
    return ("not yet in a loss", "dim") if one.leased_step is None else ("in the loss", "green")


def _place(turn: Turn, newest: str | None, number_of: Mapping[str, int]) -> str:
    """Return what a turn branches from, and why; nothing where it continues the newest answer."""
    if turn.parent == newest and not turn.fork_reason:
        return ""
    kept = f"; it keeps {turn.fork_at:,} tokens up to turn {number_of[turn.parent]}" if turn.parent else ""
    return f"  branch: {turn.fork_reason or 'no reason was recorded'}{kept}"


def _most_alike(messages: Sequence[JsonObject], earlier: Sequence[Sequence[JsonObject]]) -> tuple[int, int]:
    """Return the index of the earlier conversation with the longest common beginning, and the length of that."""
    lengths = [
        next((i for i, (a, b) in enumerate(zip(messages, one, strict=False)) if a != b), min(len(messages), len(one)))
        for one in earlier[-NUM_COMPARED:]
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
