"""No key of a run is in anything that it leaves or prints, though its workflow tells its key to everybody.

Its folder is searched (ledger, logs, config, metrics, checkpoints), its output, its export, and what `view` shows.
While it goes on, one file holds a key, the one that it is for: `admin_key`, which only its owner may read. Its engine
answers nobody else.
"""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from areal_agent.files import RunFolder
from tests.commands import run as run_command

WORKFLOW = '''
import asyncio, json, logging, os, pathlib, stat
import httpx
from areal_agent import Reject
from areal_agent.cluster.hosts import LOCAL

logger = logging.getLogger("mine")

def runner():
    for task in asyncio.all_tasks():
        coroutine = task.get_coro()
        while (frame := getattr(coroutine, "cr_frame", None)) is not None:
            if type(one := frame.f_locals.get("self")).__name__ == "RolloutRunner":
                return one
            coroutine = coroutine.cr_await

async def note(rollout, run):
    """Keep all keys of the run outside of it, what its folder holds of them now, and what its engine tells others."""
    admin_key, engine_key = (run / "admin_key").read_text().strip(), LOCAL.engine_key("embedded")
    keys = [rollout.api_key, runner()._admin_key, admin_key, engine_key]
    async with httpx.AsyncClient(trust_env=False) as client:
        admin = {"Authorization": f"Bearer {admin_key}"}
        shown = await client.get((run / "engines_url").read_text().strip() + "/rl/engines", headers=admin)
        engine = shown.json()["engines"][0]["url"]
        told = [(await client.get(f"{engine}/server_info", headers={"Authorization": f"Bearer {key}"})).status_code
                for key in (admin_key, engine_key)]
    holders = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in run.rglob("*") if path.is_file()
               for key in keys if key.encode() in path.read_bytes()}
    with open(run.parent / "keys.jsonl", "a") as file:
        file.write(json.dumps({"keys": keys, "holders": holders, "told": told}) + "\\n")

async def solve(task, rollout):
    await rollout.client.chat.completions.create(model=rollout.model, messages=task["messages"])
    await note(rollout, pathlib.Path(task["run_dir"]))
    logger.warning("calling with %s", rollout.api_key)
    rollout.log(headers={"Authorization": f"Bearer {rollout.api_key}"}, it=rollout, key=[rollout.api_key])
    kind = int(task["id"]) % 4
    if kind == 0:
        raise ValueError(f"no model for the key {rollout.api_key}")
    if kind == 1:
        raise Reject(f"the key {rollout.api_key} is used up")
    if kind == 2:
        await rollout.client.copy(api_key=rollout.api_key + "x").models.list()
    return float(kind)
'''


@pytest.mark.slow
def test_a_run_leaves_and_prints_no_key(small_model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "leaky.py").write_text(WORKFLOW)
    questions = [{"role": "user", "content": "What is 1?"}]
    tasks = [{"id": str(number), "messages": questions, "run_dir": str(run)} for number in range(8)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    config = {
        "model": str(small_model),
        "workflow": "leaky:solve",
        "tasks": "tasks.jsonl",
        "run_dir": "run",
        "steps": 1,
        "batch_size": 1,
        "group_size": 2,
        "rollout": {"max_tokens": 8, "max_concurrent": 8},
        "engine": {"max_context_tokens": 256},
        "eval": {"num_tasks": 0},
    }
    (tmp_path / "leaky.yaml").write_text(yaml.safe_dump(config))
    printed = [command(tmp_path, "areal_agent.train", "--config", "leaky.yaml")]
    printed.append(command(tmp_path, "areal_agent.ledger", "export", "run", "--parquet", "out.parquet"))
    printed.append(str(pq.read_table(tmp_path / "out.parquet").to_pylist()))
    printed.append(command(tmp_path, "areal_agent.view", "run", "--list", "--failed"))
    failed = next(
        line.split()[0] for line in printed[-1].splitlines() if "ValueError: no model for the key sk-***" in line
    )
    printed.append(command(tmp_path, "areal_agent.view", "run", "--text", failed))

    notes = [json.loads(line) for line in (tmp_path / "keys.jsonl").read_text().splitlines()]
    keys = {key for note in notes for key in note["keys"]}
    assert len(keys) >= 5 and all(len(key) > 20 for key in keys)
    assert [note["holders"] for note in notes] == [{"admin_key": "0o600"}] * len(notes)
    assert [note["told"] for note in notes] == [[401, 200]] * len(notes)
    left = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert {RunFolder(run).ledger, RunFolder(run).config, run / "logs" / "main.log"} <= left.keys()
    assert [(path, key) for path, data in left.items() for key in keys if key.encode() in data] == []
    assert [key for key in keys if any(key in text for text in printed)] == []


def command(folder: Path, *arguments: str) -> str:
    """Return everything that `python -m` with these arguments prints."""
    done = run_command(*arguments, folder=folder)
    done.check_returncode()
    return done.stdout + done.stderr
