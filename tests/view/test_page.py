"""The page of `python -m areal_agent.view`, in a real Chromium.

1. Every view shows what a run recorded: its curves and time line, its rollouts with siblings, a rollout as a
conversation with its branches and facts, the tokens of a turn with their weights and interruptions; 2. rollouts are
filtered, and searched for text and tools, those for evaluation come last; 3. what a run adds is shown while one looks;
4. several runs stand side by side; 5. the keyboard suffices, narrow windows need no sideways scrolling, light and dark
follow the reader; 6. hostile text harms nothing, a line of 1 MB is cut; 7. a list of any length has a handful of rows;
8. a run that is damaged later gets one line, one of the schema before is shown; 9. what the trainer kept stands beside
each token; 10. an exported rollout is one file that needs no server; 11. nothing is fetched elsewhere;
12. images are shown in their turns, in an exported file, too, and are one mark among the tokens.
"""

import asyncio
import re
import shutil
import sqlite3
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import pytest_asyncio

pytest.importorskip("playwright", reason="playwright is not installed; pip install 'areal_agent[test]'")

from playwright.async_api import Browser, Page, async_playwright, expect

from areal_agent.ledger import questions
from areal_agent.ledger.files import reading
from areal_agent.observe.metrics import MetricsLog
from areal_agent.observe.token_records import FOLDER, SeenTokens, TokenRecorder
from areal_agent.tokens.loss_rule import LossRule
from areal_agent.tokens.records import sampled_spans
from tests import histories
from tests.view.browser import CHROMIUM, FLAGS, Reader
from tests.view.recorder import look

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed; apt-get install chromium"),
    pytest.mark.asyncio(loop_scope="module"),  # one browser for all
]

VERSIONS = Path(__file__).parents[1] / "ledger" / "versions"
MARKUP = "<img src=x onerror=alert(1)><script>alert(2)</script>\u202eright to left\x1b[2J\U000e0041"
THOUGHT = {"role": "assistant", "reasoning_content": "Is it?", "content": "No."}
PARTS = {"seconds/wall": 4.0, "seconds/engine/generating": 3.0, "seconds/engine/waiting_for_agents": 1.0}
SIDE = {"seconds/trainer/training": 2.0, "seconds/trainer/waiting_for_rollouts": 2.0, "push/stall_s": 0.5}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        yield await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)


@pytest_asyncio.fixture(loop_scope="module")
async def reader(browser: Browser) -> AsyncIterator[Reader]:
    async with Reader.start(browser) as reader:
        yield reader


def row(step: int, reward: float, **values: float) -> Mapping[str, Any]:
    return {
        "kind": "step",
        "step": step,
        "incarnation": 0,
        "time": 1.0,
        "reward/mean": reward,
        **PARTS,
        **SIDE,
        **values,
    }


def write_rows(run: Path, *rows: Mapping[str, Any]) -> None:
    with closing(MetricsLog(run / "metrics.jsonl")) as log:
        for one in rows:
            log.append(one)


async def asked(page: Page, path: str) -> None:
    """Wait until the page has asked the server for this."""
    async with page.expect_response(lambda reply: path in reply.url):
        pass


async def rows_of(page: Page) -> list[str]:
    """The names in the list of rollouts, once all of it is loaded, or its first hundred."""
    await expect(page.locator(".filters .dim")).to_have_text(re.compile(r"^\d+ of|\d{3}\+ of"))
    return await page.locator(".rows .rollout").all_inner_texts()


