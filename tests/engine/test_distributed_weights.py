"""Weights by torch.distributed, into a real server of the embedded engine:

- they serve from the commit on; answers go on while they are sent, and spans say which weights sampled
- damaged weights leave the old version serving, and the next push works
- so does a trainer that is killed, or frozen, before or after the offer; another one may push
- each engine of a fleet is sent the weights, also one that joins later; one that hangs affects no other
- SGLang, and a device that cannot do it, are refused with the remedy; its options have no effect elsewhere
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from areal_agent.config import Config
from areal_agent.engine.client import HttpEngine
from areal_agent.engine.fleet.fleet import Fleet
from areal_agent.errors import ConfigError, WeightUpdateError
from areal_agent.types import DistributedWeights, VersionSpan, WeightVersion
from areal_agent.weights.push import push

from .sampled import Weights, assert_sampled_by, assert_swapped
from .transfers import Channels, damaged, open_channel, parameters_of

OLD, NEW, NEXT = (WeightVersion(step=step) for step in (7, 8, 9))

TRAINER = """
import dataclasses, json, sys, torch
from pathlib import Path
from safetensors.torch import load_file
from areal_agent.weights.channels import DistributedChannel
from areal_agent.weights.channels import layout

parameters = load_file(Path(sys.argv[1]) / "model.safetensors")
entries = layout(parameters.items(), torch.float32)
channel = DistributedChannel(entries, torch.device("cpu"), host="127.0.0.1", bucket_bytes=2**16)
print(json.dumps(dataclasses.asdict(channel.write(parameters))), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def channel(tiny: Path) -> Iterator[Channels]:
    with open_channel(tiny) as channel:
        yield channel


async def test_answers_go_on_while_it_is_sent_and_under_it(channel, tiny, other, served, ask, truth):
    request = ask(1, max_tokens=40)
    served.gate.shut()
    answer = asyncio.ensure_future(served.engine.generate(request))
    await served.gate.steps(5)
    await served.engine.begin_push("p")
    await served.engine.send_push("p", channel.write(parameters_of(other)))
    await served.gate.steps(5)
    await served.gate.meanwhile(served.engine.commit_push("p", NEW))
    served.gate.open()
    result = await answer
    old, new = Weights(model=tiny, version=OLD), Weights(model=other, version=NEW)
    assert assert_swapped(old, new, request, result, truth) >= 10


async def test_what_is_damaged_leaves_the_old_version_serving(channel, other, served, ask):
    before = await served.engine.generate(ask(1))
    weights = channel.write(parameters_of(other))
    with pytest.raises(WeightUpdateError, match="checksum"):
        await push([served.engine], damaged(weights), NEW)
    after = await served.engine.generate(ask(1))
    assert (after.token_ids, after.versions) == (before.token_ids, before.versions)
    await push([served.engine], weights, NEW)
    assert (await served.engine.info()).weight_version == NEW


@contextlib.contextmanager
def trainer_process(folder: Path) -> Iterator[tuple[subprocess.Popen[str], DistributedWeights]]:
    """A trainer process that has made an offer."""
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        yield process, TypeAdapter(DistributedWeights).validate_python(told)
    finally:
        process.kill()
        process.communicate()


async def test_a_trainer_that_hangs_or_is_gone_leaves_the_old_version_serving(channel, other, served, ask):
    with trainer_process(other) as (process, weights):
        for blow in (signal.SIGSTOP, signal.SIGKILL):
            os.kill(process.pid, blow)
            with pytest.raises(WeightUpdateError, match="did not send the weights"):
                await push([served.engine], dataclasses.replace(weights, timeout_s=0.5), NEW)
            assert (await served.engine.generate(ask(2))).versions == (VersionSpan(version=OLD, start=0, end=12),)
    await push([served.engine], channel.write(parameters_of(other)), NEW)
    assert (await served.engine.info()).weight_version == NEW


async def test_engines_of_a_fleet_are_sent_it_each_and_a_late_one_alone(channel, tiny, other, serve, ask, truth):
    async with serve(tiny) as one, serve(tiny) as two, serve(tiny) as late:
        fleet = Fleet([one.engine.base_url, two.engine.base_url], HttpEngine)
        async with contextlib.aclosing(fleet):
            await push([fleet], channel.write(parameters_of(other)), NEW)
            await fleet.add(late.engine.base_url)
            for served in (one, two, late):
                result = await served.engine.generate(ask(1))
                assert_sampled_by(Weights(model=other, version=NEW), ask(1), result, truth)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {
                "trainer": {"transfer": "distributed"},
                "engine": {"backend": "sglang", "python": "p", "server_args": ["--pp-size=2"]},
            },
            r"'distributed', which SGLang does not support with --pp-size in engine\.server_args",
        ),
        ({"trainer": {"transfer_host": "10.0.0.1"}}, "transfer_host only applies to trainer.transfer distributed"),
        ({"trainer": {"transfer_bucket_mib": 8}}, "transfer_bucket_mib only applies to trainer.transfer distributed"),
        ({"trainer": {"transfer": "distributed", "transfer_bucket_mib": 0}}, "transfer_bucket_mib"),
    ],
)
def test_what_cannot_be_is_refused(section, message):
    with pytest.raises(ConfigError, match=message):
        Config.parse({"tasks": "module:tasks", **section})
