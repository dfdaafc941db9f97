"""A real vLLM server that was started with a key: every call but `/health` has to show it (slow)."""

from contextlib import aclosing

import aiohttp
import pytest

from areal_agent.cluster.servers import start_vllm
from areal_agent.engine.address import KEY_VARIABLE
from areal_agent.engine.config import EngineConfig
from areal_agent.engine.foreign.engine import ForeignEngine
from areal_agent.engine.vllm.server import COLLECTIVE_RPC, VllmServer

from ..servers import BEGUN_WITH, STARTUP_S
from .conftest import ON_CPU


@pytest.mark.slow
async def test_who_has_no_key_is_refused(vllm_python, vllm_model, tmp_path, ask, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "sk-of-this-engine")
    config = EngineConfig.model_validate({**ON_CPU, "python": vllm_python, "startup_timeout_s": STARTUP_S})
    async with start_vllm(config, vllm_model, BEGUN_WITH, tmp_path) as servers, aiohttp.ClientSession() as stranger:
        (url,) = servers.urls
        for path, status in (("/health", 200), ("/v1/models", 401), (COLLECTIVE_RPC, 401), ("/metrics", 401)):
            assert (await stranger.get(url + path)).status == status
        async with aclosing(ForeignEngine(VllmServer(url, key="sk-of-this-engine"))) as engine:
            assert (await engine.generate(ask(1))).token_ids