async def test_a_run_has_its_curves_and_its_time_line(run: Path, reader: Reader) -> None:
    evaluation = {
        "kind": "evaluation",
        "step": 0,
        "incarnation": 0,
        "time": 0.0,
        "label": "before",
        "eval/success": 0.4,
        "eval/aime24/success": 0.1,
    }
    write_rows(run, evaluation, row(1, 0.25), row(2, 0.5), row(3, 0.75, **{"rollouts/dropped/error": 2}))
    page = await reader.open(run)
    await expect(page.locator("figure h3")).to_have_count(9)
    figures = dict(
        zip(await page.locator("dt").all_inner_texts(), await page.locator("dd").all_inner_texts(), strict=True)
    )
    assert figures == {
        "status": "running", "step": "3", "reward": "0.75", "held-out success": "0.4",
        "aime24 success": "0.1", "rollouts": "7",
        "tokens trained": "0", "time": "12.0 s",
    }  # fmt: skip
    assert await page.locator("figure h3").all_inner_texts() == [
        "Reward", "Tokens per second", "Stalenessversions", "Mismatch of trainer and enginenats",
        "Shared prefixestokens", "The engine's time", "The trainer's time", "What happened",
        await page.locator("h3 select").inner_text(),
    ]  # fmt: skip
    ticks = await page.locator(".tick title").evaluate_all("all => all.map((one) => one.textContent)")
    assert ticks == [
        *(f"step {step}: push, stall of 0.5 s" for step in (1, 2, 3)),
        "step 1: checkpoint",
        "step 0: evaluation before: 0.4, aime24 0.1",
        "step 3: dropped error: 2",
    ]
    await page.locator("figure svg").first.hover()
    await expect(page.locator("figcaption").first).to_contain_text("step 2")
    await expect(page.locator("figcaption").first).to_contain_text("mean 0.5")
    await page.locator("figure svg").nth(5).hover()
    await expect(page.locator("figcaption").nth(5)).to_contain_text("generating 75% · waiting for agents 25%")
    await page.locator("figure svg").first.click()
    await expect(page).to_have_url(f"{reader.address}#/rollouts/0?step=2")


async def test_a_step_that_was_trained_again_counts_once(run: Path, reader: Reader) -> None:
    write_rows(run, row(1, 0.1), row(2, 0.9), row(3, 0.9), row(2, 0.2))
    page = await reader.open(run)
    await expect(page.locator("dd").nth(1)).to_have_text("2")
    await expect(page.locator("dd").nth(2)).to_have_text("0.2")


async def test_rollouts_have_their_siblings_rewards_and_fates(run: Path, reader: Reader) -> None:
    page = await reader.open(run, at="#/rollouts/0")
    assert await rows_of(page) == ["cut-1", "cut-0", "g2-0", "g1-0", "g0-1", "g0-0", "e-0"]
    found = page.locator(".rows .row", has_text="g0-0")
    assert await found.locator("> span").all_inner_texts() == [
        "g0-0", "0.75", "", "trained(1)", "1", "0–1", "4", "116", "8.0 s", "0",
    ]  # fmt: skip
    assert await found.locator(".siblings i").evaluate_all("all => all.map((one) => one.className)") == [
        "self good",
        "bad",
    ]
    await expect(page.locator(".rows .row", has_text="g1-0")).to_contain_text("KeyError: 'x' (a.py:3)")


FILTERS = {
    "status=error": ["g1-0"],
    "status=open": ["g2-0"],
    "fate=dropped": ["cut-1", "cut-0", "g1-0", "g0-1"],
    "fate=stale": ["g0-1"],
    "fate=evaluation": ["e-0"],
    "step=1": ["g0-0"],
    "least_reward=0.5&purpose=train": ["g0-0"],
    "most_reward=0.5": ["g0-1"],
    "least_tokens=100": ["g0-0"],
    "version=7": [],
    "version=1&fate=stale": ["g0-1"],
    "group=g0": ["g0-1", "g0-0"],
    "tool=python": ["g0-0"],
    "text=really?": ["g0-0"],
    "text=the ANSWER is 4": ["g0-0"],
    "text=nowhere": [],
}


async def test_rollouts_are_filtered_and_searched(run: Path, reader: Reader) -> None:
    page = await reader.open(run)
    found: dict[str, list[str]] = {}
    for filters in FILTERS:
        await page.goto(f"{reader.address}#/rollouts/0?{filters}")
        found[filters] = await rows_of(page)
    assert found == FILTERS


async def test_a_search_shows_the_place(run: Path, reader: Reader) -> None:
    page = await reader.open(run, at="#/rollouts/0")
    await rows_of(page)
    await page.keyboard.press("/")
    await page.keyboard.type("answer is 4")
    await page.keyboard.press("Enter")
    await expect(page.locator(".filters .dim")).to_have_text("1 of 7 rollouts; 7 read")
    await expect(page.locator(".rows .row em")).to_contain_text("The answer is 4.")
    async with page.expect_response(lambda reply: "text=answer" in reply.url):
        await page.get_by_role("button", name="find").click()  # asks again
    await expect(page.locator(".rows .row em")).to_contain_text("The answer is 4.")


