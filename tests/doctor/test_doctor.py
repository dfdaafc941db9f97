"""The command as a user runs it.

- a config that works: every check is made, with engine and trainer started, and it ends with 0
- one that is wrong in many ways: each fault is told, with the rest, and it ends with 1, without a traceback
- a teacher is loaded beside the model, or its server is asked
- a model that cannot be had, and one whose template is missing, leave out only what needs them
- for a machine elsewhere a config.json is enough, and nothing is asked of this one; what was not described is said
- online, what belongs to others is let be
- faults of the command line and of the config file are one line, and 2
"""

import io
import json
import sys
from pathlib import Path

import pytest
import yaml

from areal_agent.command import run_command
from areal_agent.config import Config
from areal_agent.doctor.__main__ import main
from areal_agent.doctor.examination import Examination
from areal_agent.doctor.findings import GIB, Finding, Report, State
from areal_agent.doctor.machines import Machine, described
from tests.commands import run
from tests.doctor.shapes import table


def base(model: object, folder: Path, **more: object) -> dict[str, object]:
    """A config of the calculator on a model folder."""
    return {
        "model": str(model),
        "workflow": "envs.calculator.workflow:solve",
        "tasks": {"source": "envs.calculator.tasks:load", "args": {"num": 4}},
        "run_dir": str(folder / "run"),
        "batch_size": 2,
        "group_size": 2,
        "eval": {"num_tasks": 2},
        "engine": {"max_context_tokens": 512},
        "trainer": {"learning_rate": 1e-3, "tokens_per_micro_batch": 1024},
        "sandbox": {"backend": "subprocess"},
        **more,
    }


async def examined(values: dict[str, object], *, elsewhere: Machine | None = None) -> list[Finding]:
    """The findings of an examination that starts nothing."""
    report = Report(io.StringIO())
    config = Config.parse(values)
    await Examination(config=config, name="x", report=report, starts_engine=False, elsewhere=elsewhere).run()
    return report.findings


async def examine(values: dict[str, object], *, elsewhere: Machine | None = None) -> dict[str, list[State]]:
    """The states by check, of an examination that starts nothing."""
    found: dict[str, list[State]] = {}
    for finding in await examined(values, elsewhere=elsewhere):
        found.setdefault(finding.check, []).append(finding.state)
    return found


async def test_without_an_engine_a_config_that_works_has_no_fault(small_model: Path, tmp_path: Path) -> None:
    found = await examine(base(small_model, tmp_path))
    assert [check for check, states in found.items() if State.FAIL in states] == []
    assert found["workflow"] == found["tasks"] == found["model"] == found["tokenizer"] == [State.OK]
    assert found["engine"] == found["push"] == [State.SKIP]
    assert found["trainer"] == [State.OK]  # it has proved that it can train the model


async def test_a_model_that_can_never_be_trained_is_named_as_that(small_model: Path, tmp_path: Path) -> None:
    folder = without_template(small_model, tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))
    findings = await examined(base(folder, tmp_path))
    (failed,) = [one for one in findings if one.state is State.FAIL]
    assert (failed.check, failed.change) == ("model", "use a causal (decoder-only) language model")
    assert "cannot be trained: type t5 is an encoder-decoder" in failed.found  # and no other engine is advised


@pytest.mark.slow  # an engine and a trainer are started; what is asked of them is tested in test_trial.py
def test_a_config_that_works(small_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(base(small_model, tmp_path)))
    done = run("areal_agent.doctor", "--config", str(file), "seed=3")
    lines = {
        line[6:20].strip(): line for line in done.stdout.splitlines() if line[:4] in ("ok  ", "warn", "fail", "skip")
    }
    checks = {
        *(
            "workflow",
            "tasks",
            "packages",
            "algorithm",
            "ports",
            "run folder",
            "machine",
            "dtype",
            "model",
            "tokenizer",
            "template",
            "memory",
            "disk",
        ),
        *("transfer", "sandboxes", "engine", "interruption", "trainer", "parity", "push", "spans"),
    }
    assert (set(lines), done.returncode) == (checks, 0), done.stdout + done.stderr
    assert "skip" not in done.stdout
    assert "of 0:0" in lines["spans"]  # a machine that stalls may let the answer end before the push: a warning
    assert lines["parity"].startswith("ok")
    assert "Traceback" not in done.stdout + done.stderr
    assert not (tmp_path / "run").exists()


async def test_each_fault_is_told(small_model: Path, tmp_path: Path) -> None:
    wrong = base(
        small_model,
        tmp_path,
        workflow="envs.calculator.workflow:slove",
        tasks="no.such.module:load",
        algorithm={"loss": "no.such.module:loss"},
        engine={"max_context_tokens": 10_000},
        trainer={"device": "cuda", "num_ranks": 5},
        observe={"trackers": ["wandb"]},
        rollout={"gateway_port": 1},
    )
    found = await examine(wrong, elsewhere=Machine(memory_bytes=GIB, num_gpus=1, gpu_bytes=GIB))
    for check in ("workflow", "tasks", "algorithm", "model", "GPU 1-4"):
        assert State.FAIL in found[check], check
    assert found["tokenizer"] == [State.OK]
    assert found["engine"] == [State.SKIP]


@pytest.mark.slow  # a trainer is started
async def test_a_teacher_is_examined_and_loaded_beside_the_model(small_model: Path, tmp_path: Path) -> None:
    found = await examine(base(small_model, tmp_path, algorithm={"teacher": {"model": str(small_model)}}))
    assert found["teacher"] == found["trainer"] == [State.OK]
    away = {"teacher": {"url": "http://127.0.0.1:1"}}
    failed = [one for one in await examined(base(small_model, tmp_path, algorithm=away)) if one.state is State.FAIL]
    assert [one.check for one in failed] == ["teacher"] and "algorithm.teacher.url: no answer" in failed[0].found


