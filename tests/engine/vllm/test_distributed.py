"""Weights by torch.distributed, into the workers of a real vLLM server: what SGLang's is tested on, word for word."""

import pytest

from ..sglang.test_distributed import *  # noqa: F403

pytestmark = pytest.mark.slow
