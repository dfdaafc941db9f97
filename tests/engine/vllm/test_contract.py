"""The contract of an engine in front of a real vLLM server: the tests of SGLang's client."""

import pytest

from ..sglang.test_contract import *  # noqa: F403

pytestmark = pytest.mark.slow
