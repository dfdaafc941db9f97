"""Checkpoints.

- A saved folder loads with AutoModelForCausalLM and AutoTokenizer and holds exactly the trained weights.
- Its chat template is the one that the rollouts were made with.
- Going on from one makes the very next steps bit for bit, with several minibatches a step
  and with gradients clipped at a quantile.
- A writer that fails or is killed leaves no checkpoint; what it left is removed by the next.
- Where a shared disk is away, its folders are not made anew: the save fails.
- The newest intact one is found: damaged ones are passed over with a warning.
- Only the last ones are kept, and none of an abandoned lineage; one of the same step is replaced.
- An asynchronous save holds the weights at its beginning, byte for byte what a save at once holds.
- A save that fails is the result of a command; the third in a row raises.
- An incarnation that was taken over publishes none, whenever it happened, and leaves the other's files alone.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.errors import ConfigError, TakenOver, TrainerError
from areal_agent.files import claim
from areal_agent.trainer.checkpoint import (
    CommitPoint,
    FailedSaves,
    latest_checkpoint,
    publish_checkpoint,
    read_checkpoint,
)
from areal_agent.trainer.config import LoraConfig, TrainerConfig, TrainerSetup
from areal_agent.trainer.state import Content, write_training
from areal_agent.trainer.trainer import Trainer
from areal_agent.trainer.worker import Worker
from tests.trainer.lab import held_by, train_alike

CONFIG = TrainerConfig(learning_rate=1e-3, warmup_fraction=0.5, schedule="cosine", keep_last=2)
ALGORITHM = AlgorithmConfig(minibatches=3)


@pytest.fixture
def load_trainer(open_trainer):
    return lambda folder, **more: open_trainer(folder, CONFIG, ALGORITHM, **more)


WITH_ALL = AlgorithmConfig(preset="ppo", reference="initial", kl_coefficient=0.1)
ADAPTED = (CONFIG.model_copy(update={"lora": LoraConfig(rank=2)}), ALGORITHM)


@pytest.mark.parametrize(("config", "algorithm"), [(CONFIG, WITH_ALL), ADAPTED], ids=["critic", "adapters"])
def test_an_asynchronous_save_is_one_at_its_beginning(
    open_trainer, model_folder, make_batch, as_input, tmp_path, config, algorithm
):
    at_once = open_trainer(model_folder, config, algorithm)
    beside = open_trainer(model_folder, config.model_copy(update={"async_save": True}), algorithm)
    train_alike(at_once, beside, as_input(make_batch(1, num_groups=1)))
    files = held_by(at_once.save(tmp_path / "at once", step=1, incarnation=0).path)
    may_write = threading.Event()
    beside.saver._thread.submit(may_write.wait)
    assert beside.save(tmp_path / "beside", step=1, incarnation=0) is None
    train_alike(at_once, beside, as_input(make_batch(2, num_groups=1)))
    assert beside.saver.ended() is None
    assert not (tmp_path / "beside").exists()
    may_write.set()
    beside.saver.close()
    saved = beside.saver.ended()
    assert (saved.path, held_by(saved.path)) == (tmp_path / "beside" / "step_000001", files)


@pytest.mark.parametrize("is_beside", [False, True])
def test_a_save_that_fails_is_a_result_and_the_next_may_succeed(model_folder, tmp_path, is_beside):
    config = CONFIG.model_copy(update={"async_save": is_beside})
    setup = TrainerSetup(model=model_folder, trainer=config, seed=0, shared_memory=tmp_path)
    worker = Worker()
    worker.call("init", {"setup": setup.model_dump(mode="json")})
    (tmp_path / "away").touch()
    ends = []
    for name in ("away", "there"):
        ended = worker.call("save", {"directory": str(tmp_path / name), "step": 0, "incarnation": 0, "run_state": {}})
        while not ended:
            ended = worker.call("saved", {})
        ends.append(ended)
    worker.close()
    assert ends == [{"fault": ANY}, {"path": str(tmp_path / "there" / "step_000000")}]
    assert str(tmp_path / "away") in ends[0]["fault"]


def test_the_third_save_in_a_row_that_fails_raises(tmp_path):
    failed = FailedSaves(tmp_path)
    for _ in range(2):
        failed.check()
        assert "until now 1" in failed.add(1, "full")
        assert "until now 2" in failed.add(2, "full")
        failed.clear()
    failed.add(3, "away")
    with pytest.raises(TrainerError, match=r"1 saves in a row .* because of away; make room"):
        failed.check()
    failed.add(4, "away")
    with pytest.raises(TrainerError, match=f"3 saves in a row .* to {tmp_path}, the last because of full"):
        failed.add(5, "full")


def write_small(folder: Path) -> None:
    (folder / "training").mkdir()
    (folder / "training" / "state.pt").write_bytes(b"state")
    (folder / "model.safetensors").write_bytes(b"weights")


def publish(directory: Path, step: int, keep_last: int = 10) -> Path:
    return publish_checkpoint(
        directory, step=step, incarnation=0, run_state={}, write=write_small, keep_last=keep_last
    ).path


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def weights_of(trainer: Trainer) -> bytes:
    return Path(trainer.publish().path).read_bytes()


def test_a_checkpoint_is_a_hugging_face_folder_with_the_trained_weights(
    load_trainer, model_folder, make_batch, as_input, tmp_path
):
    trainer = load_trainer(model_folder, chat_template="{{ 'kept' }}")  # that of the rollouts
    trainer.train_step(as_input(make_batch(1, num_groups=1)))
    saved = trainer.save(tmp_path / "checkpoints", step=1, incarnation=4)
    assert (saved.path.name, saved.step, saved.incarnation) == ("step_000001", 1, 4)
    model = AutoModelForCausalLM.from_pretrained(saved.path)
    published = trainer.publish()
    for entry, (name, parameter) in zip(published.entries, model.named_parameters(), strict=True):
        stored = torch.from_file(published.path, size=(entry.offset + entry.num_bytes) // 4)[entry.offset // 4 :]
        assert entry.name == name
        assert torch.equal(parameter, stored.view(entry.shape))
    tokenizer = AutoTokenizer.from_pretrained(saved.path)
    assert tokenizer.convert_tokens_to_ids("w7") == 7
    assert tokenizer.chat_template == "{{ 'kept' }}"


def test_going_on_from_a_checkpoint_is_exact(load_trainer, model_folder, make_batch, as_input, tmp_path):
    steady = load_trainer(model_folder)
    for step in (1, 2):
        steady.train_step(as_input(make_batch(step, num_groups=1)))
    saved = steady.save(tmp_path / "checkpoints", step=2, incarnation=0)
    resumed = load_trainer(saved.path)
    assert resumed.info.step == 2
    for step in (3, 4):
        train_alike(steady, resumed, as_input(make_batch(step, num_groups=1)))
        assert weights_of(steady) == weights_of(resumed)


def test_the_quantile_of_gradient_norms_goes_on_exactly(open_trainer, model_folder, make_batch, as_input, tmp_path):
    config = CONFIG.model_copy(update={"gradient_clip": 100.0, "gradient_clip_quantile": 0.1})
    steady = open_trainer(model_folder, config, ALGORITHM)
    for step in (1, 2, 3):
        steady.train_step(
            as_input(make_batch(step, num_groups=1))
        )  # nine updates, of which the last is clipped at the quantile
    resumed = open_trainer(steady.save(tmp_path / "checkpoints", step=3, incarnation=0).path, config, ALGORITHM)
    metrics = train_alike(steady, resumed, as_input(make_batch(4, num_groups=1)))
    assert weights_of(steady) == weights_of(resumed)
    assert 100.0 > metrics["grad_norm"] > metrics["grad_clip"]


def test_the_checkpoint_that_was_resumed_from_stays(load_trainer, model_folder, make_batch, as_input, tmp_path):
    folder = tmp_path / "checkpoints"
    first = load_trainer(model_folder)
    first.train_step(as_input(make_batch(1, num_groups=1)))
    begun_with = first.save(folder, step=1, incarnation=0).path
    second = load_trainer(begun_with)
    for step in (2, 3, 4, 5):
        second.train_step(as_input(make_batch(step, num_groups=1)))
        saved = second.save(folder, step=step, incarnation=1)
    assert len(AutoTokenizer.from_pretrained(saved.path)) == 61  # which come from there
    assert names(folder) == ["step_000001", "step_000004", "step_000005"]
    third = load_trainer(saved.path)
    third.train_step(as_input(make_batch(6, num_groups=1)))
    third.save(folder, step=6, incarnation=2)
    assert names(folder) == ["step_000005", "step_000006"]


def test_a_step_out_of_order_and_a_damaged_checkpoint_are_refused(
    load_trainer, model_folder, make_batch, as_input, tmp_path
):
    trainer = load_trainer(model_folder)
    with pytest.raises(ValueError, match="step 2 was requested, but the weights are those of step 0"):
        trainer.train_step(as_input(make_batch(2, num_groups=1)))
    saved = trainer.save(tmp_path / "checkpoints", step=0, incarnation=0)
    (saved.path / "training" / "progress.json").write_bytes(b"short")
    with pytest.raises(ConfigError, match=r"cannot resume: .*progress\.json is not what was written"):
        load_trainer(saved.path)


def test_the_newest_is_found_by_number_if_there_is_any(tmp_path):
    assert latest_checkpoint(tmp_path / "missing") is None
    assert latest_checkpoint(tmp_path) is None
    for step in (2, 10, 9, 1_000_000):
        publish(tmp_path, step)
    assert latest_checkpoint(tmp_path).step == 1_000_000


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors", b"wei"),
        ("model.safetensors", b"weighst"),
        ("training/state.pt", None),
        ("manifest.json", None),
    ],
    ids=["truncated", "flipped", "missing", "no manifest"],
)
def test_a_damaged_one_is_passed_over_with_a_warning(tmp_path, caplog, file, content):
    publish(tmp_path, 1)
    damaged = publish(tmp_path, 2) / file
    damaged.unlink() if content is None else damaged.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert latest_checkpoint(tmp_path).step == 1
    assert "skipping a damaged checkpoint" in caplog.text


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    def fail(folder: Path) -> None:
        write_small(folder)
        raise OSError("disk full")

    publish(tmp_path, 1)
    with pytest.raises(OSError, match="disk full"):
        publish_checkpoint(tmp_path, step=2, incarnation=0, run_state={}, write=fail, keep_last=2)
    assert names(tmp_path) == ["step_000001"]


def test_a_shared_disk_that_is_away_is_not_made_anew(load_trainer, model_folder, tmp_path):
    trainer, away = load_trainer(model_folder), tmp_path / "away"
    with pytest.raises(FileNotFoundError):
        trainer.save(away / "checkpoints", step=0, incarnation=0)
    with pytest.raises(FileNotFoundError, match="is not on the machine of every rank"):
        write_training(away, Content.of(trainer._training), None)
    assert not away.exists()


KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from areal_agent.trainer.checkpoint import publish_checkpoint
def write(folder):
    (folder / "model.safetensors").write_bytes(b"half of the wei")
    os.kill(os.getpid(), signal.SIGKILL)
publish_checkpoint(Path(sys.argv[1]), step=2, incarnation=0, run_state={}, write=write, keep_last=2)
"""


