"""A real SGLang server on a Ray cluster, whose node dies (full).

It is started on another node, under another URL, and serves once it has the weights that were pushed last, which it is
sent by torch.distributed. It refuses who has no key.
"""

import asyncio
from contextlib import aclosing

import pytest

from areal_agent.cluster.engines import open_engine
from areal_agent.cluster.ray_hosts import open_hosts
from areal_agent.engine.config import EngineConfig
from areal_agent.engine.foreign.engine import ForeignEngine
from areal_agent.engine.sglang.server import SglangServer
from areal_agent.errors import EngineRejected
from areal_agent.rollout.config import RolloutConfig
from areal_agent.types import WeightVersion
from areal_agent.weights.push import push
from tests.cluster.test_ray import cluster, config_of

from ..sampled import Weights, assert_sampled_by
from ..servers import BEGUN_WITH, FLEET_S, STARTUP_S
from ..transfers import open_channel, parameters_of
from .conftest import ON_CPU

pytestmark = [pytest.mark.slow, pytest.mark.full]
__all__ = ["cluster"]  # a fixture

ROOM = {"num_cpus": 3}  # more than the head has


async def test_a_server_whose_node_dies_serves_elsewhere(
    cluster, sglang_python, real_model, real_other, tmp_path, ask, truth
):
    settings = {**ON_CPU, "python": sglang_python, "threads": 3, "startup_timeout_s": STARTUP_S, "wait_s": STARTUP_S}
    config = EngineConfig.model_validate(settings)
    new = Weights(model=real_other, version=WeightVersion(step=BEGUN_WITH.step + 1))
    node = cluster.add_node(**ROOM)
    cluster.wait_for_nodes()
    async with (
        asyncio.timeout(FLEET_S),
        open_hosts(config_of(cluster), config, RolloutConfig(), shared=[real_model]) as hosts,
        open_engine(config, real_model, BEGUN_WITH, tmp_path, hosts) as engine,
    ):
        (first,) = engine.urls
        async with aclosing(ForeignEngine(SglangServer(first))) as stranger:
            with pytest.raises(EngineRejected, match="AREAL_AGENT_ENGINE_KEY"):
                await stranger.info()
        with open_channel(real_model) as channel:
            await push([engine.client], channel.write(parameters_of(real_other)), new.version)
            cluster.add_node(**ROOM)
            cluster.remove_node(node, allow_graceful=False)
            while first in engine.urls:
                await engine.client.roster.changed()
        assert_sampled_by(new, ask(1), await engine.client.generate(ask(1)), truth)
