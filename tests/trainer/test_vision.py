"""Models that take images in the trainer, with random weights on a CPU.

- Each type passes the proof, and its pushes have the names and shapes of its files; the proof sees a wrong attention.
- Log-probabilities are those of the model's own forward pass of each sequence, however images are spread over rows.
- A sampled token with the id of images is a token like any other.
- Gradients reach the text, and the vision tower only where it is trained; adapters, critics and references work.
- Training on a picture lowers the loss; a resumed run goes on bit for bit, and its checkpoint has the processor.
- Records and files pass the wire; without images nothing is different.
- On a GPU that is not there all tensors of an operation are on one device.
- What cannot be trained is refused by name.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from areal_agent.algorithms.batching import collate, sample_of
from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.engine.config import EngineConfig
from areal_agent.errors import ConfigError
from areal_agent.images import image_processor
from areal_agent.run.preflight import require_trainable
from areal_agent.trainer.attention import ATTENTION_NAME
from areal_agent.trainer.config import LoraConfig, TrainerConfig, TrainerSetup
from areal_agent.trainer.digests import input_digests
from areal_agent.trainer.forward import choose_attention
from areal_agent.trainer.model import Policy
from areal_agent.trainer.trainer import Trainer
from areal_agent.trainer.wire import StepInput, decode_step, encode_step
from areal_agent.types import ImageSpan, TokenRecord
from tests.fake_gpu import FakeGpu
from tests.histories import batch_of, trajectory
from tests.trainer.lab import CPU, GRADIENT_DESCENT, PLAIN, Lab, train_alike
from tests.vision import PROCESSOR, make_vision_model, picture

PAD, START, END, OTHER = 5, 3, 4, 77  # ids of the tests' model; OTHER is of no special token
RED, BLUE, WIDE = picture("red"), picture("blue"), picture("green", size=(140, 56))
NUM_PADS = {RED: 4, BLUE: 4, WIDE: 10}
IMAGES = {sha256(one).hexdigest(): one for one in NUM_PADS}


def record(session: str, *parts: bytes | int, sampled: int = 6, last: int | None = None) -> TokenRecord:
    """So many tokens of text, or an image; then tokens that were sampled, and some that follow."""
    rng, ids, images = np.random.default_rng(len(session)), [], []
    for part in parts:
        if isinstance(part, int):
            ids += rng.integers(6, 260, part).tolist()
        else:
            start = len(ids) + 1
            images.append(ImageSpan(digest=sha256(part).hexdigest(), start=start, end=start + NUM_PADS[part]))
            ids += [START, *[PAD] * NUM_PADS[part], END]
    answer = rng.integers(6, 260, sampled).tolist()
    if last is not None:
        answer[1] = last
    mask = np.repeat([False, True, False], [len(ids), sampled, 3])
    num_tokens = len(mask)
    return TokenRecord(
        session_id=session,
        group_id="g",
        branch=0,
        parent_branch=None,
        token_ids=np.array([*ids, *answer, 9, 9, 9], dtype=np.int32),
        loss_mask=mask,
        turn_index=np.zeros(num_tokens, dtype=np.int32),
        behavior_logprobs=np.where(mask, -5.0, 0.0).astype(np.float32),
        temperatures=np.full(num_tokens, 0.9, dtype=np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        turn_rewards=np.array([float(len(session) % 2)], dtype=np.float32),
        images=tuple(images),
    )


RECORDS = [record("a", 7), record("bb", 5, RED, 3, WIDE, 2), record("ccc", RED, 20), record("dddd", 2, BLUE, RED, 1)]
GIVEN = StepInput(step=1, records=RECORDS, rewards={"a": 1.0, "bb": 0.0, "ccc": 1.0, "dddd": 0.0}, images=IMAGES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision"))


def alone(lab: Lab, one: TokenRecord) -> Tensor:
    """The log-probabilities of a record's loss tokens by transformers' own forward pass."""
    sample, more = sample_of(one, IMAGES), {}
    if sample.images:
        more = {**lab.processor(images=[Image.open(BytesIO(image.data)) for image in sample.images])}
        more["mm_token_type_ids"] = (sample.inputs[None] == PAD).int()
    logits = lab.policy.model(input_ids=sample.inputs[None], **more).logits[0, sample.predicting]
    return (logits / sample.temperatures[:, None]).log_softmax(-1).gather(1, sample.targets[:, None])[:, 0]


def together(policy: Policy, records: Sequence[TokenRecord]) -> Tensor:
    batch = collate([sample_of(one, IMAGES) for one in records], CPU, is_padded=True)
    return policy.logprobs_and_entropy(batch)[0]


@pytest.fixture
def lab(folder: Path) -> Lab:
    lab = Lab(folder)
    lab.processor = partial(image_processor(folder), return_tensors="pt")
    return lab


@pytest.mark.parametrize("is_trained", [False, True], ids=["frozen", "trained"])
def test_a_batch_is_computed_and_differentiated_as_each_sequence_alone(lab: Lab, is_trained: bool) -> None:
    model = lab.policy.model
    lab.policy.train_vision(is_trained)
    expected = torch.cat([alone(lab, one) for one in RECORDS])
    found = together(lab.policy, RECORDS)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(together(lab.policy, RECORDS[:1]), found[:6], atol=1e-5, rtol=0)  # text alone
    names = {name for name, one in model.named_parameters() if is_trained or "visual" not in name}
    assert lab.policy.trained_parameters().keys() == names
    both = []
    for value in (expected, found):
        model.zero_grad()
        value.sum().backward()
        both.append({name: one.grad for name, one in model.named_parameters() if one.grad is not None})
    assert both[0].keys() == both[1].keys() == names
    for name, one in both[0].items():
        torch.testing.assert_close(both[1][name], one, atol=1e-4, rtol=1e-4, msg=name)


def test_a_sampled_token_with_the_id_of_images_is_one_like_any_other(lab: Lab) -> None:
    with torch.no_grad():
        weights = lab.policy.model.get_input_embeddings().weight
        weights[PAD] = weights[OTHER]  # so that the two ids are the same to the model, whose head is tied
    ours, theirs = ([record("e", 3, RED, 4, last=one), record("ff", 9, last=one)] for one in (PAD, OTHER))
    torch.testing.assert_close(together(lab.policy, ours), together(lab.policy, theirs), atol=1e-6, rtol=0)


LORA = GRADIENT_DESCENT.model_copy(update={"lora": LoraConfig(rank=2), "learning_rate": 1e7})
WAYS: Mapping[str, tuple[TrainerConfig, AlgorithmConfig]] = {
    "plain": (GRADIENT_DESCENT, PLAIN),
    "recomputed": (GRADIENT_DESCENT.model_copy(update={"gradient_checkpointing": True}), PLAIN),
    "adapters": (LORA, PLAIN),
    "critic": (GRADIENT_DESCENT, AlgorithmConfig(preset="ppo", reference="initial", kl_coefficient=0.1)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_step_trains_the_text_and_leaves_the_vision_tower(folder: Path, way: str) -> None:
    lab = Lab(folder, *WAYS[way], budget=60)
    before = {name: one.clone() for name, one in lab.policy.whole_parameters()}
    metrics = lab.stepper.train(GIVEN)
    changed = {name for name, one in lab.policy.whole_parameters() if not torch.equal(one, before[name])}
    assert metrics["num_loss_tokens"] == 24
    assert metrics["grad_norm"] > 0
    assert len(changed) > 10
    assert not any("visual" in name for name in changed)


def test_training_on_pictures_lowers_the_loss(folder: Path) -> None:
    lab = Lab(folder, TrainerConfig(learning_rate=1e-2, packing="padded"))
    losses = [lab.stepper.fit(RECORDS, images=IMAGES)["loss"] for _ in range(8)]
    assert losses[-1] < 0.7 * losses[0]
    same = lab.stepper.measure([record("a", RED, 4), record("a", BLUE, 4)], IMAGES)
    assert not torch.equal(*same)  # what is seen counts


def test_a_resumed_run_goes_on_bit_for_bit(
    open_trainer: Callable[..., Trainer], folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = TrainerConfig(learning_rate=1e-3, train_vision=True)
    first = open_trainer(folder, config, PLAIN)
    assert caplog.text.count("each sequence has a row of its own (trainer.packing padded)") == 1
    first.train_step(GIVEN)
    saved = first.save(tmp_path / "checkpoints", step=1, incarnation=0)
    files = [load_file(one / "model.safetensors") for one in (saved.path, folder)]
    assert {name: one.shape for name, one in files[0].items()} == {name: one.shape for name, one in files[1].items()}
    assert json.loads((saved.path / "preprocessor_config.json").read_text()) == PROCESSOR
    resumed = open_trainer(saved.path, config, PLAIN, base=folder)
    train_alike(first, resumed, replace(GIVEN, step=2))
    ours, theirs = (dict(one._policy.whole_parameters()) for one in (first, resumed))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert any(not torch.equal(ours[name], files[1][name]) for name in ours if "visual" in name)


def test_records_and_files_pass_the_wire() -> None:
    arguments, arrays = encode_step(GIVEN)
    passed = decode_step(orjson.loads(orjson.dumps(arguments)), arrays)
    assert passed.images == IMAGES
    assert [one.images for one in passed.records] == [one.images for one in RECORDS]
    text = encode_step(replace(GIVEN, records=RECORDS[:1], images={}))
    assert input_digests(arguments, arrays).keys() - input_digests(*text).keys() == {"images"}


async def test_a_step_is_made_through_the_socket(served: Any, folder: Path, tmp_path: Path) -> None:
    client, _ = served
    setup = TrainerSetup(model=folder, trainer=TrainerConfig(device="cpu"), seed=0, shared_memory=tmp_path)
    await client.init(setup)
    trajectories = [trajectory(name, [], reward, group_id="g", turns=()) for name, reward in GIVEN.rewards.items()]
    report = await client.train_step(batch_of(trajectories, RECORDS, 1), images=IMAGES)
    assert report.metrics["num_loss_tokens"] == 24
    assert "images" in report.inputs


TEXT = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 2}
TEXT |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LINEAR |= {"layer_types": ["linear_attention", "full_attention"]}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
TOWER = {"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
TOWER |= {"num_position_embeddings": 64}
DEEP = {**TOWER, "deepstack_visual_indexes": [0, 1]}
OLD = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}
FAMILIES: Mapping[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "qwen2_vl": (TEXT, OLD, 14),
    "qwen3_vl": (TEXT, DEEP, 16),
    "qwen3_vl_moe": ({**TEXT, **EXPERTS}, DEEP, 16),
    "qwen3_5": ({**TEXT, **LINEAR}, TOWER, 16),
    "qwen3_5_moe": ({**TEXT, **LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16}, TOWER, 16),
}
"""Text, vision tower and the size of its patches."""


def save_model(model_type: str, folder: Path) -> Path:
    text, vision, patch = FAMILIES[model_type]
    ids = {"image_token_id": PAD, "video_token_id": 6, "vision_start_token_id": START, "vision_end_token_id": END}
    config = AutoConfig.for_model(model_type, text_config=text, vision_config=vision, **ids)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    size = {"size": {"shortest_edge": 1024, "longest_edge": 50_000}, "patch_size": patch}
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | size))
    return folder


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_type_passes_the_proof_and_has_the_names_of_its_files(model_type: str, tmp_path: Path) -> None:
    policy = Policy.load(save_model(model_type, tmp_path), CPU)
    files = load_file(tmp_path / "model.safetensors")
    assert {one.name: one.shape for one in policy.published()} == {name: tuple(x.shape) for name, x in files.items()}
    assert not any("visual" in name for name in policy.trained_parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_on_a_gpu_that_is_not_there(open_trainer: Callable[..., Trainer], tmp_path: Path, dtype: str) -> None:
    folder, given = save_model("qwen3_vl", tmp_path), replace(GIVEN, records=RECORDS[2:])
    with FakeGpu():
        found = open_trainer(folder, TrainerConfig(device="cuda", dtype=dtype), PLAIN).train_step(given).metrics
    expected = open_trainer(folder, TrainerConfig(device="cpu"), PLAIN).train_step(given).metrics
    for name in ("entropy", "grad_norm", "logp_diff_mean"):
        assert found[name] == pytest.approx(expected[name], rel=1e-2)


def test_the_proof_sees_images(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_agent.trainer.forward.OWN_WAYS", (ATTENTION_NAME,))  # causal within an image
    with pytest.raises(ConfigError, match=r"first at token 5\d of sequence 1"):
        choose_attention(lab.policy.model, is_padded=True, vision=lab.policy.vision)


def test_what_cannot_be_trained_is_refused(
    folder: Path, model_folder: Path, open_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    for config, match in (
        ({"packing": "balanced"}, "packing is 'balanced'.*set it to 'padded'"),
        ({"context_parallel": 2, "num_ranks": 2}, "context_parallel is 2"),
        ({"lora": LoraConfig(push="adapter")}, "push is 'adapter'.*set it to 'merged'"),
    ):
        with pytest.raises(ConfigError, match=match):
            Lab(folder, TrainerConfig(**config))
    with pytest.raises(ConfigError, match="train_vision is true, and the model takes no images"):
        open_trainer(model_folder, TrainerConfig(train_vision=True), PLAIN)
    with pytest.raises(ValidationError, match=r"train_vision is true, and trainer\.lora"):
        TrainerConfig(train_vision=True, lora=LoraConfig())
    with pytest.raises(ConfigError, match=r"'qwen2_5_vl', and the embedded engine serves only.*'sglang' or 'vllm'"):
        require_trainable(folder, EngineConfig())  # for want of an engine alone
    blind = shutil.copytree(folder, tmp_path / "blind", ignore=shutil.ignore_patterns("preprocessor*"))
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json is missing"):
        require_trainable(blind, EngineConfig(backend="vllm", python="python"))
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json is missing"):
        Policy.load(blind, CPU)
    (blind / "processor_config.json").write_text(json.dumps({"image_processor": PROCESSOR}))  # as newer transformers do
    assert Policy.load(blind, CPU).vision is not None


def test_a_record_that_does_not_suit_the_model_is_refused(lab: Lab, model_folder: Path) -> None:
    one = RECORDS[2]
    text_first = replace(RECORDS[1], loss_mask=np.arange(len(RECORDS[1].loss_mask)) == 2)
    assert sample_of(text_first, IMAGES).images == ()  # they follow the last token of the loss
    longer = replace(one, images=(replace(one.images[0], end=one.images[0].end + 1),))
    with pytest.raises(ValueError, match="stands for 5 tokens, and is 4 for this model"):
        together(lab.policy, [longer])
    with pytest.raises(ValueError, match="session 'ccc': the file of image"):
        sample_of(one)
    with pytest.raises(ValueError, match="a token of an image is in the loss"):
        sample_of(replace(one, loss_mask=np.arange(len(one.loss_mask)) > 0), IMAGES)
    with pytest.raises(ValueError, match="loaded as one of text"):
        together(Policy.load(model_folder, CPU, is_padded=True), [one])
