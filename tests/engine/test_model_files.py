"""A folder that the engine cannot serve is refused at the start, with the reason in one line:

- missing, damaged, without safetensors, incomplete, quantised, or with weights that are not finite
- other kinds of models, contexts longer than the model's, sliding windows, rotary embeddings that move cached keys
- end tokens outside the vocabulary are ignored
"""

import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_agent.engine.embedded.model import ModelRunner
from areal_agent.errors import ConfigError


def load(folder, max_context: int = 128) -> ModelRunner:
    return ModelRunner(str(folder), device="cpu", num_slots=2, max_context_tokens=max_context)


@pytest.mark.parametrize("name", ["/no/such/model", "nowhere", "./nowhere/here", "~/model", "runs/nowhere/model"])
def test_a_name_that_is_neither_a_folder_nor_one_of_the_hub_is_asked_of_nobody(name):
    with pytest.raises(ConfigError, match=f"cannot load the model '{name}': there is no such folder; .* 'org/name'"):
        load(name)


def test_the_model_of_a_config_is_no_folder():
    with pytest.raises(ConfigError, match=r"python -m areal_agent\.models\.tiny --out FOLDER"):
        load("tiny")


def test_a_gguf_folder_is_told_what_to_give_instead(tmp_path):
    (tmp_path / "model.Q4_1.gguf").touch()
    with pytest.raises(ConfigError, match=r"is GGUF.*; give the model that it was made of"):
        load(tmp_path)


def cut_short(folder: Path, kept: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])


def pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


NORM = "model.norm.weight"
FAULTS = [
    *((partial(cut_short, kept=kept), "cannot load the model") for kept in (0, 7, 1000)),
    (pickle, "cannot load the model .* safetensors"),
    *(
        (lambda folder, text=text: (folder / "config.json").write_text(text), "cannot load the model")
        for text in ("", "{", "[]", '{"model_type": "qwen3", "hidden_size": "wide"}')
    ),
    (partial(change_weights, change=lambda weights: weights.pop(NORM)), rf"lack 1 weights, \['{NORM}'\]"),
    (partial(change_weights, change=lambda weights: weights.update({NORM: torch.ones(3)})), "cannot load the model"),
    *(
        (
            partial(change_weights, change=lambda weights, value=value: weights[NORM].__setitem__(5, value)),
            rf"NaN or infinity, \['{NORM}'\]",
        )
        for value in (math.nan, math.inf, -math.inf)
    ),
    (partial(change_config, quantization_config={"quant_method": "gptq", "bits": 4}), "quantised"),
]


@pytest.mark.parametrize(("spoil", "message"), FAULTS)
def test_what_is_damaged(spoil, message, tiny, tmp_path):
    spoil(folder := shutil.copytree(tiny, tmp_path / "copy"))
    with pytest.raises(ConfigError, match=message):
        load(folder)


@pytest.mark.parametrize("kind", ["gpt2", "qwen3_moe", "mixtral", "gemma2", "phi3", "qwen2_vl", "mamba", "a_new_kind"])
def test_models_of_another_kind(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    served = "" if kind == "a_new_kind" else "'; it serves llama, mistral, qwen2, qwen3"
    with pytest.raises(ConfigError, match=kind + served):
        load(tmp_path)


def test_a_context_beyond_the_model(tiny):
    with pytest.raises(ConfigError, match="max_context_tokens is 513"):
        load(tiny, max_context=513)


def test_a_sliding_window_shorter_than_the_context(make_model):
    folder = make_model("mistral", sliding_window=64)
    with pytest.raises(ConfigError, match="window of 64"):
        load(folder, max_context=65)
    assert load(folder, max_context=64).max_context_tokens == 64


def test_rotary_embeddings_that_depend_on_the_length(make_model):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ConfigError, match="'dynamic'"):
        load(make_model(rope_parameters=rope))


def test_an_end_token_outside_the_vocabulary_is_none(tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "copy")
    change_config(folder, eos_token_id=[5, 97, 151645])
    (folder / "generation_config.json").unlink()
    assert load(folder).eos_token_ids == {5}
