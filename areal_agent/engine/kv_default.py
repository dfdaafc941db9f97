"""How many tokens' keys and values the embedded engine keeps when nobody says. Pure arithmetic; imports no torch."""

GPU_SHARE = 0.5
"""Of the memory that is free when the model has been loaded, unless it is said what to leave; the rest is for
activations, and for a trainer."""

CPU_SHARE = 0.25
"""Of the machine's memory, unless it is said what to leave free."""

CONTEXTS_A_SLOT = 2
"""As many contexts are kept for each request that may run: its own, and one that has ended, to be continued."""


def default_kv_tokens(
    *,
    is_gpu: bool,
    free_bytes: int,
    all_bytes: int,
    leave_bytes: int | None,
    num_sharing: int,
    token_bytes: int,
    num_slots: int,
    max_context_tokens: int,
) -> int:
    """What fits into a share of a device that has `all_bytes`, or into all that is free but `leave_bytes`: the part of
    one of `num_sharing` engines on this device.

    >>> [default_kv_tokens(is_gpu=False, free_bytes=3000, all_bytes=4000, leave_bytes=None, num_sharing=number,
    ...                    token_bytes=10, num_slots=4, max_context_tokens=20) for number in (1, 2)]
    [100, 50]
    """
    if leave_bytes is not None:
        room = free_bytes - leave_bytes
    else:
        room = GPU_SHARE * free_bytes if is_gpu else CPU_SHARE * all_bytes
    fitting = max(0, int(room)) // num_sharing // token_bytes
    return min(fitting, CONTEXTS_A_SLOT * num_slots * max_context_tokens)
