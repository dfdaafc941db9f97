"""What a run asks of an engine, in front of a real vLLM server: the contract of SGLang's client, word for word."""

import pytest

from ..sglang.test_contract import *  # noqa: F403

pytestmark = pytest.mark.slow
