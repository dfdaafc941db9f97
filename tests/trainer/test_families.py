"""Which families of models can be trained, with random weights.

- Packed rows: logits, log-probabilities in chunks and gradients are those of plain forward passes, one sequence each.
- A family that passes state past a sequence's end is refused with where it differs, and trained in padded rows.
- Pushes and checkpoints have the names, shapes and values of the model's own files.
- Two ranks, each of which loads its rows, compute, differentiate and publish what one does; random forests in float64.
- What files hold besides the model is handed on; names that would change, quantised weights, other shapes and
  broken files are refused.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from areal_agent.algorithms.batching import MicroBatch, Sample, collate, logprobs_and_entropy
from areal_agent.engine.config import EngineConfig
from areal_agent.engine.foreign.weight_folders import prove_fits, read_shapes
from areal_agent.errors import ConfigError
from areal_agent.run.preflight import require_trainable
from areal_agent.trainer.forward import decoder_of, hidden_states, tail_of
from areal_agent.trainer.model import Policy
from areal_agent.trainer.state import write_export
from areal_agent.weights.channels import DiskChannel
from tests.trainer.families import DENSE, PACKED, PADDED, VOCAB_SIZE, make
from tests.trainer.lab import CPU

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def sample(length: int, seed: int) -> Sample:
    """Every second token is in the loss, at a temperature of 0.7."""
    ids = torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed))
    predicting = torch.arange(0, length - 1, 2)
    ones = torch.ones(len(predicting))
    return Sample(
        rollout="r",
        inputs=ids[:-1],
        predicting=predicting,
        targets=ids[predicting + 1],
        temperatures=0.7 * ones,
        behavior=-ones,
        versions=ones.int(),
        incarnations=ones.int(),
    )


SAMPLES = [sample(length, seed) for seed, length in enumerate((9, 30, 17))]
SIBLINGS = [
    *SAMPLES,
    *(replace(one, inputs=torch.cat([SAMPLES[1].inputs[:cut], one.inputs[cut:]])) for one in SAMPLES for cut in (1, 7)),
]


def alone(model: PreTrainedModel, one: Sample) -> Tensor:
    """The log-probabilities of the loss tokens by the model's own forward pass."""
    logits = model(input_ids=one.inputs[None], use_cache=False).logits[0, one.predicting]
    return (logits / one.temperatures[:, None]).log_softmax(-1).gather(1, one.targets[:, None])[:, 0]


