"""A run that goes on while it is looked at."""

from pathlib import Path
from typing import Any

import pytest

from areal_agent.ledger.ledger import Ledger
from areal_agent.tokens.transcript import TRANSCRIPT_NOTE, TranscriptSettings
from areal_agent.types import Drop, SessionPurpose, Status
from tests.view.recorder import HOSTILE, Recorder, talk


@pytest.fixture
async def run(tmp_path: Path, small_model: Path) -> Path:
    """A run of three groups and an evaluation, which still goes on: its ledger is open while it is read."""
    folder = tmp_path / "run"
    folder.mkdir()
    ledger = await Ledger.open(folder / "ledger.sqlite", create=True)
    await ledger.begin_incarnation(0)
    await ledger.set_note(TRANSCRIPT_NOTE, TranscriptSettings(tokenizer=str(small_model)).note())
    recorder = Recorder(ledger, small_model)
    await talk(recorder)
    await recorder.session("g1-0", group_id="g1", started_s=3.0, status=Status.ERROR, error="KeyError: 'x' (a.py:3)")
    hostile = recorder.turn("g2-0-1", "user", HOSTILE, HOSTILE)
    await recorder.session("g2-0", hostile, ends=False, group_id="g2", started_s=4.0, task_id=HOSTILE)
    graded = recorder.turn("e-0-1", "user", "Is it so?", "Yes")
    await recorder.session("e-0", graded, group_id="e", purpose=SessionPurpose.EVAL)
    for name in ("cut-0", "cut-1"):
        turn = recorder.turn(f"{name}-1", "user", "What is 3?", "3")
        cut_off: dict[str, Any] = {"status": Status.CANCELLED, "error": "the run ended first"}
        await recorder.session(name, turn, group_id="cut", started_s=5.0, **cut_off)
    await ledger.drop({"g0-1": Drop.STALE, "g1-0": Drop.ERROR, "cut-0": Drop.ORPHAN, "cut-1": Drop.ORPHAN})
    yield folder
    await ledger.aclose()
