"""`areal_agent.eval` on a model behind an OpenAI-compatible URL, against a scripted server.

1. it is graded as any other, from plain functions too, with the API's own count of tokens; the key is in no file; what
was interrupted is resumed; 2. answers 429, 5xx, garbage and silence are tried again, and never count as wrong,
whatever the workflow makes of them, also in another role; 3. a refused key or an unknown model ends it at once; 4. the
run's sampling counts where a request says nothing, and a limit has the name that the API knows; 5. use is read from
answers of every kind; 6. what does not fit is refused.
"""

import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from pyarrow.parquet import read_table

from areal_agent.config import Config
from areal_agent.errors import ConfigError
from areal_agent.ledger import questions
from areal_agent.ledger.files import reading
from areal_agent.rollout.relay import ApiUse
from areal_agent.run.grading import compare, evaluate, resume
from areal_agent.run.run import Run
from areal_agent.types import Status
from tests.commands import run as run_command

KEY = "very-secret-4711"
WORKFLOWS = """
def load(split, seed):
    return [{"id": "easy", "question": "1+1?", "answer": "2", "tags": ["sum"]},
            {"id": "hard", "question": "6*7?", "answer": "42"}]

def plain(task, rollout):
    reply = rollout.sync_client.chat.completions.create(
        model=rollout.model, messages=[{"role": "user", "content": task["question"]}])
    return {reply.id: float(reply.choices[0].message.content == task["answer"])}

async def careless(task, rollout):
    try:
        reply = await rollout.client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": task["question"]}], top_p=0.5)
        return float(reply.choices[0].message.content == task["answer"])
    except Exception:
        return 0.0

async def duel(task, rollout):
    await careless({"question": task["id"], "answer": ""}, await rollout.role("black"))
    return await careless(task, rollout)
"""
Answer = tuple[int, str] | None
Script = Callable[[dict[str, Any]], Answer]


