"""Reads recorded turns back as text and messages, for people and for data that leaves the ledger.

A ledger keeps the ids of an answer. `Transcript` reads them with the tokenizer and the formats that their gateway used.
A gateway's owner keeps these as a note in the ledger (`TranscriptSettings`), so that a ledger can be read without its
run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from areal_agent.errors import ConfigError
from areal_agent.tokens.formats.answer_format import ToolFormat
from areal_agent.tokens.formats.base import ParsedAnswer, answer_message
from areal_agent.tokens.formats.thinking import ReasoningFormat
from areal_agent.tokens.loss_rule import LossRule, TrainRoots
from areal_agent.tokens.renderer import Renderer
from areal_agent.tokens.template import HistoryThinking
from areal_agent.types import Completion, FinishReason, JsonObject, Turn

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

    def note(self) -> JsonObject:
        return asdict(self)

    @classmethod
    def of_note(cls, note: Mapping[str, Any]) -> Self:
        """Read a note. Raises ValueError, TypeError or KeyError when it is damaged."""
        tool_format, reasoning_format = note["tool_format"], note["reasoning_format"]
        return cls(
            tokenizer=str(note["tokenizer"]),
            history_thinking=HistoryThinking(note["history_thinking"]),
            tool_format=tool_format and ToolFormat(tool_format),
            reasoning_format=reasoning_format and ReasoningFormat(reasoning_format),
            trains_altered=bool(note["trains_altered"]),
            train_roots=TrainRoots(note["train_roots"]),
        )

    @property
    def loss_rule(self) -> LossRule:
        return LossRule(trains_altered=self.trains_altered, roots=self.train_roots)

    def load_renderer(self) -> Renderer:
        """Load the tokenizer, which takes a second. Raises ConfigError when it is missing or unusable."""
        return Renderer.load(
            Path(self.tokenizer),
            history_thinking=self.history_thinking,
            tool_format=self.tool_format,
            reasoning_format=self.reasoning_format,
        )


def find_settings(note: Mapping[str, Any] | None, run_dir: Path, tokenizer: Path | None) -> TranscriptSettings:
    """Return the settings of a ledger's note. Without a `tokenizer` it is the note's, or the newest checkpoint's.

    None was found where the tokenizer is the empty text. Raises ConfigError when the note is damaged.
    """
    try:
        settings = TranscriptSettings.of_note(note) if note else TranscriptSettings(tokenizer="")
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"the note {TRANSCRIPT_NOTE!r} of the ledger is damaged: {error!r}") from None
    if tokenizer is None:
        folders = [Path(settings.tokenizer), *sorted(run_dir.glob("checkpoints/step_*"), reverse=True)]
        tokenizer = next((one for one in folders if (one / "tokenizer.json").is_file()), None)
    return replace(settings, tokenizer="" if tokenizer is None else str(tokenizer))


class Transcript:
    """Reads answers."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        return self._renderer.detokenizer.text_of(token_ids)

    def parsed(self, turn: Turn, completion: Completion) -> ParsedAnswer:
        """Return the reasoning, content and calls of an answer, with what the prompt had begun of it."""
        token_ids, detokenizer = completion.token_ids, self._renderer.detokenizer
        ends = (*turn.sampling.stop_token_ids, *detokenizer.special_ids)
        has_end = bool(token_ids) and completion.finish_reason is FinishReason.STOP and token_ids[-1] in ends
        text = self._renderer.text_of(token_ids, has_ended=has_end)
        if not turn.request_delta and turn.parent is None:  # a plain completion, whose answer is text
            return ParsedAnswer(content=text)
        return self._renderer.answer_format.parse(self._begun(turn) + text)

    def _begun(self, turn: Turn) -> str:
        """Return what follows the answer's header in the prompt: thinking that is open, or a call's beginning."""
        header = self._renderer.answer_header
        before, found, begun = self.text_of(turn.new_prompt_ids).rpartition(header) if header else ("", "", "")
        return begun if found and before else ""

    def message(self, turn: Turn, completion: Completion) -> JsonObject:
        """Return an answer as OpenAI writes it."""
        parsed = self.parsed(turn, completion)
        return answer_message(parsed, parsed.content, completion.id)
