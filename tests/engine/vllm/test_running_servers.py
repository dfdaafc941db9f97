"""`engine.urls` with a real vLLM server (slow): the tests of SGLang's servers."""

import pytest

from ..sglang.test_running_servers import (  # noqa: F401
    test_a_running_server_serves_the_run,
    test_a_server_with_another_model_is_refused,
)

pytestmark = pytest.mark.slow
