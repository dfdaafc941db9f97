"""One small recorded run: `lost` asks for a hint twice and is wrong, `won` is right at once, `cut` was cut off."""

from collections.abc import Iterable
from contextlib import aclosing
from pathlib import Path

import pytest

from areal_agent.config import Config
from areal_agent.engine.fake import FakeEngine
from areal_agent.errors import EngineError
from areal_agent.ledger.encoding import Lease
from areal_agent.ledger.ledger import Ledger
from areal_agent.models.recipe import END
from areal_agent.rollout.local import LocalSettings, open_local
from areal_agent.rollout.runner import RolloutSpec
from areal_agent.rollout.workflow import load_workflow
from areal_agent.run.serving import transcript_settings
from areal_agent.tokens.renderer import Renderer
from areal_agent.tokens.transcript import TRANSCRIPT_NOTE
from areal_agent.types import SessionPurpose, Task
from tests.episode import guessing
from tests.episode.guessing import ASKS, RIGHT, WRONG

SAID = {"lost": (ASKS, ASKS, WRONG), "won": (RIGHT,), "cut": (ASKS,)}


@pytest.fixture
def hint(tmp_path: Path) -> Path:
    """The file that the tool reads."""
    file = tmp_path / "hint"
    file.write_text("It is odd.")
    return file


@pytest.fixture
async def run(tmp_path: Path, small_model: Path, hint: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    config = Config.parse(
        {
            "model": str(small_model),
            "workflow": "tests.episode.guessing:solve",
            "tasks": {"source": "tests.episode.guessing:load", "args": {"file": str(hint)}},
            "engine": {"max_context_tokens": 500, "threads": 1},
            "rollout": {"max_tokens": 8, "max_concurrent": 4},
        }
    )
    (folder / "config.yaml").write_text(config.to_yaml())
    async with aclosing(await Ledger.open(folder / "ledger.sqlite", create=True)) as ledger:
        await ledger.begin_incarnation(0)
        await ledger.set_note(TRANSCRIPT_NOTE, transcript_settings(config, small_model).note())
        await record(config, ledger, small_model, hint)
        leased = [Lease.of(await ledger.trajectory(one), 5) for one in ("lost", "won")]
        await ledger.lease(1, leased)
        await ledger.commit_checkpoint(1, "checkpoints/step_000001")
    return folder


def says(model: Path, texts: Iterable[str]) -> FakeEngine:
    """An engine that says these texts in turn, and then fails."""
    renderer = Renderer.load(model)
    replies = [tuple(renderer.ids_of(text + END)) for text in texts]
    return FakeEngine([*replies, EngineError("the engine is gone")], vocab_size=400, max_context_tokens=500)


async def record(config: Config, ledger: Ledger, model: Path, hint: Path) -> None:
    settings = LocalSettings(
        model_name=config.model, tokenizer=model, port=0, max_concurrent=1, rollout=config.rollout,
        sandbox=config.sandbox,
    )  # fmt: skip
    for task, (session_id, texts) in zip(guessing.load("train", 0, str(hint)), SAID.items(), strict=True):
        engine = says(model, texts)
        workflow = load_workflow(guessing.solve)
        async with open_local(settings, workflow, engine=engine, info=engine.info(), journal=ledger.own) as rollouts:
            spec = RolloutSpec(
                session_id=session_id, group_id="g", task=Task(id=task["id"], data=task), seed=3,
                purpose=SessionPurpose.TRAIN,
            )  # fmt: skip
            await rollouts.run(spec)