async def test_the_value_of_turns_is_shown(run: Path, reader: Reader, tmp_path: Path) -> None:
    values = [{"turn": 0, "mean": 0.75, "low": 0.3, "high": 0.95, "rewards": [1, 1, 1, 0]}, {"turn": 1, "mean": None}]
    fields = {"values": values, "recorded": 0.25, "num_turns": 4, "lost_at": 4, "engine": MARKUP}
    await asyncio.to_thread((tmp_path / "g0-0.json").write_bytes, orjson.dumps(fields))
    await reader.serve(run, values=tmp_path)
    page = await reader.visit(f"{reader.address}#/rollout/0/g0-0")
    rows = page.locator("table.values tr")
    await expect(rows).to_have_text(
        ["at the beginning0.750.3 to 0.95, 4 samples", "after turn 40.25as recordedlost here"]
    )
    await rows.get_by_role("button").click()
    await expect(page.locator("#turn-3")).to_have_class(re.compile("selected"))


async def test_a_rollout_is_a_conversation_with_its_branches(run: Path, reader: Reader) -> None:
    page = await reader.open(run, at="#/rollout/0/g0-0")
    branches = ["branch: edited; it keeps 7 tokens up to turn 1", "branch: new_conversation"]
    await expect(page.locator("h3 .branch")).to_have_text(branches)
    said = page.locator(".turn").first
    await expect(said.locator(".message.user")).to_contain_text("What is 2 + 2?")
    await expect(said.locator(".message.call")).to_contain_text("a = 2\nprint(a + 2)", use_inner_text=True)
    await expect(page.locator(".turn").nth(1).locator(".message.tool")).to_contain_text("4")
    await expect(page.locator(".turn").nth(3)).to_contain_text("its first 1 messages are those of turn 1")
    facts = await page.locator(".facts").all_inner_texts()
    assert "interrupted 1×" in facts[0] and "in the loss" in facts[0]
    assert "not in the loss: altered" in facts[1] and "reward 0.25" in facts[1]
    heading = await page.locator("section > header").inner_text()
    for part in ("task 0", "group g0", "trained(1)", "30 tokens of step 1", "part format\n1", "tries\n2"):
        assert part in heading, part
    await page.locator("a.sibling").nth(1).click()
    await expect(page.locator("h2")).to_have_text("g0-1")


async def test_the_tokens_of_a_turn_have_their_weights_and_interruptions(run: Path, reader: Reader) -> None:
    page = await reader.open(run, at="#/tokens/0/g0-1/t5")
    await expect(page.locator(".flow .push")).to_have_text("⟂ weights 0:1")
    assert "".join(await page.locator(".flow .token").all_inner_texts()).endswith("assistant⏎5<|im_end|>")
    last = page.locator(".rows .row").last
    values = await last.locator("> span").all_inner_texts()
    assert values[2:4] == ["<|im_end|>", "-0.5000"]
    assert values[7:] == ["0:1", "not in the loss: dropped(stale)"]
    colours = page.locator("select")
    await colours.select_option("weight version")
    await expect(page.locator(".token.version1")).to_have_text("<|im_end|>")
    await colours.select_option("in the loss")
    assert await page.locator(".token.low4").count() == 2


