"""`play` refuses what cannot be played, with the value and the remedy, before anything is started."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from areal_agent.errors import ConfigError, LedgerError
from areal_agent.testing import play

TASK = {"question": "What is 2 + 2?"}


async def solve(task, rollout) -> float:
    messages = [{"role": "user", "content": task["question"]}]
    reply = await rollout.client.chat.completions.create(model=rollout.model, messages=messages)
    return float(reply.choices[0].message.content == "4")


@pytest.mark.parametrize(
    ("task", "answers", "others", "said"),
    [
        ("What is 2 + 2?", ["4"], {}, r"the task is 'What is 2 \+ 2\?'; give a mapping"),
        (None, ["4"], {}, "the task is None"),
        (TASK, [4], {}, "the answers: 4 is no text; give one text for each call"),
        (TASK, [["4", "5"]], {}, r"the answers: \['4', '5'\] is no text"),
        (TASK, ["4"], {"judge": "yes"}, r"others\['judge'\]: 'yes' is no list of texts"),
        (TASK, ["4"], {"judge": 1}, r"others\['judge'\]: 1 is no list of texts"),
        (TASK, ["4"], {"judge": [b"yes"]}, r"others\['judge'\]: b'yes' is no text"),
    ],
)
def test_arguments_that_cannot_be_played(task: Any, answers: list[Any], others: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        play(solve, task, *answers, others=others)


def test_a_ledger_is_a_new_one(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.sqlite"
    assert play(solve, TASK, "4", ledger=ledger).rewards.final == 1.0
    for there in (ledger, tmp_path):
        with pytest.raises(LedgerError, match="exists, and play writes a new ledger; name a file that does not exist"):
            play(solve, TASK, "4", ledger=there)


async def test_in_a_running_loop_a_thread_plays() -> None:
    with pytest.raises(RuntimeError, match=r"one runs here; await asyncio.to_thread\(play, ...\)"):
        play(solve, TASK, "4")
    assert (await asyncio.to_thread(play, solve, TASK, "4")).rewards.final == 1.0
