"""A session with images, recorded and played again, with a gateway and a ledger that are real.

1. it is played as it was recorded, from the images of its run, and nothing is written to the run's folder; 2. another
picture of the same size is another call, whose difference names it; 3. with `bridges_tools` another picture in a tool's
result is what a tool said; 4. the ledger proves the session, and the terminal shows it; 5. it is trained with its
images, and another model is fine-tuned on it.
"""

import base64
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from areal_agent import Rollout
from areal_agent.config import Config
from areal_agent.engine.fake import FakeEngine
from areal_agent.images import ImageFolder
from areal_agent.ledger.verify import verify
from areal_agent.replay.saved import Episode, SavedRun
from areal_agent.replay.stage import Play, open_stage
from areal_agent.run.serving import transcript_settings
from areal_agent.sft.data import read_rollouts
from areal_agent.tokens.loss_rule import LossRule
from areal_agent.tokens.records import token_records
from areal_agent.tokens.transcript import TRANSCRIPT_NOTE
from areal_agent.trainer.config import TrainerConfig
from areal_agent.trainer.wire import StepInput
from areal_agent.types import Task, Trajectory
from areal_agent.view.__main__ import main
from tests import histories
from tests.trainer.lab import Lab
from tests.vision import make_vision_model, picture

SESSION = histories.session("s", task_id="t")


def load(split: str, seed: int) -> list[dict[str, Any]]:
    return [{"id": "t", "colours": ["red", "green"]}]


async def look(task: dict[str, Any], rollout: Rollout) -> float:
    """Show the model a picture, and when it has answered another one, as a tool's result."""
    messages: list[Any] = []
    for role, colour in zip(("user", "tool"), task["colours"], strict=True):
        url = f"data:image/png;base64,{base64.b64encode(picture(colour)).decode()}"
        shown = {"type": "image_url", "image_url": {"url": url}}
        said = {"role": role, "content": [{"type": "text", "text": "what colour?"}, shown]}
        messages.append(said if role == "user" else {**said, "tool_call_id": "c"})
        reply = await rollout.client.chat.completions.create(model=rollout.model, messages=messages)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    return 1.0


def task(*colours: str) -> Task:
    return Task(id="t", data={"id": "t", "colours": list(colours)})


@pytest.fixture
async def recorded(tmp_path: Path) -> AsyncIterator[tuple[SavedRun, Trajectory]]:
    """A run that recorded two questions about two pictures."""
    model, folder = make_vision_model(tmp_path / "model"), tmp_path / "run"
    folder.mkdir()
    images = ImageFolder(folder / "images")
    for colour in ("red", "green"):
        images.keep(picture(colour))
    config = Config.parse(
        {
            "model": str(model),
            "workflow": "tests.replay.test_images:look",
            "tasks": {"source": "tests.replay.test_images:load"},
            "engine": {"max_context_tokens": 500},
            "rollout": {"max_tokens": 8},
        }
    )
    (folder / "config.yaml").write_text(config.to_yaml())
    async with histories.open_ledger(folder) as ledger:
        await ledger.set_note(TRANSCRIPT_NOTE, transcript_settings(config, model).note())
        run = SavedRun.open(folder)
        end = run.renderer.ids_of("<|im_end|>")
        engine = FakeEngine([(*run.renderer.ids_of(one), *end) for one in ("red", "green")], vocab_size=10_000)
        async with open_stage(run, timeout_s=60, info=engine.info()) as stage:
            played = await stage.play(Play(episode=Episode(session=SESSION, turns=(), trajectory=None), then=engine))
        assert played.reward == 1.0
        assert [len(one.images) for one in engine.requests] == [1, 2]
        await ledger.own.open_session(SESSION)
        yield run, await histories.end_rollout(ledger, played.trajectory)


async def test_it_is_played_proved_and_shown(recorded: tuple[SavedRun, Trajectory], capsys) -> None:
    run, trajectory = recorded
    episode = Episode(session=SESSION, turns=trajectory.turns, trajectory=trajectory)
    before = sorted(run.folder.path.rglob("*"))
    async with open_stage(run, timeout_s=60) as stage:
        again = await stage.play(Play(episode=episode))
        other = await stage.play(Play(episode=episode, task=task("red", "blue")))
    async with open_stage(run, timeout_s=60, bridges_tools=True) as stage:
        bridged = await stage.play(Play(episode=episode, task=task("red", "blue")))
        differing = await stage.play(Play(episode=episode, task=task("blue", "green")))
    assert (again.differences, again.is_as_recorded, again.reward, again.num_fresh) == ((), True, 1.0, 0)
    assert (bridged.is_as_recorded, bridged.reward, bridged.num_fresh) == (True, 1.0, 0)
    (named,) = other.differences
    assert (named.turn, named.is_bridged, bridged.differences[0].is_bridged) == (2, False, True)
    for sign, colour in (("-", "green"), ("+", "blue")):
        mark = f"[image {hashlib.sha256(picture(colour)).hexdigest()[:12]}]"
        assert all(f"\n{sign}" in one.text and mark in one.text for one in (named, bridged.differences[0]))
    assert [one.turn for one in differing.differences] == [1]
    assert sorted(run.folder.path.rglob("*")) == before
    report = verify(run.folder.ledger)
    assert (report.violations, report.num_images) == ((), 2)
    assert main([str(run.folder.path), "--text", "s"]) == 0
    out = capsys.readouterr().out
    assert out.count("what colour?\n           │ [image PNG 56x56, 4 tokens]\n") == 2


async def test_it_is_trained_with_its_images(recorded: tuple[SavedRun, Trajectory], tmp_path: Path) -> None:
    run, trajectory = recorded
    (record,) = records = token_records(trajectory, LossRule())
    assert [record.token_ids[one.start : one.end].tolist() for one in record.images] == [[5] * 4] * 2
    lab = Lab(tmp_path / "model", TrainerConfig(learning_rate=1e-3))
    images = ImageFolder(run.folder.images).of(records)
    metrics = lab.stepper.train(StepInput(step=1, records=records, rewards={"s": 1.0}, images=images))
    assert metrics["num_loss_tokens"] == record.loss_mask.sum()
    kept = ImageFolder(tmp_path / "kept")
    (row,) = read_rollouts(run.folder.path, 1.0, tmp_path / "model", run.renderer.chat_template, kept)
    assert [one.images for one in row.records()] == [record.images]
    assert lab.stepper.fit(row.records(), images=kept.of(row.records()))["num_loss_tokens"] == record.loss_mask.sum()
