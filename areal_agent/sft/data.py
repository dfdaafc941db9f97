"""The rows that are learnt and those held out: read, checked, made into sequences, and dealt into batches.

A bad row is an error that names its file and line. The order of rows depends on the seed and the epoch alone, so a
resumed fine-tuning goes on with the batches that it would have had.
"""

import asyncio
import json
import math
import random
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count, islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson

from areal_agent.command import nearest
from areal_agent.errors import ConfigError, RequestError
from areal_agent.gateway.bodies import Limits
from areal_agent.gateway.conversation import AssistantMessage, read_message
from areal_agent.gateway.images import ImageIntake, has_images
from areal_agent.gateway.tools import read_tools
from areal_agent.images import IMAGES, ImageFolder
from areal_agent.ledger import questions
from areal_agent.ledger.files import ledger_in, reading
from areal_agent.sft.config import DataConfig, SftConfig
from areal_agent.sft.sequences import ChatRenderer, Example
from areal_agent.tokens.loss_rule import LossRule
from areal_agent.tokens.records import token_records
from areal_agent.tokens.renderer import Renderer
from areal_agent.tokens.transcript import TRANSCRIPT_NOTE, Transcript
from areal_agent.types import JsonObject, TokenRecord, Trajectory

TOKENIZER = "tokenizer.json"
KEYS = ("messages", "tools")
OF_ANSWERS = (*AssistantMessage.model_fields, "weight")
"""The keys of an answer; a gateway ignores others, which client libraries add."""
ELSEWHERE = 'put its file, no link to it, into the folder of the rows, and give {"type": "image", "path": ...}'
"""The remedy for an image that is elsewhere."""
EMPTY: Sequence[object] = (None, "", [], {})


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """One line of a file, checked and normalised."""

    origin: str  # file:line
    messages: Sequence[JsonObject]
    tools: Sequence[JsonObject] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What is learnt together: the sequences of one chat or of one rollout."""

    origin: str  # file:line, or the session of a rollout
    examples: tuple[Example, ...]

    def records(self) -> list[TokenRecord]:
        """Return the sequences as the trainer takes them."""
        return [record_of(self.origin, branch, one) for branch, one in enumerate(self.examples)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """The rows of a fine-tuning."""

    rows: tuple[Row, ...]
    held_out: tuple[Row, ...]
    num_too_long: int  # rows that were left out

    def num_steps(self, epochs: float, batch_size: int) -> int:
        """Return the steps of so many epochs; the last step may reach into another epoch."""
        return max(1, math.ceil(epochs * len(self.rows) / batch_size))

    def batches(self, batch_size: int, seed: int, num_done: int = 0) -> Iterator[list[TokenRecord]]:
        """Yield batches without end, from the one after `num_done` batches on: each epoch in an order of its own."""
        order = (index for epoch in count() for index in _shuffled(len(self.rows), f"{seed}/{epoch}"))
        next(islice(order, num_done * batch_size, num_done * batch_size), None)
        while True:
            yield [record for index in islice(order, batch_size) for record in self.rows[index].records()]

    def __str__(self) -> str:
        examples = [example for row in self.rows for example in row.examples]
        num_tokens, num_loss = sum(len(one.token_ids) for one in examples), sum(one.num_loss_tokens for one in examples)
        left_out = f"; {self.num_too_long:,} rows are too long and left out" if self.num_too_long else ""
        return (
            f"{len(self.rows):,} rows to learn in {len(examples):,} sequences, {num_tokens:,} tokens, {num_loss:,} of "
            f"them in the loss; {len(self.held_out):,} rows held out{left_out}"
        )


def load_data(config: SftConfig, folder: Path, context: int | None, images: ImageFolder | None = None) -> Data:
    """Read all rows and make them into sequences of the model in `folder`, which was made for `context` tokens.

    Their images are kept in `images`; without, rows that have some are refused.

    Raises ConfigError for the first row that cannot be learnt, and when none is left.
    """
    data, template = config.data, config.read_chat_template()
    renderer = Renderer.load(folder, history_thinking=config.history_thinking, chat_template=template)
    longest = data.max_tokens or context or math.inf
    if context and longest > context:
        raise ConfigError(f"data.max_tokens is {longest:,}, and the model was made for {context:,} tokens; lower it")
    chats = ChatRenderer(renderer)
    rows = [row_of(chat, chats) for file in data.files for chat in read_chats(Path(file), renderer, images)]
    if data.from_run is not None:
        assert data.min_reward is not None  # checked by DataConfig
        rows += read_rollouts(Path(data.from_run), data.min_reward, folder, renderer.chat_template, images)
    held_out = (
        [row_of(chat, chats) for chat in read_chats(Path(config.held_out.file), renderer, images)]
        if config.held_out.file
        else []
    )
    fitting, fitting_held_out = ([row for row in part if _fits(row, longest, data)] for part in (rows, held_out))
    num_too_long = len(rows) + len(held_out) - len(fitting) - len(fitting_held_out)
    if config.trainer.oversized == "refuse":
        for row in fitting + fitting_held_out:
            _require_room(row, config.trainer.tokens_per_micro_batch)
    if not config.held_out.file and config.held_out.share > 0:
        fitting, fitting_held_out = split(fitting, config.held_out.share, config.seed)
    if not fitting:
        why = f" after {num_too_long:,} rows that are too long" if num_too_long else ""
        raise ConfigError(f"data: no row is left to learn{why}; give more rows")
    if config.held_out.is_measured and not fitting_held_out:
        raise ConfigError("held_out: no row is left to measure on; give more rows, or set held_out.share to 0")
    return Data(rows=tuple(fitting), held_out=tuple(fitting_held_out), num_too_long=num_too_long)


def split(rows: Sequence[Row], share: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Return the rows to learn and those held out, drawn by the seed: at least one, if there are two."""
    num_held_out = min(max(1, round(share * len(rows))), len(rows) - 1)
    order = _shuffled(len(rows), f"{seed}/held out")
    held_out = set(order[: max(0, num_held_out)])
    return [row for n, row in enumerate(rows) if n not in held_out], [rows[n] for n in sorted(held_out)]


