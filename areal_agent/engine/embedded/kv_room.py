"""How many tokens' keys and values an engine keeps. Pure arithmetic."""

import os

import torch

from areal_agent.engine.kv_default import default_kv_tokens
from areal_agent.errors import ConfigError


def plan_room(
    *,
    num_slots: int,
    max_context_tokens: int,
    kv_tokens: int | None,
    leave_bytes: int | None,
    token_bytes: int,
    device: torch.device,
    num_sharing: int = 1,
) -> int:
    """As many as was asked for, or what fits when `leave_bytes` stay free: the part of one of `num_sharing` engines on
    the device. Raises ConfigError where not even one
    context does."""
    if kv_tokens is None:
        kv_tokens = default_kv_tokens(
            is_gpu=device.type == "cuda",
            free_bytes=_free_bytes(device) if device.type == "cuda" or leave_bytes is not None else 0,  # else not asked
            all_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            leave_bytes=leave_bytes,
            num_sharing=num_sharing,
            token_bytes=token_bytes,
            num_slots=num_slots,
            max_context_tokens=max_context_tokens,
        )
        remedy = "lower max_context_tokens or leave_gib, or free memory"
        remedy += f", or let fewer than {num_sharing} engines share it" if num_sharing > 1 else ""
    else:
        remedy = "raise kv_tokens, or lower max_context_tokens"
    if kv_tokens < max_context_tokens:
        raise ConfigError(
            f"there is room for the keys and values of {kv_tokens} tokens ({token_bytes} bytes each), and one request "
            f"may take max_context_tokens = {max_context_tokens}; {remedy}"
        )
    return kv_tokens


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading has left: torch keeps it, and other processes would seem to have it
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
