"""`engine.urls` with vLLM (slow): a server that runs already is given the weights of the run, under its version, and
stays when it ends; one that serves another model is a ConfigError."""

import contextlib
from pathlib import Path

import pytest

from areal_agent.cluster.engines import open_engine
from areal_agent.engine.config import EngineConfig
from areal_agent.errors import ConfigError
from areal_agent.types import VersionSpan, WeightVersion

VERSION = WeightVersion(incarnation=3, step=0)

pytestmark = pytest.mark.slow


async def test_a_running_server_serves_the_run(vllm_server, vllm_other, ask, truth, tmp_path: Path):
    config = EngineConfig(backend="vllm", urls=(vllm_server,), max_context_tokens=300)
    for version in (VERSION, VERSION):  # the second is another run, which may begin at the same version
        async with open_engine(config, vllm_other, version, tmp_path) as engine:
            request = ask(1)
            result = await engine.client.generate(request)
            expected = truth(vllm_other).logprobs(request.input_ids, result.token_ids)
            assert result.logprobs == pytest.approx(expected, abs=1e-4)
            assert result.versions == (VersionSpan(version=version, start=0, end=12),)
            async with contextlib.aclosing(engine.address.connect()) as another:
                info = await another.info()
            assert (info.weight_version, info.max_context_tokens) == (version, 300)
            assert engine.servers is None


async def test_a_server_with_another_model_is_refused(vllm_server, tiny, tmp_path: Path):
    config = EngineConfig(backend="vllm", urls=(vllm_server,))
    with pytest.raises(ConfigError, match=r"engine.urls: .*publish the model that the engine loaded"):
        async with open_engine(config, tiny, VERSION, tmp_path):
            pass
