"""Adapters for a real vLLM server, which applies them to its model as it samples (slow):

- it begins with adapters that change nothing
- retract: tokens after the swap are the new adapters', and the spans say from which token on
- in place: requests go on with their old keys and values; the spans say which adapters sampled
- adapters that do not fit are refused here, those that the server refuses are undone; the next push works
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_agent.engine.foreign.weight_folders import AdapterForm, begin_adapter, read_shapes
from areal_agent.engine.vllm.server import VllmServer
from areal_agent.errors import WeightUpdateError
from areal_agent.types import DiskWeights
from areal_agent.weights.channels import DiskChannel

from ..sampled import assert_sampled_by
from ..sglang.conftest import DEADLINE_S, Stage, open_stage
from ..sglang.test_swaps import (  # noqa: F401
    test_a_request_that_was_frozen_goes_on_under_the_new_version,
    test_after_a_swap_the_new_model_goes_on,
)
from .conftest import running_vllm

pytestmark = pytest.mark.slow

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LONG = 1500  # tokens: fewer than without adapters, for each takes longer


def form_of(base: Path, rank: int = 4) -> AdapterForm:
    return AdapterForm(base=base, rank=rank, alpha=8.0, target_modules=TARGETS)


def random_matrices(form: AdapterForm) -> dict[str, torch.Tensor]:
    """Random adapters, by their names in the model."""
    generator = torch.Generator().manual_seed(1)
    shapes = form.shapes(read_shapes(form.base))
    return {
        name.removeprefix("base_model.model."): 0.2 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


@pytest.fixture(scope="module")
def begun(vllm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return begin_adapter(tmp_path_factory.mktemp("adapters") / "begun", form_of(vllm_model), None)


@pytest.fixture(scope="module")
def merged(vllm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with the random adapters in its weights."""
    folder = tmp_path_factory.mktemp("merged")
    weights, matrices = load_file(vllm_model / "model.safetensors"), random_matrices(form_of(vllm_model))
    for name in {one.rpartition(".lora_")[0] for one in matrices}:
        weights[f"{name}.weight"] += 2.0 * matrices[f"{name}.lora_B.weight"] @ matrices[f"{name}.lora_A.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((vllm_model / "config.json").read_bytes())
    return folder


@pytest.fixture(scope="module")
def server(
    vllm_python: str, begun: Path, tmp_path_factory: pytest.TempPathFactory, starting_vllm_server: Future[str]
) -> Iterator[str]:
    """The URL of a server that applies adapters; the server of later modules starts beside it."""
    with running_vllm(vllm_python, begun, tmp_path_factory.mktemp("vllm")) as url:
        yield url


@pytest.fixture
async def stage(server: str, begun: Path, vllm_model: Path, merged: Path) -> AsyncGenerator[Stage]:
    """A stage that serves the model alone at first; the other weights are the model with adapters."""
    async with (
        asyncio.timeout(DEADLINE_S),
        open_stage(VllmServer(server), vllm_model, merged, num_long=LONG, begun_with=begun) as stage,
    ):
        yield stage


@pytest.fixture
def publish(vllm_model: Path, tmp_path: Path):
    def write(rank: int = 4) -> DiskWeights:
        form = form_of(vllm_model, rank)
        return DiskChannel(tmp_path / f"rank_{rank}", torch.float32, form).write(random_matrices(form))

    return write


@pytest.fixture
def new_weights(publish) -> DiskWeights:
    """For the tests of swaps: the adapters, which make the model `merged`."""
    return publish()


async def test_it_begins_with_adapters_that_change_nothing(stage, ask, truth):
    request = ask(1, max_tokens=20)
    assert_sampled_by(stage.before, request, await stage.engine.generate(request), truth)


async def test_adapters_that_do_not_fit_change_nothing(stage, ask, publish):
    weights = publish()
    matrices = random_matrices(form_of(stage.model, rank=3))
    wrong = DiskChannel(Path(weights.path).parent / "wrong", torch.float32, form_of(stage.model)).write(matrices)
    with pytest.raises(WeightUpdateError, match="are not those of rank 4"):
        await stage.push(wrong)
    assert (await stage.engine.generate(ask(5))).versions[-1].version == stage.old
    await stage.push(weights)
    assert (await stage.engine.generate(ask(6))).versions[-1].version == stage.new


async def test_what_the_server_refuses_is_undone(stage, ask, truth, publish):
    with pytest.raises(WeightUpdateError, match="the previous weights were loaded again"):
        await stage.push(publish(rank=16))  # it was started for a rank of 8 at most
    assert_sampled_by(stage.before, ask(7), await stage.engine.generate(ask(7)), truth)
    await stage.push(publish())
    assert (await stage.engine.generate(ask(8))).versions[-1].version == stage.new