def read_chats(path: Path, renderer: Renderer | None = None, images: ImageFolder | None = None) -> list[Chat]:
    """Read a JSONL file; empty lines are skipped. Raises ConfigError that names the line.

    The images of rows are checked for the renderer's model, and kept in `images`; without both they are refused.
    """
    try:
        lines = path.read_bytes().removeprefix(BOM_UTF8).split(b"\n")
    except OSError as error:
        raise ConfigError(f"cannot read chats from {str(path)!r}: {error.strerror}; name a JSONL file") from None

    @cache
    def intake() -> ImageIntake | None:
        vision = renderer.vision() if renderer and images else None
        limits = Limits(image_sources=(path.parent.absolute().as_uri(),))
        return ImageIntake(vision, images, limits, elsewhere=ELSEWHERE) if vision else None

    numbered = enumerate(lines, start=1)
    chats = [_chat(line, f"{path}:{number}", path.parent, intake) for number, line in numbered if line.strip()]
    if not chats:
        raise ConfigError(f"{path} has no rows; write one JSON object with 'messages' in each line")
    return chats


def _chat(line: bytes, origin: str, folder: Path, intake: Callable[[], ImageIntake | None]) -> Chat:
    try:
        orjson.loads(line)  # which is strict, but makes floats of large integers
        row: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{origin}: not JSON: {error}; write one object in each line") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{origin}: a row is an object with 'messages', not {str(row)[:40]!r}")
    fields = cast("dict[str, Any]", row)
    if unknown := [name for name in fields if name not in KEYS]:
        raise ConfigError(f"{origin}: unknown key {unknown[0]!r}; {nearest(unknown[0], KEYS)}")
    messages, tools = fields.get("messages"), fields.get("tools")
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{origin}: 'messages' is {messages!r:.40}; give a list of messages")
    try:
        shown: JsonObject = {"messages": [_with_urls(one, folder) for one in cast("list[object]", messages)]}
        if has_images(shown) and (taking := intake()) is not None:
            messages = asyncio.run(taking.taken(shown))["messages"]
        return Chat(
            origin=origin,
            messages=[_message(one, index) for index, one in enumerate(cast("list[object]", messages))],
            tools=read_tools([] if tools is None else tools).definitions,
        )
    except RequestError as error:
        raise ConfigError(f"{origin}: {error}") from None


