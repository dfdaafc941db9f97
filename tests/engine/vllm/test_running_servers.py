"""`engine.urls` with a real vLLM server (slow): what SGLang's servers do, word for word."""

import pytest

pytestmark = pytest.mark.slow
