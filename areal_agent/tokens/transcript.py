"""Reads recorded turns back as text and messages, for people and for data that leaves the ledger.

A ledger keeps the ids of an answer. `Transcript` reads them with the tokenizer and the formats that their gateway used.
A gateway's owner keeps these as a note in the ledger (`TranscriptSettings`), so that a ledger can be read without its
run.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter, ValidationError

from areal_agent.errors import ConfigError
from areal_agent.tokens.formats.answer_format import ToolFormat
from areal_agent.tokens.formats.base import answer_message
from areal_agent.tokens.formats.thinking import ReasoningFormat
from areal_agent.tokens.loss_rule import LossRule, TrainRoots
from areal_agent.tokens.records import sampled_spans
from areal_agent.tokens.renderer import Renderer
from areal_agent.tokens.template import HistoryThinking
from areal_agent.types import Completion, FinishReason, JsonObject, Trajectory, Turn

TRANSCRIPT_NOTE = "transcript"
"""The note of a ledger with its `TranscriptSettings`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TranscriptSettings:
    """How the sessions of a ledger are read: the tokenizer's folder, the formats of answers, and what is trained."""

    tokenizer: str
    history_thinking: HistoryThinking = HistoryThinking.TEMPLATE
    tool_format: ToolFormat | None = None
    reasoning_format: ReasoningFormat | None = None
    trains_altered: bool = False
    train_roots: TrainRoots = TrainRoots.ALL
    masks_truncated: bool = False

    def note(self) -> JsonObject:
        return asdict(self)

    def load_renderer(self) -> Renderer:
        """Load the tokenizer, which takes a second. Raises ConfigError when it is missing or unusable."""
        return Renderer.load(
            Path(self.tokenizer),
            history_thinking=self.history_thinking,
            tool_format=self.tool_format,
            reasoning_format=self.reasoning_format,
        )


class Transcript:
    """Reads the turns of a ledger, as its settings say. Without a tokenizer what was sampled has no text: None."""

    def __init__(self, settings: TranscriptSettings) -> None:
        self.loss_rule = LossRule(trains_altered=settings.trains_altered, roots=settings.train_roots)
        self._masks_truncated = settings.masks_truncated
        self.tokenizer = Path(settings.tokenizer) if settings.tokenizer else None
        self.renderer = settings.load_renderer() if settings.tokenizer else None

    @classmethod
    def of_ledger(cls, note: JsonObject | None, run_dir: Path, tokenizer: Path | None) -> Self:
        """Read a ledger by its note. The tokenizer is the given one, else the note's, else the newest checkpoint's.

        Raises ConfigError when the note is damaged, or the tokenizer unusable.
        """
        try:
            settings = TypeAdapter(TranscriptSettings).validate_python(note or {"tokenizer": ""})
        except ValidationError as error:
            fault = error.errors()[0]
            where = ".".join(map(str, fault["loc"]))
            raise ConfigError(
                f"the note {TRANSCRIPT_NOTE!r} of the ledger is damaged: {where}: {fault['msg']}"
            ) from None
        folders = [Path(settings.tokenizer), *sorted(run_dir.glob("checkpoints/step_*"), reverse=True)]
        found = tokenizer or next((one for one in folders if (one / "tokenizer.json").is_file()), "")
        return cls(replace(settings, tokenizer=str(found)))

    def masks(self, trajectory: Trajectory) -> Mapping[str, str]:
        """Return the answers that are not in the loss, by id, each with the reason.

        With `algorithm.truncated: mask` those are among them whose branch ends with an answer that was cut off.
        """
        masks: dict[str, str] = dict(self.loss_rule.masks(trajectory))
        if self._masks_truncated:
            ends = {answer.id: answer.finish_reason for turn in trajectory.turns for answer in turn.completions}
            trained: set[str] = set()  # an answer of several branches is trained in the first one
            for spans in sampled_spans(trajectory, self.loss_rule):
                own = spans.keys() - trained
                trained |= own
                if ends[[*spans][-1]] is FinishReason.LENGTH:
                    masks = dict.fromkeys(own, "cut_off") | masks
        return masks

    @property
    def has_text(self) -> bool:
        """Return whether there is a tokenizer, so that what was sampled can be read."""
        return self.renderer is not None

    @property
    def chat_template(self) -> str | None:
        """The template of the prompts; None without a tokenizer."""
        return self.renderer and self.renderer.chat_template

    def text_of(self, token_ids: Sequence[int]) -> str | None:
        """Return the text of ids, special tokens included."""
        return self.renderer and self.renderer.detokenizer.text_of(token_ids)

    def texts_of(self, token_ids: Sequence[int]) -> Sequence[str]:
        """Return the text of each id, without a tokenizer none; a character of several ids is at the last of them."""
        if self.renderer is None:
            return ()
        stream = self.renderer.detokenizer.stream()
        texts = [stream.feed(token_id) for token_id in token_ids]
        if held_back := stream.finish():
            texts[-1] += held_back
        return texts

    def message(self, turn: Turn, completion: Completion) -> JsonObject:
        """Return an answer as OpenAI writes it, with what the prompt had begun of it."""
        if self.renderer is None:
            return {"role": "assistant", "content": None}
        token_ids, detokenizer = completion.token_ids, self.renderer.detokenizer
        ends = (*turn.sampling.stop_token_ids, *detokenizer.special_ids)
        has_end = bool(token_ids) and completion.finish_reason is FinishReason.STOP and token_ids[-1] in ends
        text = self.renderer.text_of(token_ids, has_ended=has_end)
        if not turn.request_delta and turn.parent is None:  # a plain completion, whose answer is text
            return {"role": "assistant", "content": text}
        # what follows the answer's header in the prompt: thinking that is open, or a call's beginning
        header, prompt = self.renderer.answer_header, detokenizer.text_of(turn.new_prompt_ids)
        before, _, begun = prompt.rpartition(header) if header else ("", "", "")
        parsed = self.renderer.answer_format.parse(begun + text if before else text)
        return answer_message(parsed, parsed.content, completion.id)

    def conversations(self, turns: Iterable[Turn]) -> Callable[[Turn], Sequence[JsonObject]]:
        """Return a function that gives the whole messages of a request: its own after those of what it continues."""
        answered = {answer.id: (turn, answer) for turn in turns for answer in turn.completions}

        @cache
        def message(answer_id: str) -> JsonObject:
            return self.message(*answered[answer_id])

        def whole(turn: Turn) -> Sequence[JsonObject]:
            parts = [turn.request_delta]
            while (parent := turn.parent) is not None:
                turn = answered[parent][0]
                parts += [(message(parent),), turn.request_delta]
            return [one for part in reversed(parts) for one in part]

        return whole
