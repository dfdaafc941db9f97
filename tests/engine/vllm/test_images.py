"""Images in front of a real vLLM server of a vision model: the tests of SGLang's."""

import pytest

from areal_agent.cluster.servers import start_vllm
from areal_agent.engine.vllm.server import VllmServer

from ..servers import running_server
from ..sglang.test_images import *  # noqa: F403
from ..sglang.test_images import ON_CPU

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def vision_server(vllm_python, models, tmp_path_factory):
    logs = tmp_path_factory.mktemp("vllm")
    with running_server(start_vllm, vllm_python, models[0], logs, backend="vllm", **ON_CPU) as url:
        yield VllmServer, url