def in_a_batch(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """The same of a batch as the trainer computes them, by chunks of four tokens that the backward pass recomputes."""
    hidden = hidden_states(decoder_of(model), batch)
    tail = tail_of(model)
    return logprobs_and_entropy(hidden, batch.targets, batch.temperatures, tail, vocab_size=VOCAB_SIZE, chunk_size=4)[0]


def gradients(model: PreTrainedModel, logprobs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    logprobs.sum().backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


LAYOUTS = [
    *((one, "packed") for one in PACKED),
    *((one, "tree") for one in PACKED),
    *((one, "padded") for one in PADDED),
]


@pytest.mark.parametrize(("model_type", "layout"), LAYOUTS)
def test_a_batch_is_computed_and_differentiated_as_each_sequence_alone(model_type: str, layout: str) -> None:
    model = make(model_type, {**PACKED, **PADDED}[model_type])
    samples = SIBLINGS if layout == "tree" else SAMPLES
    expected = torch.cat([alone(model, one) for one in samples])
    gradients_alone = gradients(model, expected)
    policy = Policy(model, CPU, is_padded=layout == "padded")
    assert policy.tree_fault is None or layout == "padded"
    policy.recompute_layers()
    found = in_a_batch(policy.model, collate(samples, CPU, **({} if layout == "packed" else {f"is_{layout}": True})))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    for name, one in gradients(policy.model, found).items():
        torch.testing.assert_close(one, gradients_alone[name], atol=1e-3, rtol=1e-3, msg=name)


def test_state_that_passes_the_end_of_a_sequence_is_refused_with_where_it_does() -> None:
    with pytest.raises(ConfigError) as refused:
        Policy(make("qwen3_next", PADDED["qwen3_next"]), CPU)
    assert "first at token 0 of sequence 1" in str(refused.value)
    assert "first after model.layers.0.linear_attn (Qwen3NextGatedDeltaNet)" in str(refused.value)
    assert str(refused.value).endswith("set trainer.packing to 'padded'")


def test_a_model_that_sees_later_tokens_is_refused() -> None:
    fields = {**DENSE, "is_decoder": False}
    with pytest.raises(ConfigError, match=r"'bert' cannot be trained on sequences in one row.*another type"):
        Policy(make("bert", fields), CPU)


def saved(model_type: str, folder: Path) -> Path:
    make(model_type, {**PACKED, **PADDED}[model_type]).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("model_type", ["gemma2", "glm4_moe", "gpt_oss", "granite", "mixtral", "phi3", "qwen3_moe"])
def test_pushes_and_checkpoints_are_the_tensors_of_the_files(model_type: str, tmp_path: Path) -> None:
    folder = saved(model_type, tmp_path / "model")
    policy = Policy.load(folder, CPU)
    files = load_file(folder / "model.safetensors")
    assert {one.name: one.shape for one in policy.published()} == {name: tuple(x.shape) for name, x in files.items()}
    pushed = Path(DiskChannel(tmp_path / "pushed", torch.float32).write(policy.whole_parameters()).path)
    (tmp_path / "export").mkdir()
    write_export(tmp_path / "export", policy, folder)
    for published in (pushed, tmp_path / "export"):
        prove_fits(read_shapes(published), read_shapes(folder), is_tied=False, where="")
        for name, one in load_file(published / "model.safetensors").items():
            assert torch.equal(one, files[name]), name


@pytest.mark.slow
def test_two_ranks_that_load_their_rows_are_one(tmp_path: Path) -> None:
    for model_type in (types := [*PACKED, *PADDED]):
        saved(model_type, tmp_path / model_type)
    argv = [sys.executable, "-m", "tests.trainer.family_ranks", str(tmp_path), *types]
    subprocess.run(argv, cwd=Path(__file__).parents[2], check=True)
    assert (tmp_path / "differences").read_text() == ""


def test_an_engine_in_bfloat16_gets_buffers_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy.load(saved("glm4_moe", tmp_path), CPU)
    monkeypatch.setattr(Policy, "publish_dtype", torch.bfloat16)  # as on a GPU
    exact = {one.name for one in policy.published() if one.dtype != "bfloat16"}
    assert exact == {"model.layers.1.mlp.gate.e_score_correction_bias"}


def test_what_the_files_hold_besides_the_model_is_handed_on(tmp_path: Path) -> None:
    """Qwen3.5 has images: text alone is trained, and engines are to load the whole."""
    folder, vision = tmp_path / "model", {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    config = Qwen3_5Config(text_config=PADDED["qwen3_5_text"], vision_config={**vision, "out_hidden_size": 32})
    Qwen3_5ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
    policy = Policy.load(folder, CPU, is_padded=True)
    files = load_file(folder / "model.safetensors")
    assert {one.name: one.dtype for one in policy.published()} == {
        name: "bfloat16" if "visual" in name else "float32" for name in files
    }
    (tmp_path / "export").mkdir()
    write_export(tmp_path / "export", policy, folder)
    exported = Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path / "export").state_dict()
    original = Qwen3_5ForConditionalGeneration.from_pretrained(folder).state_dict()
    assert exported.keys() == original.keys()
    assert all(torch.equal(one.float(), original[name].float()) for name, one in exported.items())


def test_names_that_engines_would_not_know_are_refused(tmp_path: Path) -> None:
    model = make("llama", {**DENSE, "tie_word_embeddings": True})
    decoder_of(model).save_pretrained(tmp_path)  # without its head: all names lack "model."
    with pytest.raises(ConfigError, match=r"20 tensors under other names, such as 'model\.embed_tokens\.weight'"):
        Policy.load(tmp_path, CPU)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    config = saved("gpt_oss", tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(ConfigError, match=r"weights are quantised \(mxfp4\)"):
        Policy.load(tmp_path, CPU)


def test_weights_of_other_shapes_and_broken_files_are_refused(tmp_path: Path) -> None:
    config, weights = saved("llama", tmp_path) / "config.json", tmp_path / "model.safetensors"
    described = json.loads(config.read_text())
    config.write_text(json.dumps(described | {"intermediate_size": described["intermediate_size"] + 4}))
    with pytest.raises(ConfigError, match=r"shapes of its weights are not those of its config.*down_proj"):
        Policy.load(tmp_path, CPU)
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"not fully covered|IncompleteBuffer"):
        Policy.load(tmp_path, CPU)


def test_a_config_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (saved("llama", tmp_path) / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"config\.json is \[1\], and no object"):
        require_trainable(tmp_path, EngineConfig(backend="vllm", python="python", max_context_tokens=512))