async def test_what_a_run_adds_is_shown(run: Path, reader: Reader) -> None:
    write_rows(run, row(1, 0.25))
    page = await reader.open(run)
    await expect(page.locator("dd").nth(1)).to_have_text("1")
    write_rows(run, row(2, 0.5))
    await expect(page.locator("dd").nth(1)).to_have_text("2")
    await page.goto(f"{reader.address}#/rollouts/0")
    assert len(await rows_of(page)) == 7
    with closing(sqlite3.connect(run / "ledger.sqlite")) as connection, connection:
        connection.execute(
            "INSERT INTO sessions (id, group_id, task_id, purpose, seed, key_hash, started_s) "
            "VALUES ('new', 'g', 't', 'train', 0, '', 9)"
        )
    await expect(page.locator(".rows .rollout").first).to_have_text("new")
    await page.goto(f"{reader.address}#/rollout/0/g2-0")
    await expect(page.locator(".turn")).to_have_count(1)
    with closing(sqlite3.connect(run / "ledger.sqlite")) as connection, connection:
        columns = "session, parent, fork_at, fork_reason, new_prompt_ids, request_delta, sampling, started_s, ended_s"
        connection.execute(f"INSERT INTO turns (id, {columns}) SELECT 'next', {columns} FROM turns WHERE id = 'g2-0-1'")
    await expect(page.locator(".turn")).to_have_count(2)


async def test_runs_stand_side_by_side(run: Path, tmp_path: Path, reader: Reader) -> None:
    write_rows(run, row(1, 0.25), row(2, 0.5))
    other = tmp_path / "other"
    shutil.copytree(run, other)
    write_rows(other, row(3, 1.0))
    page = await reader.open(run, other)
    await expect(page.locator("h2")).to_have_text(["run", "other"])
    await expect(page.locator("figure").first.locator("path.run1")).to_have_count(2)
    await page.get_by_role("link", name="other").click()
    await expect(page).to_have_url(f"{reader.address}#/rollouts/1")


async def test_the_keyboard_suffices(run: Path, reader: Reader) -> None:
    page = await reader.open(run, at="#/rollouts/0?group=g0")
    await rows_of(page)
    for key in ("j", "j", "k", "j", "Enter"):
        await page.keyboard.press(key)
    await expect(page.locator("h2")).to_have_text("g0-0")
    await page.keyboard.press("j")
    await page.keyboard.press("j")
    await expect(page.locator(".turn.selected h3")).to_contain_text("turn 2")
    await page.keyboard.press("t")
    await expect(page.locator("h2")).to_contain_text("turn 2 of 4")
    await page.keyboard.press("n")
    await expect(page.locator("h2")).to_contain_text("turn 3 of 4")
    await page.keyboard.press("Escape")
    await expect(page.locator(".turn.selected h3")).to_contain_text("turn 3")
    await page.keyboard.press("?")
    await expect(page.locator("dialog")).to_contain_text("next and previous")
    await page.keyboard.press("Escape")
    await expect(page.locator("dialog")).to_have_count(0)
    await expect(page.locator(".turn.selected h3")).to_contain_text("turn 3")
    await page.keyboard.press("Escape")
    await expect(page).to_have_url(f"{reader.address}#/rollouts/0?group=g0")
    await expect(page.locator(".row.selected")).to_contain_text("g0-0")


async def test_narrow_windows_and_both_schemes(run: Path, reader: Reader) -> None:
    write_rows(run, row(1, 0.25), row(2, 0.5))
    papers: set[str] = set()
    await reader.serve(run)
    for scheme in ("light", "dark"):
        page = await reader.visit(reader.address, viewport={"width": 380, "height": 700}, color_scheme=scheme)
        papers.add(await page.evaluate("getComputedStyle(document.body).backgroundColor"))
        for place, ready in (
            ("", "figure"),
            ("rollouts/0", ".rows .row"),
            ("rollout/0/g0-0", ".turn"),
            ("tokens/0/g0-0/t1", ".token"),
        ):
            await page.goto(f"{reader.address}#/{place}")
            await page.locator(ready).first.wait_for()
            assert await page.evaluate("document.querySelector('main').scrollWidth <= innerWidth"), place
    assert len(papers) == 2


async def test_a_long_prompt_does_not_hide_the_answer(run: Path, reader: Reader) -> None:
    ids = np.arange(9000, dtype="<i4") % 200
    with closing(sqlite3.connect(run / "ledger.sqlite")) as connection, connection:
        connection.execute("UPDATE turns SET new_prompt_ids = ? WHERE id = 't5'", (ids.tobytes(),))
    page = await reader.open(run, at="#/tokens/0/g0-1/t5?by=weight version")
    await expect(page.locator(".token.version1")).to_be_in_viewport()
    await expect(page.locator(".token")).to_have_count(1002)
    await expect(page.locator(".rows .row").last.locator("> span").first).to_have_text("9001")
    await page.keyboard.press("j")
    await expect(page.locator(".token.selected")).to_have_text("5")
    await page.get_by_role("button", name="show all 9,002 tokens").click()
    await expect(page.locator(".token")).to_have_count(9002)


