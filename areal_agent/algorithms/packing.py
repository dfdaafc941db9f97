"""Packing sequences into micro-batches, dealing these to ranks, and weighting tokens. Pure functions; no torch.

Every index is in exactly one micro-batch. A sequence longer than the budget is alone. Sequences are taken by falling
length, so the result depends on the lengths and not on their order. Token weights are fixed for a whole optimiser
update before it is split, so neither its loss sum_t w_t l_t nor its gradient depends on the split.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from areal_agent.algorithms.config import AlgorithmConfig

MAX_PADDING = 0.05
"""The largest fraction of a padded row that may be padding; sequences of like length go together, outliers alone."""


def balanced(lengths: Sequence[int], token_budget: int, *, at_least: int = 1) -> list[list[int]]:
    """Algorithm 1 of AReaL (arXiv 2505.24298): at most `token_budget` tokens each, about as many sequences each.

    A sequence opens a new micro-batch while there are fewer than `at_least` or none fits; otherwise it joins the
    fitting one with the fewest sequences.

    >>> balanced([5, 8, 2, 7, 3, 4], 16, at_least=2)  # 8 | 7, then 5 joins 8, 4 joins 7, 3 joins 8, 2 joins 7
    [[1, 0, 4], [3, 5, 2]]
    """
    micro_batches: list[list[int]] = []
    tokens: list[int] = []
    for index in _falling(lengths):
        fitting = [one for one, used in enumerate(tokens) if used + lengths[index] <= token_budget]
        if len(micro_batches) < at_least or not fitting:
            micro_batches.append([index])
            tokens.append(lengths[index])
        else:
            chosen = min(fitting, key=lambda one: len(micro_batches[one]))
            micro_batches[chosen].append(index)
            tokens[chosen] += lengths[index]
    return micro_batches


def first_fit(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """First-fit decreasing: a sequence joins the first micro-batch with room. Close to the smallest possible number.

    >>> first_fit([5, 8, 2, 7, 3, 4], 16)
    [[1, 3], [0, 5, 4, 2]]
    """
    micro_batches: list[list[int]] = []
    tokens: list[int] = []
    for index in _falling(lengths):
        place = next((one for one, used in enumerate(tokens) if used + lengths[index] <= token_budget), None)
        if place is None:
            micro_batches.append([index])
            tokens.append(lengths[index])
        else:
            micro_batches[place].append(index)
            tokens[place] += lengths[index]
    return micro_batches


def alike(lengths: Sequence[int], token_budget: int, *, max_padding: float = MAX_PADDING) -> list[list[int]]:
    """Group sequences of like length, for rows that are padded to the longest of their micro-batch.

    The budget includes padding, and the padding of a sequence is at most `max_padding` of its row.

    >>> alike([100, 50, 98, 49], 1000)
    [[0, 2], [1, 3]]
    """
    micro_batches: list[list[int]] = []
    for index in _falling(lengths):
        width = lengths[micro_batches[-1][0]] if micro_batches else 0
        has_room = bool(micro_batches) and (len(micro_batches[-1]) + 1) * width <= token_budget
        if has_room and lengths[index] >= (1.0 - max_padding) * width:
            micro_batches[-1].append(index)
        else:
            micro_batches.append([index])
    return micro_batches


def siblings(lengths: Sequence[int], overlaps: Sequence[int], token_budget: int) -> list[list[int]]:
    """Cut a trie's sequences, in its order, into micro-batches: fewest positions in all, then fewest micro-batches.

    Sequence i has `overlaps[i]` first tokens in common with the one before; within a micro-batch they are one position.

    >>> siblings([5, 6, 4, 5], [0, 4, 0, 3], 10)
    [[0, 1], [2, 3]]
    """
    best = [(0, 0, 0)]  # for each number of first sequences: positions, micro-batches, where the last of these begins
    for end in range(1, len(lengths) + 1):
        found: list[tuple[int, int, int]] = []
        size = 0
        for start in range(end - 1, -1, -1):
            size += lengths[start] - (overlaps[start + 1] if start + 1 < end else 0)
            if size > token_budget and found:
                break
            found.append((best[start][0] + size, best[start][1] + 1, start))
        best.append(min(found))
    micro_batches: list[list[int]] = []
    end = len(lengths)
    while end:
        micro_batches.append(list(range(best[end][2], end)))
        end = best[end][2]
    return micro_batches[::-1]


def deal(
    micro_batches: Sequence[Sequence[int]], lengths: Sequence[int], num_ranks: int, overlaps: Sequence[int] = ()
) -> list[list[list[int]]]:
    """Return the micro-batches of each rank, equally many, because ranks run each forward pass together.

    With `overlaps`, of a trie's order, what sequences of a micro-batch have in common counts once (`siblings`).

    The largest micro-batches are halved until their number divides, and any gap is filled with empty ones.
    Micro-batches of neighbouring size run at the same time, and a rank that had the largest of one round has the
    smallest of the next.

    >>> deal([[0], [1], [2]], [4, 5, 6], 2)
    [[[2], []], [[1], [0]]]
    """
    parts = [list(one) for one in micro_batches]

    def size(part: list[int]) -> int:
        return sum(lengths[index] for index in part) - sum(overlaps[index] for index in part[1:] if overlaps)

    while len(parts) % num_ranks and (halvable := [one for one in parts if len(one) > 1]):
        largest = max(halvable, key=size)
        parts.remove(largest)
        parts += _halves(largest, lengths, overlaps)
    parts += [[] for _ in range(-len(parts) % num_ranks)]
    parts.sort(key=lambda one: (-size(one), one))
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for number, start in enumerate(range(0, len(parts), num_ranks)):
        turn = parts[start : start + num_ranks]
        for rank, part in zip(ranks, turn if number % 2 == 0 else turn[::-1], strict=True):
            rank.append(part)
    return ranks


def _falling(lengths: Sequence[int]) -> list[int]:
    """Return the indices by falling length."""
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


def _halves(indices: list[int], lengths: Sequence[int], overlaps: Sequence[int]) -> tuple[list[int], list[int]]:
    """Cut in two parts of which the larger one is as small as can be, neither empty."""
    shared = [overlaps[index] if overlaps else 0 for index in indices]
    ends = list(accumulate(lengths[index] - once for index, once in zip(indices, shared, strict=True)))
    rest = [ends[-1] - end for end in ends]
    cut = min(range(1, len(indices)), key=lambda place: max(ends[place - 1], rest[place - 1] + shared[place]))
    return indices[:cut], indices[cut:]


def token_weights(num_loss_tokens: Sequence[int], rollouts: Sequence[str], config: AlgorithmConfig) -> list[float]:
    """The weight of each loss token of each sequence; all tokens of a sequence weigh the same.

    With N loss tokens and R rollouts in the update, and n_i loss tokens in all sequences of rollout i:
    token_mean 1 / N (DAPO, arXiv 2503.14476); sequence_mean 1 / (R n_i) (GRPO, arXiv 2402.03300);
    constant 1 / (R aggregation_tokens) (Dr. GRPO, arXiv 2503.20783). Rollouts without a loss token do not
    count. Shapes: [S] numbers of loss tokens and [S] names of rollouts -> [S].

    >>> token_weights([1, 3, 4], ["a", "a", "b"], AlgorithmConfig(aggregation="sequence_mean"))
    [0.125, 0.125, 0.125]
    """
    by_rollout: Counter[str] = Counter()
    for count, rollout in zip(num_loss_tokens, rollouts, strict=True):
        by_rollout[rollout] += count
    num_tokens = max(by_rollout.total(), 1)
    num_rollouts = max(sum(count > 0 for count in by_rollout.values()), 1)
    match config.aggregation:
        case "token_mean":
            return [1.0 / num_tokens for _ in rollouts]
        case "sequence_mean":
            return [1.0 / (num_rollouts * max(by_rollout[rollout], 1)) for rollout in rollouts]
        case "constant":
            assert config.aggregation_tokens is not None  # the config requires it
            return [1.0 / (num_rollouts * config.aggregation_tokens) for _ in rollouts]
