"""The folders that servers load, made of weights that were pushed as a folder on a disk.

- It has the pushed files, takes no space, and stays when they are removed; files on another disk are copied.
- Servers share the folder of a push; it goes with the last of them, and the pushed one stays.
- A damaged or missing folder, or one without a manifest, is refused and leaves nothing behind.
- A cancelled call leaves nothing behind, and the same push may come again.

Folders of adapters, without a server.

- initial adapters change nothing, or are the saved ones; names and fields are PEFT's
- they are checked against the model: another rank, other layers, missing ones, cut or unreadable files are refused
- a folder that also has a model counts as a model; only an engine that applies adapters takes them, and nothing else
- a run starts its servers with adapters only if it pushes adapters
"""

import asyncio
import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_agent.cluster.engines import engine_weights
from areal_agent.engine.foreign.server import ServedModel
from areal_agent.engine.foreign.weight_folders import (
    AdapterForm,
    WeightFolders,
    begin_adapter,
    is_adapter,
    prove_adapter,
    read_form,
    read_shapes,
)
from areal_agent.errors import ConfigError, WeightUpdateError
from areal_agent.trainer.config import LoraConfig, TrainerConfig
from areal_agent.types import DiskWeights
from areal_agent.weights.channels import DiskChannel, write_adapter

NAME = "model.safetensors"
MEMORY = "/dev/shm"


@pytest.fixture
def pushed(tmp_path: Path) -> DiskWeights:
    return DiskChannel(tmp_path / "weights", torch.float32).write({"a": torch.arange(6.0)})


def of_servers(pushed: DiskWeights) -> list[Path]:
    return list((Path(pushed.path).parent / "folders").glob("*"))


async def test_it_stays_when_what_was_pushed_is_removed(pushed: DiskWeights) -> None:
    folder = await WeightFolders().take("first", pushed)
    source = Path(pushed.path)
    whole = (source / NAME).read_bytes()
    assert (folder / NAME).samefile(source / NAME)
    shutil.rmtree(source)
    assert (folder / NAME).read_bytes() == whole


@pytest.mark.skipif(not os.access(MEMORY, os.W_OK), reason="there is no second file system")
async def test_what_lies_on_another_disk_is_copied(pushed: DiskWeights) -> None:
    source = Path(pushed.path) / NAME
    whole = source.read_bytes()
    with tempfile.TemporaryDirectory(dir=MEMORY) as elsewhere:
        source.symlink_to(shutil.move(source, elsewhere))
        folder = await WeightFolders().take("first", pushed)
    assert (folder / NAME).read_bytes() == whole and not source.exists()


async def test_it_goes_with_the_last_server(pushed: DiskWeights) -> None:
    folders = WeightFolders()
    one, two, other = [await folders.take(push_id, pushed) for push_id in ("first", "first", "second")]
    assert one == two != other
    await folders.release(one)
    assert one.is_dir()
    await folders.release(two)
    await folders.release(other)
    assert of_servers(pushed) == [] and (Path(pushed.path) / NAME).is_file()


@pytest.mark.parametrize(
    "fault",
    [
        lambda folder: (folder / NAME).write_bytes(bytes(100)),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: folder.rename(folder.with_name("elsewhere")),
    ],
    ids=["damaged", "without its manifest", "gone"],
)
async def test_what_is_wrong_leaves_nothing(pushed: DiskWeights, fault) -> None:
    fault(Path(pushed.path))
    with pytest.raises(WeightUpdateError, match="weights"):
        await WeightFolders().take("first", pushed)
    assert of_servers(pushed) == []


async def test_a_push_that_was_cut_short_may_come_again(pushed: DiskWeights) -> None:
    folders = WeightFolders()
    taking = asyncio.ensure_future(folders.take("first", pushed))
    await asyncio.sleep(0)  # it is being made
    taking.cancel()
    await asyncio.wait({taking})
    assert taking.cancelled() and of_servers(pushed) == []
    await folders.release(await folders.take("first", pushed))
    assert of_servers(pushed) == []


@pytest.fixture(scope="module")
def model(make_model) -> Path:
    return make_model()


@pytest.fixture
def form(model: Path) -> AdapterForm:
    return AdapterForm(base=model, rank=4, alpha=8.0, target_modules=("q_proj", "down_proj"))