def _with_urls(message: Any, folder: Path) -> Any:
    """Return a message in which a part `{"type": "image", "path": ...}`, a file beside the rows, has its URL."""
    if not isinstance(message, dict) or not isinstance(parts := message.get("content"), list):
        return message
    return {**message, "content": [_with_url(one, folder) for one in cast("list[Any]", parts)]}


def _with_url(part: Any, folder: Path) -> Any:
    match part:
        case {"type": "image", "path": str(path)}:
            return {"type": "image_url", "image_url": {"url": (folder / path).absolute().as_uri()}}
        case _:
            return part


def _message(value: object, index: int) -> JsonObject:
    """Return a normalised message, with the `weight` of an answer. Raises RequestError."""
    message = read_message(value, index)
    if message["role"] != "assistant":
        return message
    calls: Sequence[JsonObject] = message.get("tool_calls") or ()
    for number, call in enumerate(calls):
        if not call["function"]["name"]:
            where = f"messages[{index}].tool_calls[{number}].function.name"
            raise RequestError(f"{where} is ''; name the tool that is called")
    fields = cast("JsonObject", value)
    if unknown := [name for name in fields if name not in OF_ANSWERS and fields[name] not in EMPTY]:
        raise RequestError(f"messages[{index}] has the unknown key {unknown[0]!r}; {nearest(unknown[0], OF_ANSWERS)}")
    if not any(str(message.get(name) or "").strip() for name in ("content", "reasoning_content", "tool_calls")):
        raise RequestError(f"messages[{index}] says nothing: it has neither content nor tool_calls; give one of them")
    weight = fields.get("weight", 1)
    if weight not in (0, 1):
        raise RequestError(f"messages[{index}].weight is {weight!r:.40}; it is 1, or 0 for an answer not to learn")
    return {**message, "weight": weight}


def row_of(chat: Chat, chats: ChatRenderer) -> Row:
    """Return a chat as it is learnt. Raises ConfigError when it cannot be."""
    try:
        examples = chats.examples(chat.messages, chat.tools)
    except RequestError as error:
        raise ConfigError(f"{chat.origin}: {error}") from None
    if not examples:
        raise ConfigError(f"{chat.origin}: there is nothing to learn: no message of the assistant, or all of weight 0")
    return Row(origin=chat.origin, examples=examples)


def read_rollouts(
    run_dir: Path, min_reward: float, folder: Path, chat_template: str, images: ImageFolder | None = None
) -> list[Row]:
    """Return the completed rollouts of a run with at least this reward in total, by the tokens that were sampled.

    The run's images that they name are copied to `images`.

    In the loss are the answers that the agent received, whatever their recorded probability. Raises ConfigError when
    there are none, or when the run's tokenizer or chat template is not that of the model in `folder`.
    """
    with reading(ledger_in(run_dir)) as snapshot:
        transcript = Transcript.of_ledger(questions.note(snapshot, TRANSCRIPT_NOTE), run_dir, None)
        _require_same_tokenizer(transcript.tokenizer, run_dir, folder)
        if transcript.chat_template != chat_template:
            raise ConfigError(
                f"data.from_run {str(run_dir)!r}: its prompts are of another chat template than the model in "
                f"{str(folder)!r} will be served with; set history_thinking as that run's rollout.history_thinking, or "
                "put its chat_template.jinja beside the model"
            )
        rule = LossRule(trains_altered=True, trains_greedy=True, roots=transcript.loss_rule.roots)
        rows = [
            Row(origin=f"session {session_id}", examples=examples)
            for session_id in questions.rewarded(snapshot, min_reward)
            if (examples := _sampled(questions.trajectory(snapshot, session_id), rule))
        ]
    if not rows:
        raise ConfigError(
            f"data: no rollout of {str(run_dir)!r} has a reward of {min_reward:g} or more; lower data.min_reward"
        )
    if images is not None:
        theirs = ImageFolder(ledger_in(run_dir).parent / IMAGES)
        for digest in {span.digest for row in rows for example in row.examples for span in example.images}:
            images.keep(theirs.read(digest))
    return rows


