"""A folder that the engine cannot serve is refused at the start, with the reason in one line:

- missing, damaged, without safetensors, incomplete, quantised, or with weights that are not finite
- other kinds of models, contexts longer than the model's, sliding windows, rotary embeddings that move cached keys
- end tokens outside the vocabulary are ignored
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_agent.engine.embedded.model import ModelRunner
from areal_agent.errors import ConfigError


def load(folder, max_context: int = 128) -> ModelRunner:
    return ModelRunner(str(folder), device="cpu", num_slots=2, max_context_tokens=max_context)


@pytest.fixture
def copied(tiny, tmp_path):
    """Copy the model, to be damaged."""
    return shutil.copytree(tiny, tmp_path / "copy")


@pytest.mark.parametrize("name", ["/no/such/model", "nowhere", "./nowhere/here", "~/model", "runs/nowhere/model"])
def test_a_name_that_is_neither_a_folder_nor_one_of_the_hub_is_asked_of_nobody(name):
    with pytest.raises(ConfigError, match=f"cannot load the model '{name}': there is no such folder; .* 'org/name'"):
        load(name)


def test_the_model_of_a_config_is_no_folder():
    with pytest.raises(ConfigError, match=r"python -m areal_agent\.models\.tiny --out FOLDER"):
        load("tiny")


@pytest.mark.parametrize("kept", [0, 7, 1000])
def test_weights_that_are_cut_short(kept, copied):
    path = copied / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ConfigError, match="cannot load the model"):
        load(copied)


def test_weights_that_are_no_safetensors(copied):
    torch.save(load_file(copied / "model.safetensors"), copied / "pytorch_model.bin")
    (copied / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"cannot load the model .* safetensors"):
        load(copied)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": "qwen3", "hidden_size": "wide"}'])
def test_a_config_that_is_none(text, copied):
    (copied / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="cannot load the model"):
        load(copied)


def change_weights(folder, change) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_weights_that_are_missing(copied):
    change_weights(copied, lambda weights: weights.pop("model.norm.weight"))
    with pytest.raises(ConfigError, match=r"lack 1 weights, \['model.norm.weight'\]"):
        load(copied)


def test_weights_of_another_shape(copied):
    change_weights(copied, lambda weights: weights.update({"model.norm.weight": torch.ones(3)}))
    with pytest.raises(ConfigError, match="cannot load the model"):
        load(copied)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite(value, copied):
    change_weights(copied, lambda weights: weights["model.norm.weight"].__setitem__(5, value))
    with pytest.raises(ConfigError, match=r"NaN or infinity, \['model.norm.weight'\]"):
        load(copied)


def change_config(folder, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_quantised_weights(copied):
    change_config(copied, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ConfigError, match="quantised"):
        load(copied)


@pytest.mark.parametrize("kind", ["gpt2", "qwen3_moe", "mixtral", "gemma2", "phi3", "qwen2_vl", "mamba"])
def test_models_of_another_kind(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ConfigError, match=f"'{kind}'; it serves llama, mistral, qwen2, qwen3"):
        load(tmp_path)


def test_a_kind_that_nobody_knows(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "a_new_kind"}')
    with pytest.raises(ConfigError, match="a_new_kind"):
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


def test_an_end_token_outside_the_vocabulary_is_none(copied):
    change_config(copied, eos_token_id=[5, 97, 151645])
    (copied / "generation_config.json").unlink()
    assert load(copied).eos_token_ids == {5}
