"""Attention over pages:

- by a kernel that reads pages where they lie, it is that of gathered pages
- gathered a few rows, or masked a few tokens at a time, it is that of all at once
- a kernel that is off, that fails or that is not to be had is not taken but undone, and the log says so
"""

import logging
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from areal_agent.engine.embedded.kv_cache import KVShape
from areal_agent.engine.embedded.paged.attention import Flash, Gathered
from areal_agent.engine.embedded.paged.best_attention import Trial, best_attention, proved
from areal_agent.engine.embedded.paged.pool import PAGE_TOKENS

SHAPE = KVShape(num_layers=3, num_kv_heads=2, head_dim=8)
CPU = torch.device("cpu")


def plain_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
) -> Tensor:
    """What PyTorch documents of `varlen_attn`, one query at a time."""
    assert window_size == (-1, 0) and enable_gqa and cu_seq_k is None
    assert all(one.dtype is torch.int32 for one in (cu_seq_q, seqused_k, block_table))
    assert max_k >= int(seqused_k.max())
    output = torch.empty_like(query)
    group = query.shape[1] // key.shape[2]
    for row, (start, stop) in enumerate(pairwise(cu_seq_q)):
        assert stop - start <= max_q
        keys, values = (part[block_table[row].long()].flatten(0, 1) for part in (key, value))
        for token in range(int(start), int(stop)):
            seen = int(seqused_k[row]) - (int(stop) - 1 - token)
            for head in range(query.shape[1]):
                scores = keys[:seen, head // group] @ query[token, head] / query.shape[2] ** 0.5
                output[token, head] = scores.softmax(0) @ values[:seen, head // group]
    return output


@pytest.fixture
def trial() -> Trial:
    return Trial(SHAPE, num_heads=4, device=CPU, dtype=torch.float32)


def test_a_kernel_that_reads_pages_where_they_lie_answers_as_gathered_pages(trial):
    assert trial.error(Flash(plain_kernel), trial.outputs(Gathered())) < 1e-5


def test_a_few_rows_at_a_time_answer_as_all_at_once(trial):
    two_rows_of_four_pages = 2 * 4 * 2 * PAGE_TOKENS * SHAPE.num_kv_heads * SHAPE.head_dim * 4
    three_tokens_over_four_pages = 3 * 2 * 4 * PAGE_TOKENS * 4
    for most_bytes in (1, three_tokens_over_four_pages, two_rows_of_four_pages):
        assert trial.error(Gathered(most_bytes=most_bytes), trial.outputs(Gathered())) < 1e-6


class Undone:
    """Counts how often the kernel was given up."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


@pytest.fixture
def undo() -> Undone:
    return Undone()


def test_a_kernel_that_is_right_is_taken(trial, undo, caplog):
    caplog.set_level(logging.INFO)
    assert isinstance(proved(lambda: Flash(plain_kernel), undo, trial), Flash)
    assert "FlashAttention 3, off by" in caplog.text and not undo.times


@pytest.mark.parametrize("factors", [(1.2, 1.2), (1.0, float("nan")), (float("nan"), 1.0)])
def test_a_kernel_that_is_off_is_not_taken(factors, trial, undo, caplog):
    of_prefill, of_decode = factors

    def off(query: Tensor, *args: object, **options: object) -> Tensor:
        is_decode = args[4] == 1
        return plain_kernel(query, *args, **options) * (of_decode if is_decode else of_prefill)

    assert isinstance(proved(lambda: Flash(off), undo, trial), Gathered)
    assert "FlashAttention 3 is off by" in caplog.text and undo.times == 1


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("no kernel image"),
        TypeError("unexpected keyword 'block_table'"),
        AttributeError("no attribute 'activate_flash_attention_impl'"),
    ],
)
def test_a_kernel_that_fails_is_not_taken(error, trial, undo, caplog):
    def failing(*args: object, **options: object) -> Tensor:
        raise error

    caplog.set_level(logging.INFO)
    assert isinstance(proved(lambda: Flash(failing), undo, trial), Gathered)
    assert str(error) in caplog.text and undo.times == 1


def test_where_there_is_none_pages_are_gathered(trial, caplog):
    caplog.set_level(logging.INFO)
    assert isinstance(proved(Flash.of_torch, Flash.undo, trial), Gathered)
    assert "is not to be had" in caplog.text
    assert isinstance(best_attention(SHAPE, num_heads=4, device=CPU, dtype=torch.float32), Gathered)