def test_a_killed_writer_leaves_no_checkpoint_and_the_next_one_cleans_up(tmp_path):
    publish(tmp_path, 1)
    killed = subprocess.run([sys.executable, "-c", KILLED_WRITER, str(tmp_path)], env={**os.environ}, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(names(tmp_path)) == 2
    assert latest_checkpoint(tmp_path).step == 1
    publish(tmp_path, 2)
    assert names(tmp_path) == ["step_000001", "step_000002"]


def test_only_the_last_are_kept_and_none_of_an_abandoned_lineage(tmp_path):
    for step in (8, 9, 10):
        publish(tmp_path, step, keep_last=2)
    assert names(tmp_path) == ["step_000009", "step_000010"]
    publish(tmp_path, 20)
    publish(tmp_path, 11, keep_last=2)
    assert names(tmp_path) == ["step_000010", "step_000011"]


def test_one_of_the_same_step_is_replaced(tmp_path):
    publish(tmp_path, 1)
    replaced = publish_checkpoint(tmp_path, step=1, incarnation=3, run_state={}, write=write_small, keep_last=2)
    assert names(tmp_path) == ["step_000001"]
    assert read_checkpoint(replaced.path).incarnation == 3


@pytest.mark.parametrize("moment", [None, CommitPoint.WRITTEN, CommitPoint.DURABLE])
def test_who_was_taken_over_publishes_none(tmp_path, moment):
    claim(tmp_path, 0)
    publish(tmp_path, 1)
    other = tmp_path / ".writing-step_000002-1"

    def take_over(point=None):
        if point is moment:
            claim(tmp_path, 1)
            other.mkdir()

    if moment is None:
        take_over()
    with pytest.raises(TakenOver, match="incarnation 1 of this run"):
        publish_checkpoint(
            tmp_path, step=2, incarnation=0, run_state={}, write=write_small, keep_last=1, passing=take_over
        )
    assert names(tmp_path) == [other.name, "incarnation_000001", "step_000001"]