async def test_hostile_text_harms_nothing(run: Path, reader: Reader) -> None:
    with closing(sqlite3.connect(run / "ledger.sqlite")) as connection, connection:
        big = orjson.dumps(
            [{"role": MARKUP, "content": MARKUP}, {"role": "user", "content": "x" * 2**20 + "end"}, THOUGHT]
        )
        connection.execute("UPDATE turns SET request_delta = ? WHERE id = 'e-0-1'", (big.decode(),))
        connection.execute("UPDATE sessions SET task_id = ? WHERE id = 'e-0'", (MARKUP,))
    page = await reader.open(run, at="#/rollouts/0")
    await expect(page.locator(".rows .row", has_text="e-0").locator(".task")).to_have_text(
        MARKUP.replace("\u202e", "\\u202e").replace("\x1b", "\\u001b").replace("\U000e0041", "\\u{e0041}")
    )
    await page.goto(f"{reader.address}#/rollout/0/e-0")
    await expect(page.locator(".turn")).to_contain_text("<script>alert(2)</script>\\u202eright to left\\u001b[2J")
    assert await page.locator("main img, main script").count() == 0
    await expect(page.locator(".message.reasoning")).to_contain_text("Is it?")
    assert len(await page.locator(".message.user .text").inner_text()) < 5000
    await page.get_by_role("button", name="show all 1,048,579 characters").click()
    await expect(page.locator(".message.user .text .block").last).to_have_text("x" * 8576 + "end")
    await page.goto(f"{reader.address}#/rollout/0/g2-0")
    await expect(page.locator(".turn")).to_contain_text("\\u001b]0;owned\\u0007")


async def test_a_long_list_has_a_handful_of_rows(tmp_path: Path, reader: Reader) -> None:
    async with histories.open_ledger(tmp_path):
        pass
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as connection, connection:
        connection.executemany(
            "INSERT INTO sessions (id, group_id, task_id, purpose, seed, key_hash, started_s) "
            "VALUES (?, ?, '0', ?, 0, '', ?)",
            [(f"s{number}", f"g{number // 4}", "eval" if number < 5 else "train", number) for number in range(20_000)],
        )
    page = await reader.open(tmp_path, at="#/rollouts/0")
    await expect(page.locator(".rows .rollout").first).to_have_text("s19999")
    space = page.locator(".space")
    for _ in range(4):
        height = await space.evaluate("(one) => one.clientHeight")
        await page.locator(".rows").evaluate("(one) => one.scrollTo(0, one.scrollHeight)")
        await page.wait_for_function("(before) => document.querySelector('.space').clientHeight > before", arg=height)
    assert await page.locator(".rows .row").count() < 80
    place = await page.locator(".rows").evaluate("(one) => (one.scrollTop -= 900)")
    await page.locator(".rows .row").nth(20).click()
    await expect(page.locator("main .empty")).to_have_text("The model was not called yet.")
    await page.keyboard.press("Escape")  # back to the list, as it was left
    await page.wait_for_function("(place) => document.querySelector('.rows')?.scrollTop === place", arg=place)
    await page.goto(f"{reader.address}#/rollouts/0?purpose=eval")
    await expect(page.locator(".rows .rollout").last).to_have_text("s0")


