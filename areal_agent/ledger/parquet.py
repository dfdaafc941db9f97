"""Writes an export to a Parquet file, completely or not at all. Needs the extra `parquet`."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from areal_agent.ledger.export import CompletionExport
from areal_agent.types import VersionSpan

MAX_BATCH_TOKENS = 2_000_000
"""A row group is written once it holds this many tokens, which bounds the memory for a ledger of any size."""

SCHEMA = pa.schema(
    [
        pa.field("session_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("task_id", pa.string(), nullable=False),
        pa.field("purpose", pa.string(), nullable=False),
        pa.field("status", pa.string()),
        pa.field("fate", pa.string()),
        pa.field("trained_step", pa.int64()),
        pa.field("turn", pa.string(), nullable=False),
        pa.field("turn_index", pa.int32(), nullable=False),
        pa.field("parent", pa.string()),
        pa.field("fork_reason", pa.string()),
        pa.field("completion_id", pa.string(), nullable=False),
        pa.field("prompt_token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field(
            "versions",
            pa.list_(pa.struct([("version", pa.string()), ("start", pa.int32()), ("end", pa.int32())])),
            nullable=False,
        ),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("distribution", pa.string(), nullable=False),
        pa.field("is_delivered", pa.bool_(), nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("final_reward", pa.float64()),
        pa.field("reward_parts", pa.map_(pa.string(), pa.float64())),
        pa.field("messages", pa.string(), nullable=False),
        pa.field("started_s", pa.float64(), nullable=False),
        pa.field("ended_s", pa.float64(), nullable=False),
    ]
)
"""The fields of `CompletionExport`, in their order."""


def write_parquet(path: Path, exports: Iterable[CompletionExport]) -> int:
    """Write the rows to `path` and return their number. On failure, an existing file stays as it was."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with pq.ParquetWriter(scratch, SCHEMA, compression="zstd") as writer:
            num_rows = 0
            for rows in _row_groups(exports):
                writer.write_batch(_record_batch(rows))
                num_rows += len(rows)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    return num_rows


def _row_groups(exports: Iterable[CompletionExport]) -> Iterator[Sequence[CompletionExport]]:
    rows: list[CompletionExport] = []
    num_tokens = 0
    for export in exports:
        rows.append(export)
        num_tokens += len(export.prompt_token_ids) + len(export.token_ids)
        if num_tokens >= MAX_BATCH_TOKENS:
            yield rows
            rows, num_tokens = [], 0
    if rows:
        yield rows


def _record_batch(rows: Sequence[CompletionExport]) -> Any:
    columns = [pa.array([_value(getattr(row, field.name)) for row in rows], type=field.type) for field in SCHEMA]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _value(value: Any) -> Any:
    """A field's value as pyarrow takes it: a mapping as pairs, version spans as dicts."""
    if isinstance(value, Mapping):
        return list(cast(Mapping[str, float], value).items())
    if isinstance(value, tuple):
        return [_span(span) for span in cast(tuple[VersionSpan, ...], value)]
    return value


def _span(span: VersionSpan) -> dict[str, Any]:
    return {"version": str(span.version), "start": span.start, "end": span.end}
