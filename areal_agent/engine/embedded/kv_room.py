"""How many tokens' keys and values an engine keeps, and how many requests may run at once for that. Pure arithmetic.

On a CPU a slot costs what is written in it, so slots are as many as asked for and the tokens are what is bounded. On
a GPU every slot takes its whole context at once, and what ended requests leave for others to begin with is beside that:
where memory is short there are fewer slots, which take half of it.
"""

import os
from dataclasses import dataclass

import torch

from areal_agent.engine.kv_default import CONTEXTS_A_SLOT, default_kv_tokens
from areal_agent.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class KVRoom:
    """`kv_tokens` are kept at most, in slots and in the prefix cache together."""

    num_slots: int
    kv_tokens: int
    reserved_tokens: int  # of them, taken by slots whether or not anything is there


def plan_room(
    *,
    num_slots: int,
    max_context_tokens: int,
    kv_tokens: int | None,
    leave_bytes: int | None,
    token_bytes: int,
    device: torch.device,
) -> KVRoom:
    """What was asked for, or what fits when `leave_bytes` stay free. Raises ConfigError where not even one context
    does."""
    if kv_tokens is None:
        kv_tokens = default_kv_tokens(
            is_gpu=device.type == "cuda",
            free_bytes=_free_bytes(device) if device.type == "cuda" or leave_bytes is not None else 0,  # else not asked
            all_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            leave_bytes=leave_bytes,
            token_bytes=token_bytes,
            num_slots=num_slots,
            max_context_tokens=max_context_tokens,
        )
        remedy = "lower max_context_tokens or leave_gib, or free memory"
    else:
        remedy = "raise kv_tokens, or lower max_context_tokens"
    if kv_tokens < max_context_tokens:
        raise ConfigError(
            f"there is room for the keys and values of {kv_tokens} tokens ({token_bytes} bytes each), and one request "
            f"may take max_context_tokens = {max_context_tokens}; {remedy}"
        )
    if device.type != "cuda":
        return KVRoom(num_slots=num_slots, kv_tokens=kv_tokens, reserved_tokens=0)
    num_slots = min(num_slots, max(1, kv_tokens // (CONTEXTS_A_SLOT * max_context_tokens)))
    return KVRoom(num_slots=num_slots, kv_tokens=kv_tokens, reserved_tokens=num_slots * max_context_tokens)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
