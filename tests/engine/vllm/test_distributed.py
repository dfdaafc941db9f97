"""Weights by torch.distributed, into the workers of a real vLLM server: the tests of SGLang's."""

import pytest

from ..sglang.test_distributed import *  # noqa: F403

pytestmark = pytest.mark.slow
