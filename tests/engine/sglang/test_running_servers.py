"""`engine.urls`: running servers get the weights of the run, under its version, and stay when it ends; a missing one,
or one with another model, is a ConfigError.
"""

import contextlib
from pathlib import Path

import pytest

from areal_agent.cluster.engines import open_engine
from areal_agent.engine.config import EngineConfig
from areal_agent.errors import ConfigError
from areal_agent.types import WeightVersion

from ..sampled import Weights, assert_sampled_by

VERSION = WeightVersion(incarnation=3, step=0)


@pytest.mark.slow
async def test_a_running_server_serves_the_run(running, ask, truth, tmp_path: Path):
    config, model = running
    for version in (VERSION, VERSION):  # the second is another run, which may begin at the same version
        async with open_engine(config, model, version, tmp_path) as engine:
            request = ask(1)
            result = await engine.client.generate(request)
            assert_sampled_by(Weights(model=model, version=version), request, result, truth)
            async with contextlib.aclosing(engine.address.connect()) as another:
                info = await another.info()
            assert (info.weight_version, info.max_context_tokens) == (version, 300)
            assert engine.servers is None


@pytest.mark.slow
async def test_a_server_with_another_model_is_refused(running, tiny, tmp_path: Path):
    config, _ = running
    with pytest.raises(ConfigError, match=r"engine.urls: .*publish the model that the engine loaded"):
        async with open_engine(config, tiny, VERSION, tmp_path):
            pass


async def test_a_server_that_is_not_there(unused_tcp_port, tiny, tmp_path: Path):
    config = EngineConfig(urls=(f"http://127.0.0.1:{unused_tcp_port}",), startup_timeout_s=0.2)
    with pytest.raises(ConfigError, match=r"engine.urls: .*did not serve within 0\.2 s"):
        async with open_engine(config, tiny, VERSION, tmp_path):
            pass