def _sampled(trajectory: Trajectory, rule: LossRule) -> tuple[Example, ...]:
    """Return the sequences of a rollout that have tokens in the loss."""
    records = token_records(trajectory, rule)
    return tuple(
        Example(token_ids=one.token_ids, loss_mask=one.loss_mask, images=one.images)
        for one in records
        if one.loss_mask.any()
    )


def _require_same_tokenizer(tokenizer: Path | None, run_dir: Path, folder: Path) -> None:
    theirs = None if tokenizer is None else tokenizer / TOKENIZER
    if theirs is None or not theirs.is_file():
        raise ConfigError(
            f"data.from_run {str(run_dir)!r}: its tokenizer is gone, so nobody knows what its tokens are; put back "
            "the model that it began with, or one of its checkpoints"
        )
    if theirs.read_bytes() != (folder / TOKENIZER).read_bytes():
        raise ConfigError(
            f"data.from_run {str(run_dir)!r}: its tokens are of the tokenizer in {str(tokenizer)!r}, and the model in "
            f"{str(folder)!r} has another; give a model with that tokenizer"
        )


def _fits(row: Row, longest: float, data: DataConfig) -> bool:
    """Return whether no sequence of a row is too long. Raises ConfigError if that is to be refused."""
    num_tokens = max(len(one.token_ids) for one in row.examples)
    if num_tokens <= longest:
        return True
    if data.too_long == "refuse":
        limit = "data.max_tokens allows" if data.max_tokens else "the model was made for"
        raise ConfigError(
            f"{row.origin}: a sequence of {num_tokens:,} tokens, and {limit} {longest:,}; shorten it, or leave out "
            "such rows by data.too_long 'drop'"
        )
    return False


def _require_room(row: Row, budget: int) -> None:
    """Raise ConfigError for a sequence that does not fit into a micro-batch; its last token is predicted, not read."""
    num_tokens = max(len(one.token_ids) for one in row.examples)
    if num_tokens - 1 > budget:
        raise ConfigError(
            f"{row.origin}: a sequence of {num_tokens:,} tokens does not fit into trainer.tokens_per_micro_batch = "
            f"{budget:,}, and trainer.oversized is 'refuse'; raise the first, or set the second to 'alone'"
        )


def _shuffled(number: int, seed: str) -> list[int]:
    return random.Random(seed).sample(range(number), number)


def record_of(origin: str, branch: int, example: Example) -> TokenRecord:
    """Return a sequence as the trainer takes it, at temperature 1. What only reinforcement learning reads is 0."""
    zeros = np.zeros(len(example.token_ids), dtype=np.int32)
    return TokenRecord(
        session_id=origin,
        group_id=origin,
        branch=branch,
        parent_branch=None,
        token_ids=example.token_ids,
        loss_mask=example.loss_mask,
        images=example.images,
        turn_index=zeros,
        behavior_logprobs=zeros.astype(np.float32),
        temperatures=np.ones(len(zeros), dtype=np.float32),
        versions=zeros,
        turn_rewards=np.zeros(1, dtype=np.float32),
    )
