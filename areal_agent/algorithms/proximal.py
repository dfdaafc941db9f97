"""The proximal policy without a forward pass. Pure function."""

from torch import Tensor


def approximate_proximal(logprobs: Tensor, behavior: Tensor, versions: Tensor, start_version: int) -> Tensor:
    """Log-probabilities at the start of the step, on the line between the policy that sampled and the current one.

    log p_prox = log p_behav + a (log p_theta - log p_behav),  a = d / (d + 1),  d = start_version - version >= 0.
    Versions count steps, and the current policy is on its way to start_version + 1: a token of age 0 was sampled by the
    proximal policy itself, an old one is close to the current. The idea is that of A-3PO (arXiv 2512.06547).
    Detached. Shapes: [M], [M], [M] -> [M].
    """
    assert logprobs.shape == behavior.shape == versions.shape, (logprobs.shape, behavior.shape, versions.shape)
    age = (start_version - versions).clamp_min(0).to(logprobs.dtype)
    return behavior + age / (age + 1.0) * (logprobs.detach() - behavior)