def said(text: str, tokens: int = 7) -> Answer:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    usage = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}
    body = {"id": "c-1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
    return 200, json.dumps(body)


class Server:
    """Answers by a script; None is silence until the end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.script: Script = lambda _: said("2")
        self.asked: list[dict[str, Any]] = []
        self.is_over = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.asked.append({"path": self.path, **body})
                knows = self.headers["Authorization"] == f"Bearer {KEY}"
                answer = server.script(body) if knows else (401, f'{{"error": {{"message": "not {KEY}"}}}}')
                if answer is None:
                    server.is_over.wait()
                    return
                self.send_response(answer[0])
                for name, value in (("Content-Type", "application/json"), ("retry-after-ms", "1")):
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer[1])))
                self.end_headers()
                self.wfile.write(answer[1].encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        monkeypatch.setenv("API_KEY", KEY)
        monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)  # 0.5 s before it tries again

    def keys(self, **more: object) -> list[str]:
        api = {"url": self.url, "model": "large", "key_env": "API_KEY", "max_retries": 1, **more}
        return [f"eval.api={json.dumps(api)}"]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server(monkeypatch)
    thread = threading.Thread(target=server.http.serve_forever)
    thread.start()
    (tmp_path / "by_api.py").write_text(WORKFLOWS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(
        "workflow: by_api:plain\ntasks: by_api:load\neval: {num_tasks: 2}\nobserve: {progress: none}\n"
        "rollout: {max_tokens: 8000, temperature: 0.25}\n"
    )
    yield server
    server.is_over.set()
    server.http.shutdown()
    thread.join()
    server.http.server_close()


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def test_it_is_graded_as_any_other(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate("c.yaml", server.keys(), num_samples=2) == 0
    folder, told = tmp_path / "runs" / "c-eval", capsys.readouterr().out
    assert "pass@1      0.500" in told and "7 tokens, 1.0 turns" in told and "an API gives no token records" in told
    found = results(folder)
    assert (found["model"], found["url"], found["has_token_records"]) == ("large", server.url, False)
    rows = read_table(folder / "results.parquet").to_pylist()
    assert [(one["task_id"], one["reward"], one["is_success"], one["tags"]) for one in rows[1:3]] == [
        ("easy", 1.0, True, ["sum"]),
        ("hard", 0.0, False, []),
    ]
    assert {(one["num_tokens"], one["num_turns"], one["answer"]) for one in rows} == {(7, 1, None)}
    assert found["by_tag"]["sum"]["pass_at_1"]["mean"] == 1.0
    with ZipFile(folder / "results.eval") as log:
        played = json.loads(log.read("samples/easy_epoch_2.json"))
    assert [(one["role"], one["content"]) for one in played["messages"]] == [("user", "1+1?"), ("assistant", "2")]
    with sqlite3.connect(folder / "ledger.sqlite") as connection:  # as if it had been interrupted before the last one
        connection.execute("UPDATE endings SET status = 'cancelled' WHERE number = (SELECT max(number) FROM endings)")
    num_asked = len(server.asked)
    assert resume(folder, ()) == 0 and len(server.asked) == num_asked + 1
    assert "1 answers are kept" not in capsys.readouterr().err
    assert compare(folder, folder).splitlines()[3] == "0 tasks better, 0 worse, 2 alike"
    other = ["eval.num_tasks=1", "rollout.temperature=0.5", f"run_dir={tmp_path / 'other'}"]
    assert evaluate("c.yaml", [*server.keys(), *other]) == 0
    assert compare(folder, tmp_path / "other").splitlines()[2:5] == [
        "they differ in samples: 2 / 1",
        "they differ in temperature: 0.25 / 0.5",
        f"only 1 of the 2 tasks in {folder} are compared",
    ]
    with reading(folder / "ledger.sqlite") as snapshot:
        _, trajectory = questions.recorded(snapshot, "eval-00000-0")
    assert trajectory is not None and trajectory.rewards.by_completion == {"c-1": 1.0}
    assert trajectory.logged["api.1"]["asked"]["messages"][0]["content"] == "1+1?"
    assert [path for path in folder.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()] == []


@pytest.mark.parametrize(
    ("fault", "more"),
    [
        *(((status, "{}"), {}) for status in (403, 429, 500, 503)),
        *(
            ((200, text), {})
            for text in ("<html>", "", '{"choices": []}', json.dumps({"error": {"message": f"overloaded, {KEY}"}}))
        ),
        (None, {"timeout_s": 0.5}),
    ],
    ids=str,
)
def test_what_the_api_fails_is_tried_again_and_never_wrong(
    server: Server, tmp_path: Path, fault: Answer, more: dict[str, Any]
) -> None:
    def script(body: dict[str, Any]) -> Answer:
        is_hard = body["messages"][0]["content"] == "6*7?"
        return fault if is_hard or len(server.asked) < 3 else said("2")

    server.script = script
    keys = [*server.keys(**more), "workflow=by_api:careless", "rollout.max_concurrent=1"]
    assert evaluate("c.yaml", keys) == 0
    found = results(tmp_path / "runs" / "c-eval")
    assert (found["scores"]["pass_at_1"]["mean"], found["scores"]["failures"]) == (1.0, {"infra": 1})
    num_tries = 1 if fault is not None and fault[0] == 403 else 2  # a refusal is not tried again by the client
    assert sum(one["messages"][0]["content"] == "6*7?" for one in server.asked) == 3 * num_tries
    with reading(tmp_path / "runs" / "c-eval" / "ledger.sqlite") as snapshot:
        assert len(questions.eval_endings(snapshot)) == 5
        _, trajectory = questions.recorded(snapshot, "eval-00001-0-r2")
    assert trajectory is not None and (trajectory.error or "").startswith("the API failed: ")
    assert KEY not in str(trajectory)


def test_what_the_api_fails_in_another_role_fails_the_rollout(server: Server, tmp_path: Path) -> None:
    server.script = lambda body: (500, "{}") if body["messages"][0]["content"] == "hard" else said("2")
    assert evaluate("c.yaml", [*server.keys(), "workflow=by_api:duel", "rollout.max_concurrent=1"]) == 0
    scores = results(tmp_path / "runs" / "c-eval")["scores"]
    assert (scores["pass_at_1"]["mean"], scores["failures"]) == (1.0, {"infra": 1})
    with reading(tmp_path / "runs" / "c-eval" / "ledger.sqlite") as snapshot:
        own, black = questions.rollout(snapshot, "eval-00001-0")
    assert (own.status, black.status) == (Status.INFRA, Status.INFRA)
    assert (own.error or "").startswith("role 'black': the API failed: ")


@pytest.mark.parametrize(
    ("status", "key", "message"),
    [
        (200, "wrong", r"does not take the key \(it answers 401\); check the key in API_KEY$"),
        (402, KEY, r"wants to be paid \(it answers 402\); check the key in API_KEY$"),
        (404, KEY, r"does not have this model, or not this call \(it answers 404\); check url and the model 'large'$"),
    ],
)
def test_a_refusal_ends_it_at_once(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, key: str, message: str
) -> None:
    monkeypatch.setenv("API_KEY", key)
    server.script = lambda _: (status, "{}")
    with pytest.raises(ConfigError, match=message):
        evaluate("c.yaml", [*server.keys(), "workflow=by_api:careless", "rollout.max_concurrent=1"])
    assert len(server.asked) == 1 and not (tmp_path / "runs" / "c-eval").exists()


@pytest.mark.parametrize("overrides", [False, True])
def test_the_sampling(server: Server, overrides: bool) -> None:
    def script(body: dict[str, Any]) -> Answer:
        return (
            said("2") if "max_completion_tokens" in body else (400, "use max_completion_tokens instead of max_tokens")
        )

    server.script = script
    keys = [*server.keys(), "workflow=by_api:careless", f"rollout.sampling_override={str(overrides).lower()}"]
    assert evaluate("c.yaml", keys) == 0
    asked = [one for one in server.asked if "max_tokens" not in one]
    assert len(asked) == 2 and {one["path"] for one in asked} == {"/v1/chat/completions"}
    assert {(one["model"], one["temperature"], one.get("top_p")) for one in asked} == {
        ("large", 0.25, None if overrides else 0.5)
    }
    assert {one["max_completion_tokens"] for one in asked} == {8000}


STREAM = (
    'event: x\ndata: {"id": "c", "choices": [{"finish_reason": "length"}]}\n\ndata: {"usage": {"completion_tokens": 3}}'
)


@pytest.mark.parametrize(
    ("answer", "ids", "tokens", "is_truncated"),
    [
        ({"id": "c", "choices": [{"finish_reason": "stop"}], "usage": {"completion_tokens": 3}}, {"c"}, 3, False),
        ({"id": "c", "choices": [{"finish_reason": "length"}], "usage": None}, {"c"}, 0, True),
        (STREAM + "\n\ndata: [DONE]\n\n", {"c"}, 3, True),
        ({"id": "r", "status": "incomplete", "usage": {"output_tokens": 4}}, {"r"}, 4, True),
        ('data: {"response": {"id": "r", "status": "completed", "usage": {"output_tokens": 4}}}', {"r"}, 4, False),
        ({"id": "m", "stop_reason": "max_tokens", "usage": {"output_tokens": 2}}, {"m"}, 2, True),
        ([1], set(), 0, False),
        ({"id": 1, "choices": ["x", None], "usage": "x"}, set(), 0, False),
        ({"id": "c", "choices": "x", "usage": {"completion_tokens": "3"}}, {"c"}, 0, False),
    ],
)
def test_use_is_read_from_answers(answer: object, ids: set[str], tokens: int, is_truncated: bool) -> None:
    use = ApiUse.of({"api.1": {"status": 500, "answer": "{}"}, "api.2": {"status": 200, "answer": answer}, "note": 1})
    assert (use.ids, use.num_answers, use.num_tokens, use.is_truncated) == (ids, 1, tokens, is_truncated)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["eval.api.key_env=NOT_SET"], "eval.api.key_env is 'NOT_SET', a variable that is not set"),
        (["rollout.workers=2"], "rollout.workers is 2, and with eval.api one process runs all rollouts"),
    ],
)
def test_what_does_not_fit_is_refused(server: Server, keys: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate("c.yaml", [*server.keys(), *keys])
    with pytest.raises(ConfigError, match=r"eval.api is .* and a run trains and evaluates `model`"):
        Run(Config.load("c.yaml", [*server.keys(), "rollout.max_tokens=64"]))


def test_the_command(server: Server, tmp_path: Path) -> None:
    words = ["--config", "c.yaml", "--url", server.url, "--model", "large", "--key-env", "API_KEY", "--tasks", "1"]
    done = run_command("areal_agent.eval", *words, folder=tmp_path)
    assert done.returncode == 0 and "pass@1      1.000" in done.stdout, done.stderr
    done = run_command("areal_agent.eval", "--resume", "runs/c-eval", "--url", server.url, folder=tmp_path)
    assert done.returncode == 2 and "only --concurrency may be given" in done.stderr