async def test_a_run_that_is_damaged_later_gets_one_line(run: Path, tmp_path: Path, reader: Reader) -> None:
    page = await reader.open(run, at="#/rollouts/0")
    await rows_of(page)
    with closing(sqlite3.connect(run / "ledger.sqlite")) as connection, connection:
        connection.execute("UPDATE completions SET versions = 'torn' WHERE id = 't5-c'")
        connection.execute("UPDATE turns SET sampling = '{' WHERE id = 't1'")
    await page.goto(f"{reader.address}#/rollout/0/g0-0")
    await expect(page.locator("main .error")).to_contain_text("turn 't1' is damaged")
    await asked(page, "api/0/state")  # news of the run do not take that away
    await expect(page.locator("main .error")).to_contain_text("turn 't1' is damaged")
    await page.goto(f"{reader.address}#/rollouts/0?group=g0")
    await expect(page.locator(".filters .error")).to_contain_text("an answer of session 'g0-1' is damaged")
    odd = b'{"kind":"step"\n5\nnull\n[]\n{"kind":"step","step":1,"reward/mean":NaN}\n{"kind":"step"}\n'
    (run / "metrics.jsonl").write_bytes(odd + orjson.dumps(row(1, 0.5)) + b"\n{torn")
    await page.goto(f"{reader.address}#/")
    await expect(page.locator(".summary")).to_contain_text("6 rows of metrics.jsonl are damaged and left out")
    await expect(page.locator("figure").first).to_contain_text("0.5")
    shutil.move(run, tmp_path / "moved")
    await expect(page.locator("#notice.error")).to_contain_text("was moved, deleted or replaced")
    shutil.move(tmp_path / "moved", run)
    await expect(page.locator("#notice")).to_be_hidden()


async def test_there_is_no_such_view(run: Path, reader: Reader) -> None:
    page = await reader.open(run)
    for place in ("none/0", "rollouts/7", "rollouts/length", "constructor", "rollout/0/%E0%A4%A"):
        await page.goto(f"{reader.address}#/{place}")
        await expect(page.locator("main .error")).to_be_visible()
        await page.goto(f"{reader.address}#/")
        await expect(page.locator("main .error")).to_have_count(0)


async def test_a_run_of_the_schema_before_is_shown(tmp_path: Path, reader: Reader) -> None:
    for script in (VERSIONS / "2").glob("*.sql"):
        with closing(sqlite3.connect(tmp_path / f"{script.stem}.sqlite")) as connection:
            connection.executescript(script.read_text())
    before = contents(tmp_path)
    page = await reader.open(tmp_path, at="#/rollouts/0")
    names = await rows_of(page)
    await page.locator(".rows .row").last.click()
    await expect(page.locator("h2")).to_have_text(names[-1])
    assert contents(tmp_path) == before


