"""Exports a ledger as one row per completion, with the whole prompt and everything recorded about it.

Needs the extra `parquet`. A Parquet file is written completely or not at all.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from areal_agent.images import ImageFolder
from areal_agent.ledger import questions
from areal_agent.ledger.files import Snapshot
from areal_agent.types import Completion, ImageSpan, JsonObject, Trajectory, Turn

MAX_BATCH_TOKENS = 2_000_000
"""A row group is written once it holds this many tokens, which bounds the memory for a ledger of any size."""

SCHEMA = pa.schema(
    [
        pa.field("session_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("task_id", pa.string(), nullable=False),
        pa.field("purpose", pa.string(), nullable=False),
        pa.field("status", pa.string()),
        pa.field("fate", pa.string()),  # `trained(3)` or `dropped(stale)`; null: no fate yet, or an evaluation
        pa.field("trained_step", pa.int64()),
        pa.field("turn", pa.string(), nullable=False),
        pa.field("turn_index", pa.int32(), nullable=False),  # of the turn in its session, in the order of recording
        pa.field("parent", pa.string()),  # the completion that the turn continues
        pa.field("fork_reason", pa.string()),
        pa.field("completion_id", pa.string(), nullable=False),
        pa.field("prompt_token_ids", pa.list_(pa.int32()), nullable=False),  # the whole prompt, from the root
        pa.field(
            "images",  # in prompt_token_ids, by SHA-256
            pa.list_(pa.struct([("digest", pa.string()), ("start", pa.int32()), ("end", pa.int32())])),
            nullable=False,
        ),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),  # nats
        pa.field(
            "versions",
            pa.list_(pa.struct([("version", pa.string()), ("start", pa.int32()), ("end", pa.int32())])),
            nullable=False,
        ),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("distribution", pa.string(), nullable=False),
        pa.field("is_delivered", pa.bool_(), nullable=False),  # false: the agent never received the answer
        pa.field("reward", pa.float64()),  # of this completion
        pa.field("final_reward", pa.float64()),  # of its session
        pa.field("reward_parts", pa.map_(pa.string(), pa.float64())),
        pa.field("messages", pa.string(), nullable=False),  # JSON: the whole conversation that the completion answers
        pa.field("text", pa.string()),  # of the completion, with special tokens
        pa.field("started_s", pa.float64(), nullable=False),
        pa.field("ended_s", pa.float64(), nullable=False),
    ]
)
"""The columns. What is known only once the session has ended is null while it is open."""

Row = dict[str, Any]
"""A completion by the columns of `SCHEMA`."""


class Reader(Protocol):
    """Reads sampled ids with the tokenizer of a ledger; None where that is not there."""

    def text_of(self, token_ids: Sequence[int]) -> str | None: ...

    def conversations(self, turns: Iterable[Turn]) -> Callable[[Turn], Sequence[JsonObject]]: ...


def completions(snapshot: Snapshot, reader: Reader) -> Iterator[Row]:
    """Yield every completion: file by file, and within a file by session in the order of opening.

    Only one session is in memory at a time.
    """
    for connection in snapshot:
        for columns in connection.execute("SELECT id, group_id, task_id, purpose FROM sessions ORDER BY number"):
            of_session = dict(zip(("session_id", "group_id", "task_id", "purpose"), columns, strict=True))
            found = questions.recorded_in(connection, columns[0])
            assert found is not None
            for row in _completions_of(*found, reader):
                yield of_session | row


def _completions_of(turns: tuple[Turn, ...], ending: Trajectory | None, reader: Reader) -> Iterator[Row]:
    of_ending = _of_ending(ending)
    messages = reader.conversations(turns)
    paths: dict[str | None, NDArray[np.int32]] = {None: np.empty(0, dtype=np.int32)}  # by completion id: all tokens
    images: dict[str | None, Sequence[ImageSpan]] = {None: ()}  # by completion id: those of its path
    for turn_index, turn in enumerate(turns):
        prompt = np.concatenate([paths[turn.parent][: turn.fork_at], np.asarray(turn.new_prompt_ids, dtype=np.int32)])
        seen = turn.images_of_prompt(images[turn.parent])
        of_turn = _of_turn(turn_index, turn, prompt) | {"messages": orjson.dumps(messages(turn)).decode()}
        of_turn["images"] = [{"digest": one.digest, "start": one.start, "end": one.end} for one in seen]
        for completion in turn.completions:
            row = of_ending | of_turn | _of_completion(completion, ending)
            row["text"] = reader.text_of(completion.token_ids)
            paths[completion.id] = np.concatenate([prompt, row["token_ids"]])
            images[completion.id] = seen
            yield row


def _of_ending(ending: Trajectory | None) -> dict[str, Any]:
    if ending is None:
        return dict.fromkeys(("status", "fate", "trained_step", "final_reward", "reward_parts"))
    return {
        "status": ending.status,
        "fate": str(ending.fate) if ending.fate else None,
        "trained_step": ending.fate.trained_step if ending.fate else None,
        "final_reward": ending.rewards.final,
        "reward_parts": list(ending.rewards.parts.items()),
    }


def _of_turn(index: int, turn: Turn, prompt: NDArray[np.int32]) -> dict[str, Any]:
    return {
        "turn": turn.id,
        "turn_index": index,
        "parent": turn.parent,
        "fork_reason": turn.fork_reason,
        "prompt_token_ids": prompt,
        "started_s": turn.started_s,
        "ended_s": turn.ended_s,
    }


def _of_completion(completion: Completion, ending: Trajectory | None) -> dict[str, Any]:
    return {
        "completion_id": completion.id,
        "token_ids": np.asarray(completion.token_ids, dtype=np.int32),
        "logprobs": np.asarray(completion.logprobs, dtype=np.float32),
        "versions": [
            {"version": str(span.version), "start": span.start, "end": span.end} for span in completion.versions
        ],
        "finish_reason": completion.finish_reason,
        "distribution": completion.distribution,
        "is_delivered": ending is None or completion.id not in ending.undelivered,
        "reward": ending.rewards.by_completion.get(completion.id) if ending else None,
    }


def with_images(rows: Iterable[Row], kept: ImageFolder, target: ImageFolder) -> Iterator[Row]:
    """Yield the rows, and bring the images that they name to `target`. Raises LedgerError where one is missing."""
    done: set[str] = set()
    for row in rows:
        for digest in {one["digest"] for one in row["images"]} - done:
            target.keep(kept.read(digest))
            done.add(digest)
        yield row


def write_parquet(path: Path, rows: Iterable[Row]) -> int:
    """Write the rows to `path` and return their number. On failure, an existing file stays as it was."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with pq.ParquetWriter(scratch, SCHEMA, compression="zstd") as writer:
            num_rows = 0
            for group in _row_groups(rows):
                writer.write_batch(pa.RecordBatch.from_pylist(group, schema=SCHEMA))
                num_rows += len(group)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    return num_rows


def _row_groups(rows: Iterable[Row]) -> Iterator[Sequence[Row]]:
    group: list[Row] = []
    num_tokens = 0
    for row in rows:
        group.append(row)
        num_tokens += len(row["prompt_token_ids"]) + len(row["token_ids"])
        if num_tokens >= MAX_BATCH_TOKENS:
            yield group
            group, num_tokens = [], 0
    if group:
        yield group
