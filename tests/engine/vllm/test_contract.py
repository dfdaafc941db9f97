"""The contract of an engine, new weights, also by torch.distributed into its workers, and `engine.urls`, in front of a
real vLLM server: the tests of SGLang's.
"""

import pytest

from ..sglang.test_contract import *  # noqa: F403
from ..sglang.test_distributed import *  # noqa: F403
from ..sglang.test_online import (  # noqa: F401
    test_a_running_server_serves_the_run,
    test_a_server_with_another_model_is_refused,
)
from ..sglang.test_swaps import *  # noqa: F403

pytestmark = pytest.mark.slow
