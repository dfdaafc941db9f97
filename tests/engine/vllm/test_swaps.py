"""New weights for a real vLLM server: the contract of SGLang's client, word for word."""

import pytest

from ..sglang.test_swaps import *  # noqa: F403

pytestmark = pytest.mark.slow
