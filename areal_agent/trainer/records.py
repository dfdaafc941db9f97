"""A train step's records as arrays for a frame, and back. It knows the fields of TokenRecord and nothing of sockets.

Equal fields of all records are concatenated: one array a field, however many records there are.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_agent.trainer.framing import Arrays
from areal_agent.types import JsonObject, TokenRecord

PER_TOKEN = ("token_ids", "loss_mask", "turn_index", "behavior_logprobs", "temperatures", "versions", "incarnations")
PER_TURN = ("turn_rewards",)
DTYPES = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "turn_index": np.int32,
    "behavior_logprobs": np.float32,
    "temperatures": np.float32,
    "versions": np.int32,
    "incarnations": np.int32,
    "turn_rewards": np.float32,
}


def encode_records(records: Sequence[TokenRecord]) -> tuple[list[JsonObject], Arrays]:
    """The records' names and lengths, and their arrays."""
    names: list[JsonObject] = [
        {
            "session_id": record.session_id,
            "group_id": record.group_id,
            "branch": record.branch,
            "parent_branch": record.parent_branch,
            "final_reward": record.final_reward,
            "fork_turn": record.fork_turn,
            "own_turn": record.own_turn,
            "sample_of": record.sample_of,
            "num_tokens": len(record.token_ids),
            "num_turns": len(record.turn_rewards),
        }
        for record in records
    ]
    if not records:
        return names, {}
    arrays = {
        field: np.concatenate([getattr(record, field) for record in records]).astype(DTYPES[field], copy=False)
        for field in DTYPES
    }
    return names, arrays


def decode_records(names: Sequence[JsonObject], arrays: Arrays) -> tuple[TokenRecord, ...]:
    """The inverse of `encode_records`."""
    tokens = np.cumsum([0, *(name["num_tokens"] for name in names)])
    turns = np.cumsum([0, *(name["num_turns"] for name in names)])
    return tuple(
        TokenRecord(
            session_id=name["session_id"],
            group_id=name["group_id"],
            branch=name["branch"],
            parent_branch=name["parent_branch"],
            final_reward=name["final_reward"],
            fork_turn=name["fork_turn"],
            own_turn=name["own_turn"],
            sample_of=name["sample_of"],
            **_slices(arrays, PER_TOKEN, slice(tokens[index], tokens[index + 1])),
            **_slices(arrays, PER_TURN, slice(turns[index], turns[index + 1])),
        )
        for index, name in enumerate(names)
    )


def _slices(arrays: Arrays, fields: Sequence[str], part: slice) -> dict[str, NDArray[Any]]:
    return {field: arrays[field][part] for field in fields}
