"""`python -m areal_agent.episode` plays recorded sessions again.

1. A session whose calls are as recorded ends as it was recorded, without an engine; 2. the first call that differs is
shown as a difference of messages, and parameters that differ are named; 3. what a tool says otherwise is such a
difference, or with `--tools record` only told; 4. calls get their own answers in whatever order they come; 5. a
session that was cut off, an unknown one, a workflow, a task, a tokenizer or a model that is gone are named with the
remedy, as is one with several roles; 6. rewards are computed anew, and a copy has them which the ledger's invariants
hold of; 7. the run is only read; 8. fresh answers after a turn give its value, and the largest drop names the turn that
lost the episode; 9. they come from the model that the run had, when nothing else is named.
"""

import asyncio
import hashlib
import random
import re
import shutil
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path

import orjson
import pytest

from areal_agent.engine.fake import FakeEngine
from areal_agent.episode.__main__ import main
from areal_agent.episode.engine import FreshEngine
from areal_agent.episode.values import Values, values_of
from areal_agent.errors import ConfigError
from areal_agent.images import ImageFolder
from areal_agent.ledger import questions
from areal_agent.ledger.__main__ import main as ledger_command
from areal_agent.ledger.files import reading
from areal_agent.ledger.ledger import Ledger
from areal_agent.models.recipe import END, train_tokenizer
from areal_agent.replay.answers import RecordedAnswers
from areal_agent.replay.saved import SavedRun
from areal_agent.replay.stage import open_stage
from areal_agent.types import GenerateRequest, Rewards, SamplingParams
from tests import histories
from tests.episode.guessing import RIGHT, WRONG


@pytest.fixture
def play(run: Path, capsys: pytest.CaptureFixture[str]):
    def played(*arguments: str) -> tuple[int, str]:
        code = main([str(run), *arguments])
        return code, capsys.readouterr().out

    return played


def digests(folder: Path) -> Mapping[str, str]:
    """The digest of every file, but for the index and the empty log that SQLite keeps for readers."""
    files = (one for one in folder.rglob("*") if one.is_file() and not one.name.endswith(("-shm", "-wal")))
    return {str(one): hashlib.sha256(one.read_bytes()).hexdigest() for one in files}


def test_a_session_is_played_as_recorded(play, run: Path) -> None:
    before = digests(run)
    assert play("lost") == (0, "3 turns as recorded\ncompleted, reward 3\n")
    assert digests(run) == before


def test_a_call_that_differs_is_shown(play) -> None:
    code, out = play("lost", "--workflow", "tests.episode.guessing:polite")
    assert code == 1
    assert "turn 1: the call differs" in out
    assert "-Which number?<|im_end|>\n+Which number, please?<|im_end|>" in out
    assert "never asked for: the answers of turn 1, 2, 3" in out


def test_parameters_that_differ_are_named(play) -> None:
    code, out = play("won", "--workflow", "tests.episode.guessing:brief")
    assert (code, "turn 1: the call is made with other parameters\n- max_tokens: 8\n+ max_tokens: 7\n" in out) == (
        1,
        True,
    )


def test_a_tool_that_says_something_else(play, hint: Path) -> None:
    hint.write_text("It is big.")
    code, out = play("lost")
    assert (code, "turn 2: the call differs" in out, "-It is odd.<|im_end|>\n+It is big.<|im_end|>" in out) == (
        1,
        True,
        True,
    )
    code, out = play("lost", "--tools", "record")
    assert (code, out.count("what it said in the record counts")) == (0, 2)
    assert out.endswith("3 turns as recorded\ncompleted, reward 3\n")


@pytest.mark.parametrize("seed", range(5))
def test_answers_in_any_order(small_model: Path, seed: int) -> None:
    """Two conversations, one of which is sampled twice, and a turn that continues the other."""
    turns = [
        histories.turn(
            "a", histories.completion("a-0", (1,)), histories.completion("a-1", (1, 1)), new_prompt_ids=(5,)
        ),
        histories.turn("b", histories.completion("b-0", (1,) * 3), new_prompt_ids=(6,)),
        histories.turn("c", histories.completion("c-0", (1,) * 4), parent="b-0", fork_at=4, new_prompt_ids=(7,)),
    ]
    answers = RecordedAnswers(turns, None)  # pyright: ignore[reportArgumentType]  # nothing is to be read
    calls = [("a", (5,)), ("a", (5,)), ("b", (6,)), ("c", (6, 0, 1, 2, 7))]
    random.Random(seed).shuffle(calls)

    async def asked() -> list[int]:
        requests = [
            GenerateRequest(request_id=str(number), input_ids=ids, sampling=SamplingParams())
            for number, (_, ids) in enumerate(calls)
        ]
        return [len((await answers.generate(one)).token_ids) for one in requests]

    lengths = zip((name for name, _ in calls), asyncio.run(asked()), strict=True)
    assert sorted(lengths) == [("a", 1), ("a", 2), ("b", 3), ("c", 4)]
    assert (answers.differences, answers.not_made) == ([], ())


def test_a_session_that_was_cut_off(play) -> None:
    code, out = play("cut")
    assert code == 1
    assert "the session is only half written: it ended as infra; --from 1 samples the rest of it" in out


