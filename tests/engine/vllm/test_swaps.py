"""New weights for a real vLLM server: the tests of SGLang's client."""

import pytest

from ..sglang.test_swaps import *  # noqa: F403

pytestmark = pytest.mark.slow