def contents(folder: Path) -> Mapping[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.sqlite")}


async def test_what_the_trainer_kept_stands_beside_each_token(run: Path, reader: Reader) -> None:
    """The first answer of g0-0 is trained in the branch that ends with it: those after it keep none of its tokens."""
    recorder = TokenRecorder(run / FOLDER, share=1.0)
    with reading(run / "ledger.sqlite") as snapshot:
        trajectory = questions.trajectory(snapshot, "g0-0")
    branches = enumerate(one.get("t1-c", (0, 0)) for one in sampled_spans(trajectory, LossRule()))
    branch, start = next((branch, start) for branch, (start, end) in branches if end > start)
    values = (np.array(one, np.float32) for one in ([-0.25, -1.5], [-0.5, -1.5], [2.0, -1.0]))
    recorder.add("g0-0", branch, SeenTokens(np.array([start, start + 2], np.int32), *values))
    recorder.write(1)
    page = await reader.open(run, at="#/rollout/0/g0-0")
    await expect(page.locator(".facts").first).to_contain_text("credit 0.5")
    await page.goto(f"{reader.address}#/tokens/0/g0-0/t1")
    await expect(page.locator("section > header")).to_contain_text("The trainer's values of 2 tokens were kept.")
    await page.locator(".token").nth(22).click()  # its prompt has 22
    seen = page.locator(".rows .row.selected > span")
    assert (await seen.all_inner_texts())[3:] == ["-0.5000", "-0.2500", "1.2840", "2.0000", "0:0", "in the loss"]
    await page.keyboard.press("j")
    assert (await seen.all_inner_texts())[4:] == ["", "", "", "0:0", "not in the loss: left out by the step"]
    await page.locator("select").select_option("advantage")
    await expect(page.locator(".legend")).to_have_text("-1 to 2; full colour at 2")
    assert await page.locator(".token.high7, .token.low4").count() == 2


async def exported_from(page: Page, folder: Path) -> Path:
    async with page.expect_download() as download:
        await page.get_by_role("link", name="export").click()
    made = await download.value
    await made.save_as(folder / made.suggested_filename)
    return folder / made.suggested_filename


async def test_an_exported_rollout_is_one_file(run: Path, tmp_path: Path, reader: Reader) -> None:
    with closing(sqlite3.connect(run / "ledger.sqlite")) as connection, connection:
        hostile = orjson.dumps([{"role": "user", "content": "</script>" + MARKUP}])
        connection.execute("UPDATE turns SET request_delta = ? WHERE id = 't1'", (hostile.decode(),))
    page = await reader.open(run, at="#/rollout/0/g0-0")
    file = await exported_from(page, tmp_path)
    assert file.name == "rollout-g0-0.html"
    await page.close()
    num_asked = len(reader.asked)
    page = await reader.visit(file.as_uri())
    await expect(page.locator("h2")).to_have_text("g0-0")
    await expect(page.locator(".turn").first).to_contain_text("</script><img src=x")
    assert await page.locator(".turn").count() == 4
    await page.keyboard.press("n")
    await page.keyboard.press("Escape")  # there is nothing else in the file
    await page.get_by_role("link", name="tokens").nth(1).click()
    await expect(page.locator("h2")).to_contain_text("turn 2 of 4")
    await expect(page.locator(".token").last).to_contain_text("<|im_end|>")
    assert all(one.startswith("file:") for one in reader.asked[num_asked:])


async def test_a_copied_request_is_sent_by_a_shell(run: Path, tmp_path: Path, reader: Reader) -> None:
    text = """it's "quoted" $HOME `id` \\n """ + "x" * 300_000  # more than a shell passes as an argument
    with closing(sqlite3.connect(run / "ledger.sqlite")) as connection, connection:
        delta = orjson.dumps([{"role": "user", "content": text}]).decode()
        connection.execute("UPDATE turns SET request_delta = ? WHERE id = 't1'", (delta,))
    page = await reader.open(run, at="#/rollout/0/g0-0", permissions=["clipboard-read", "clipboard-write"])
    await page.locator(".turn").nth(1).get_by_role("button", name="curl").click()
    await expect(page.locator("#notice")).to_have_text("curl is copied")
    script = tmp_path / "copied"
    script.write_text(await page.evaluate("navigator.clipboard.readText()"))
    (tmp_path / "curl").write_text('#!/bin/sh\nprintf "%s\\n" "$1"; cat\n')  # it shows where it would send what
    (tmp_path / "curl").chmod(0o755)
    made = await asyncio.to_thread(
        subprocess.run, ["bash", script], capture_output=True, check=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "OPENAI_BASE_URL": "http://here/v1", "OPENAI_API_KEY": "sk-key"},
    )  # fmt: skip
    address, sent = made.stdout.decode().split("\n", 1)
    assert address == "http://here/v1/chat/completions"
    body = orjson.loads(sent)
    assert [one["role"] for one in body["messages"]] == ["user", "assistant", "tool"]
    assert body["messages"][0]["content"] == text
    assert (body["temperature"], body["max_tokens"]) == (1.0, 256)


async def test_images_are_shown_and_exported(tmp_path: Path, small_model: Path, reader: Reader) -> None:
    digest = await look(tmp_path, small_model)
    page = await reader.open(tmp_path, at="#/rollout/0/look")
    reply = await page.request.get(f"{reader.address}images/0/{digest}")
    assert (reply.headers["content-type"], reply.headers["x-content-type-options"]) == ("image/png", "nosniff")
    sent = await reader.visit((await exported_from(page, tmp_path)).as_uri())
    for shown in (page, sent):
        await expect(shown.locator(".message.tool .text")).to_have_text("Done")
        await expect(shown.locator(".message.tool img")).to_have_js_property("naturalWidth", 56)
        await shown.get_by_role("link", name="tokens").click()
        marked = shown.locator(".rows .row", has_text="‹image 4 tokens›")
        await expect(marked).to_have_count(1)
        place = int(await marked.locator(".column0").inner_text())
        numbers = [int(one) for one in await shown.locator(".rows .row .column0").all_inner_texts()]
        assert place + 4 in numbers
        assert not {place + 1, place + 2, place + 3} & {*numbers}
