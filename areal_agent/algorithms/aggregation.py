"""What one loss token counts: weights over a whole optimiser update, fixed before it is split. Pure; imports no torch.

The loss of an update is sum_t w_t l_t. As the weights do not depend on how the update is split into micro-batches,
neither do its loss and its gradient. A rollout that has forked into several sequences counts once.
"""

from collections import Counter
from collections.abc import Sequence

from areal_agent.algorithms.config import AlgorithmConfig


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
            assert config.aggregation_tokens is not None  # the config has seen to it
            return [1.0 / (num_rollouts * config.aggregation_tokens) for _ in rollouts]