def test_a_rollout_with_several_roles_is_refused(play, run: Path) -> None:
    async def add_role() -> None:
        async with aclosing(await Ledger.open(run / "ledger.sqlite", create=False)) as ledger:
            await ledger.own.open_session(histories.session("lost/black", group_id="g/black"))

    asyncio.run(add_role())
    for one in ("lost", "lost/black"):
        with pytest.raises(ConfigError, match=f"session '{one}' is of a rollout with several roles"):
            play(one)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["lots"], "no session 'lots'; did you mean lost?"),
        (["lost", "--workflow", "tests.episode.guessing:gone"], "'tests.episode.guessing:gone' cannot be imported"),
        (["lost", "--from", "4"], "session 'lost' has 3 turns; give the number of answers to keep, from 0 to 3"),
        (["lost", "--from", "1", "--model", "nowhere"], "'nowhere' is not a Hugging Face folder"),
        (["lost", "--from", "1", "--model", "{other}"], "is not the run's"),
        (["lost", "--samples", "2"], "--samples is for fresh samples; add --from TURN or --values"),
        (["won", "--regrade", "--write", "{taken}"], "exists; name a folder that does not"),
    ],
)
def test_what_is_not_there(play, run: Path, small_model: Path, tmp_path: Path, arguments: list[str], told: str) -> None:
    other = shutil.copytree(small_model, tmp_path / "other")
    train_tokenizer(["other"], vocab_size=300).save_pretrained(other)
    with pytest.raises(ConfigError, match=re.escape(told)):
        play(*(one.format(other=other, taken=run) for one in arguments))


def test_a_task_or_a_tokenizer_that_is_gone(play, run: Path) -> None:
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("guessing:load", "guessing:load_others"))
    with pytest.raises(ConfigError, match="task 'train-0' of session 'lost' is not among the tasks"):
        play("lost")
    with pytest.raises(ConfigError, match="nowhere"):
        play("lost", "--tokenizer", "nowhere")


def test_rewards_are_computed_anew(play, run: Path, tmp_path: Path, capsys) -> None:
    image = ImageFolder(run / "images").keep(b"a picture")
    before, copy = digests(run), tmp_path / "copy"
    code, out = play("--regrade", "--workflow", "tests.episode.guessing:judge", "--write", str(copy))
    assert (code, out.splitlines()[0]) == (1, "lost: 3 -> 4")
    assert "2 sessions: 1 with the same rewards, 1 with others, 0 not as recorded; 1 were cut off" in out
    assert (digests(run), ledger_command(["verify", str(copy)])) == (before, 0)
    assert ImageFolder(copy / "images").file(image).samefile(ImageFolder(run / "images").file(image))
    with reading(copy / "ledger.sqlite") as snapshot:
        lost = questions.trajectory(snapshot, "lost")
    assert lost.rewards == Rewards(final=1.0, by_completion={lost.turns[2].completions[0].id: 3.0})
    assert play("--regrade", "--step", "1")[0] == 0
    capsys.readouterr()


async def sampled(run: Path, small_model: Path, turns: list[int]) -> Values:
    """Sample with an engine that is right after one hint at most."""
    saved = SavedRun.open(run)
    ids = saved.renderer.ids_of

    def say(request: GenerateRequest) -> tuple[int, ...]:
        num_hints = saved.renderer.detokenizer.text_of(request.input_ids).count("It is odd.")
        return tuple(ids((RIGHT if num_hints < 2 else WRONG) + END))

    engine = FakeEngine(say, vocab_size=400, max_context_tokens=500)
    with reading(run / "ledger.sqlite") as snapshot:
        episode = saved.episode(snapshot, "lost")
    async with open_stage(saved, timeout_s=60.0, info=engine.info()) as stage:
        return await values_of(stage, episode, FreshEngine(engine, engine.info(), "fake"), turns, num_samples=2)


async def test_the_value_of_turns(run: Path, small_model: Path, tmp_path: Path, hint: Path) -> None:
    values = await sampled(run, small_model, [0, 1, 2])
    assert [one.rewards for one in values.values] == [(6.0, 6.0), (6.0, 6.0), (3.0, 3.0)]
    assert (values.recorded, values.lost_at) == (3.0, 2)
    written = orjson.loads(values.write(tmp_path / "values").read_bytes())
    assert (written["session_id"], written["lost_at"], len(written["values"])) == ("lost", 2, 3)
    await asyncio.to_thread(hint.write_text, "It is big.")
    (unrepeated,) = (await sampled(run, small_model, [2])).values
    assert (unrepeated.rewards, unrepeated.num_unrepeated) == ((), 2)
    assert unrepeated.why.startswith("turn 2: the call differs")


@pytest.mark.slow
def test_fresh_answers_of_the_runs_own_model(play, small_model: Path, tmp_path: Path) -> None:
    code, out = play("lost", "--from", "1", "--samples", "2", "--out", str(tmp_path / "values"))
    assert (code, f"fresh answers by {small_model}" in out) == (0, True)
    (value,) = orjson.loads((tmp_path / "values" / "lost.json").read_bytes())["values"]
    assert (value["turn"], len(value["rewards"])) == (1, 2)