async def test_a_model_that_is_not_there_leaves_out_what_needs_it(tmp_path: Path) -> None:
    found = await examine(base(tmp_path / "none", tmp_path))
    assert found["model"] == [State.FAIL]
    assert found["template"] == found["memory"] == found["engine"] == [State.SKIP]
    assert found["workflow"] == found["tasks"] == [State.OK]
    assert len(found["sandboxes"]) == 1


def without_template(model: Path, folder: Path) -> Path:
    """A copy of a model folder."""
    folder.mkdir()
    for file in model.iterdir():
        if file.suffix != ".jinja":
            (folder / file.name).write_bytes(file.read_bytes())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


async def test_a_tokenizer_without_a_template_leaves_the_rest(small_model: Path, tmp_path: Path) -> None:
    folder = without_template(small_model, tmp_path / "model")
    found = await examine(base(folder, tmp_path))
    assert (found["model"], found["tokenizer"], found["template"]) == ([State.OK], [State.FAIL], [State.SKIP])
    assert found["memory"] == [State.OK]


async def test_a_tiny_model_needs_not_be_built_for_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_AGENT_CACHE", str(tmp_path / "cache"))
    found = await examine(base("tiny", tmp_path))
    assert (found["model"], found["tokenizer"], found["memory"]) == ([State.OK], [State.SKIP], [State.OK])
    assert not (tmp_path / "cache").exists()


FIELDS = {
    "model_type": "qwen3",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}
NOT_HERE = {"engine.python", "ports", "trackers", "run folder"}


@pytest.mark.parametrize("name", ["", "config.json", "some-model.json"])
async def test_for_a_machine_elsewhere_a_config_json_is_enough(tmp_path: Path, name: str) -> None:
    (tmp_path / (name or "config.json")).write_text(json.dumps(FIELDS))
    sglang = {"backend": "sglang", "python": "/no/such/python", "port": 1, "max_context_tokens": 4096}
    values = base(tmp_path / name, tmp_path, engine=sglang, observe={"trackers": ["wandb"]})
    findings = await examined(values, elsewhere=described(8, 80, 1000, 500, 2000))
    assert [one for one in findings if one.state in (State.FAIL, State.WARN)] == []
    found = {one.check: one for one in findings}
    assert not NOT_HERE & set(found)
    assert found["tokenizer"].state is found["engine"].state is found["sandboxes"].state is State.SKIP
    told = "1000.0 GiB of memory, 500.0 GiB of /dev/shm, 2000.0 GiB of disk, 8 GPUs of 80.0 GiB"
    assert told in found["machine"].found
    assert "of 1000.0 GiB" in found["memory"].found
    assert "of 2000.0 GiB free there" in found["disk"].found
    assert "/dev/shm" in found["transfer"].found and "of 500.0 GiB free there" in found["transfer"].found


async def test_what_is_not_described_is_not_compared(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    sglang = {"backend": "sglang", "python": "python", "max_context_tokens": 4096}
    findings = await examined(base(tmp_path, tmp_path, engine=sglang), elsewhere=described(1, 80, None, None, None))
    skipped = {one.check: one.change for one in findings if one.state is State.SKIP and one.change}
    assert skipped == {"memory": "give --ram", "disk": "give --disk", "transfer": "give --shm"}


async def test_the_other_machine_may_be_too_small(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**FIELDS, "vocab_size": 10**7}))
    sglang = {"backend": "sglang", "python": "python", "max_context_tokens": 4096}
    findings = await examined(base(tmp_path, tmp_path, engine=sglang), elsewhere=described(1, 1, 1, 1, 1))
    assert {one.check for one in findings if one.state is State.FAIL} == {"memory", "GPU 0", "disk", "transfer"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ram", "64"], "--ram describes a machine elsewhere: give its --gpus as well"),
        (["--nodes", "4"], "--nodes describes a machine elsewhere: give its --gpus as well"),
        (["--gpus", "0", "--nodes", "0"], "--gpus 0 --nodes 0: there is no such machine"),
        (["--gpus", "2"], "--gpus 2: give the --memory of each as well, in GiB"),
        (["--gpus", "0", "--memory", "80"], "--memory is that of each GPU"),
        (["--gpus", "1", "--memory", "80", "--shm", "0"], "--gpus 1 --memory 80 --shm 0: there is no such machine"),
    ],
)
def test_no_such_machine(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["doctor", "--config", "any.yaml", *options])
    with pytest.raises(SystemExit) as ended:
        run_command(main)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_page_has_the_table_of_the_doctor() -> None:
    page = Path(__file__).parents[2] / "docs" / "scaling.md"
    assert table() in page.read_text(), f"it has changed:\n{table()}"


async def test_work_of_minutes_is_shown() -> None:
    stream = io.StringIO()
    report = Report(stream)
    with report.progress() as progress:
        progress.phase("building the tiny model")
        progress.phase_progress(0.5, "step 100")
    report.add(Finding("model", State.OK, "built"))
    lines = stream.getvalue().splitlines()
    assert lines == [
        "building the tiny model ...",
        "building the tiny model ...  50%  step 100",
        "ok    model         built",
    ]


async def test_online_there_are_no_tasks_and_no_workflow(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREAL_AGENT_ADMIN_KEY", "k" * 40)
    online = {
        "model": str(small_model),
        "run_dir": str(tmp_path / "run"),
        "rollout": {"gateway_url": "http://127.0.0.1:1"},
        "engine": {"url": "http://127.0.0.1:2"},
    }
    found = await examine(online)
    assert found["gateway"] == [State.OK]
    assert not {"workflow", "tasks"} & set(found)