def matrices_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def test_those_to_begin_with_change_nothing(form: AdapterForm, tmp_path: Path) -> None:
    folder = begin_adapter(tmp_path / "adapter", form, None)
    matrices = matrices_of(folder)
    assert {name: tuple(one.shape) for name, one in matrices.items() if ".layers.1." in name} == {
        "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight": (4, 64),
        "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight": (64, 4),
        "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight": (4, 96),
        "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight": (64, 4),
    }
    assert not any(one.any() for one in matrices.values())
    assert is_adapter(folder) and read_form(folder) == form
    prove_adapter(folder, read_shapes(form.base))


def test_those_of_a_checkpoint_are_begun_with(form: AdapterForm, tmp_path: Path) -> None:
    saved = begin_adapter(tmp_path / "saved", form, None)
    changed = {name.removeprefix("base_model.model."): one + 1.0 for name, one in matrices_of(saved).items()}
    write_adapter(saved, changed, form)
    begun = begin_adapter(tmp_path / "begun", form, saved)
    assert all(bool((one == 1.0).all()) for one in matrices_of(begun).values())


def cut_short(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def lack_one(folder: Path) -> None:
    matrices = matrices_of(folder)
    matrices.pop("base_model.model.model.layers.0.mlp.down_proj.lora_B.weight")
    save_file(matrices, folder / "adapter_model.safetensors")


def say(**fields: object):
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_bytes()), **fields}))

    return change


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (cut_short, "it must be a whole safetensors file"),
        (lack_one, r"are not those of rank 4 .*layers\.0\.mlp\.down_proj\.lora_B"),
        (say(r=8), "are not those of rank 8"),
        (say(target_modules=["k_proj"]), r"k_proj\.lora_A"),
        (say(target_modules="all-linear"), "cannot read the config of the adapters"),
        (say(lora_alpha="much"), "cannot read the config of the adapters"),
    ],
)
def test_what_does_not_fit_is_refused(form: AdapterForm, tmp_path: Path, fault, message: str) -> None:
    folder = begin_adapter(tmp_path / "adapter", form, None)
    fault(folder)
    with pytest.raises(WeightUpdateError, match=message):
        prove_adapter(folder, read_shapes(form.base))


def test_a_model_beside_a_config_of_adapters_is_a_model(form: AdapterForm, tmp_path: Path) -> None:
    folder = shutil.copytree(form.base, tmp_path / "model")
    (folder / "adapter_config.json").write_bytes(form.encode())
    assert not is_adapter(folder)


def test_who_applies_adapters_takes_them_alone(form: AdapterForm, tmp_path: Path) -> None:
    folder = begin_adapter(tmp_path / "adapter", form, None)
    plain = ServedModel.read(form.base)
    plain.prove(form.base)
    with pytest.raises(WeightUpdateError, match=r"was started without any; set trainer\.lora\.push to 'merged'"):
        plain.prove(folder)
    applying = replace(plain, has_adapters=True)
    applying.prove(folder)
    with pytest.raises(WeightUpdateError, match="the server applies adapters, and would apply them"):
        applying.prove(form.base)
    with pytest.raises(WeightUpdateError, match="the server applies adapters, and would apply them"):
        applying.prove_entries(())


@pytest.mark.parametrize("lora", [None, LoraConfig()])
def test_who_gets_whole_weights_begins_with_a_model(model: Path, tmp_path: Path, lora: LoraConfig | None) -> None:
    config = TrainerConfig(lora=lora)
    assert engine_weights(config, model, None, tmp_path) == model
    assert engine_weights(config, model, tmp_path / "step_000001", tmp_path) == tmp_path / "step_000001"


def test_who_gets_adapters_begins_with_some(model: Path, tmp_path: Path) -> None:
    config = TrainerConfig(lora=LoraConfig(rank=2, push="adapter"))
    folder = engine_weights(config, model, None, tmp_path)
    assert is_adapter(folder) and read_form(folder).base == model
    prove_adapter(folder, read_shapes(model))


def test_a_model_without_weights_is_nothing_to_begin_with(tmp_path: Path) -> None:
    config = TrainerConfig(lora=LoraConfig(push="adapter"))
    with pytest.raises(ConfigError, match="no first adapters could be written"):
        engine_weights(config, tmp_path, None, tmp_path)
