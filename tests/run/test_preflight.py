"""What is checked before a run starts.

- A model that is no folder here is said to be taken for one on the hub; a local or built one is not.
- A dry run finds an advantage or a loss that is not there, a GPU, an engine, and a sandbox that a workflow cannot use.
- `tiny:module:function` takes demonstrations that can be found; others are refused with what would do. A dry run tries
  them, and a resume, whose model is in its folder, does not need them.
- A type that the embedded engine does not serve is refused where it serves, and a
  context at which a model computes positions in another way, or for which it was not made, is refused.
- A dry run says how the model calls tools, and what it did not try.
- Resuming with no step left is refused: fewer steps than are done, or as many where the run is completed. A run that
  was cut off after its last step goes on. A damaged checkpoint counts for nothing.
"""

import json
from pathlib import Path

import pytest

from areal_agent.config import Config
from areal_agent.engine.config import EngineConfig
from areal_agent.errors import ConfigError
from areal_agent.files import RunFolder
from areal_agent.run.loop import train
from areal_agent.run.preflight import Preflight, check_context, check_model, require_steps_left, require_trainable
from areal_agent.trainer.checkpoint import publish_checkpoint

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
FEW = ["tasks={source: envs.calculator.tasks:load, args: {num: 4}}", "eval.num_tasks=2"]
"""Overrides of the quickstart, which would draw 20,000 tasks."""


def dry_run(folder: Path, *overrides: str) -> int:
    return train(QUICKSTART, [*FEW, f"run_dir={folder / 'run'}", *overrides], resume=None, is_dry=True)


@pytest.mark.parametrize(("model", "is_on_the_hub"), [("runs/mistyped", True), ("tiny", False)])
def test_the_summary_says_when_a_model_is_on_the_hub(model: str, is_on_the_hub: bool, tmp_path: Path) -> None:
    config = Config.load(QUICKSTART, [*FEW, f"model={model}", f"run_dir={tmp_path / 'run'}"])
    assert ("on the hub" in Preflight.check(config).summary()) == is_on_the_hub


@pytest.mark.parametrize(
    ("overrides", "is_idle"),
    [
        ([], False),
        (["algorithm.clip_high=0.3"], True),
        (["algorithm.minibatches=2"], False),
        (["algorithm.preset=gspo"], False),
        (["algorithm.preset=gspo", "algorithm.minibatches=1"], True),
        (["algorithm.preset=dapo"], False),
        (["algorithm.preset=cispo"], False),
        (["algorithm.preset=cispo", "max_staleness=0"], True),
        (["algorithm.loss=examples.custom_loss.loss:smooth_clip"], False),
    ],
)
def test_the_summary_says_where_the_clip_changes_nothing(overrides: list[str], is_idle: bool, tmp_path: Path) -> None:
    config = Config.load(QUICKSTART, [*FEW, f"run_dir={tmp_path / 'run'}", *overrides])
    assert (" changes nothing: with one update a step " in Preflight.check(config).summary()) is is_idle


@pytest.mark.parametrize("key", ["algorithm.advantage", "algorithm.loss"])
def test_a_dry_run_imports_functions_of_the_users(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{key}: 'examples.custom_loss.loss:smoothclip' cannot be imported"):
        dry_run(tmp_path, f"{key}=examples.custom_loss.loss:smoothclip")


def test_a_dry_run_accepts_functions_that_are_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(tmp_path, "algorithm.loss=examples.custom_loss.loss:smooth_clip") == 0
    assert "nothing was started" in capsys.readouterr().out


@pytest.fixture(scope="module")
def python_without_gpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has every module, and whose torch finds no GPU."""
    python = tmp_path_factory.mktemp("environment") / "python"
    python.write_text('#!/bin/sh\ncase "$2" in *torch*) exit 1 ;; esac\n')
    python.chmod(0o755)
    return python


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["engine.device=cuda", "engine.backend=vllm", "engine.python={python}"],
            "engine.device is 'cuda', and the torch of .* finds no GPU here",
        ),
        (["trainer.device=cuda"], "trainer.device is 'cuda', and the torch of .* finds no GPU here"),
        (["model=tiny:envs.calculator.demonstrations:none"], "'envs.calculator.demonstrations' has no function 'none'"),
        (
            ["model=tiny:builtins:range"],
            r"'builtins:range' ended after 0 conversations; it must yield them without end",
        ),
        (["engine.backend=vllm", "engine.python=/bin/false"], "has no module 'vllm'; install it"),
        (["workflow=envs.terminal.workflow:solve", "sandbox.backend=jail"], "needs 'docker'; set it to 'docker'"),
    ],
)
def test_a_dry_run_finds_what_is_not_there(
    overrides: list[str], message: str, python_without_gpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=message):
        dry_run(tmp_path, *(one.replace("{python}", str(python_without_gpu)) for one in overrides))


@pytest.mark.parametrize("model", ["tiny", "tiny:envs.code.tiny.demonstrations:demonstrations"])
def test_demonstrations_that_are_there(model: str) -> None:
    check_model(model, EngineConfig())


@pytest.mark.parametrize("model", ["tiny:", "tiny:no_such_module:f", "tiny:envs.nothing.here:f", "tiny:envs.code"])
def test_demonstrations_that_are_not(model: str) -> None:
    with pytest.raises(ConfigError, match=r"form 'package\.module:function'|run it where that package can be imported"):
        check_model(model, EngineConfig())


def test_gguf_is_refused_as_file_and_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.Q4_1.gguf"
    file.touch()
    for model in (file, tmp_path):
        with pytest.raises(ConfigError, match=r"GGUF.*; give the model that it was made of"):
            check_model(str(model), EngineConfig())


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Of a run of four steps."""
    folder = RunFolder(tmp_path)
    for step in (2, 4):
        publish_checkpoint(
            folder.checkpoints, step=step, incarnation=0, run_state={}, write=lambda _: None, keep_last=2
        )
    return folder


def test_no_step_is_left(folder: RunFolder) -> None:
    with pytest.raises(ConfigError, match=r"4 steps are done and steps is 3, .*; set steps to more than 4"):
        require_steps_left(folder, 3)
    folder.summary.write_text('{"status": "completed"}')
    with pytest.raises(ConfigError, match="nothing left to train"):
        require_steps_left(folder, 4)
    require_steps_left(folder, 5)
    folder.summary.write_text('{"status": "interrupted"}')  # cut off after its last step
    require_steps_left(folder, 4)


def test_a_resume_needs_no_demonstrations(folder: RunFolder) -> None:
    folder.config.touch()
    folder.ledger.touch()
    config = Config.load(QUICKSTART, [*FEW, "model=tiny:no_such_module:f"])
    with pytest.raises(ConfigError, match="No module named 'no_such_module'"):
        Preflight.check(config)
    assert Preflight.check(config, resume=str(folder.path)).is_resumed


def test_a_damaged_checkpoint_counts_for_nothing(folder: RunFolder) -> None:
    (folder.checkpoints / "step_000004" / "run.json").write_text("damaged")
    require_steps_left(folder, 3)


VLLM = EngineConfig(backend="vllm", python="python", max_context_tokens=4096)
PHI3: dict[str, object] = {
    "model_type": "phi3",
    "original_max_position_embeddings": 4096,
    "rope_scaling": {"type": "longrope"},
}


def model_of(folder: Path, fields: dict[str, object]) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    for name in ("tokenizer.json", "model.safetensors"):
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("engine", "is_refused"), [(EngineConfig(), True), (VLLM, False), (EngineConfig(url="http://127.0.0.1:1"), False)]
)
def test_only_the_embedded_engine_has_a_list_of_types(tmp_path: Path, engine: EngineConfig, is_refused: bool) -> None:
    model = str(model_of(tmp_path, {"model_type": "gpt_oss"}))
    if not is_refused:
        check_model(model, engine)
        return
    with pytest.raises(
        ConfigError, match=r"'gpt_oss', and the embedded engine serves only llama, .*set engine\.backend"
    ):
        check_model(model, engine)


@pytest.mark.parametrize(
    ("model", "fields", "longest"),
    [
        ("tiny", {}, 1024),
        ("", {"max_position_embeddings": 4096}, 4096),
        ("", {"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "factor": 2.0}}, 8192),
    ],
)
def test_a_context_for_which_a_model_was_not_made(
    model: str, fields: dict[str, object], longest: int, tmp_path: Path
) -> None:
    model_of(tmp_path, {"model_type": "qwen3", **fields})
    engine = ["engine.backend=vllm", "engine.python=python"] if fields else []
    overrides = [f"model={model or tmp_path}", *engine]
    check_context(Config.load(QUICKSTART, [*overrides, f"engine.max_context_tokens={longest}"]))
    with pytest.raises(ConfigError, match=f"was made for {longest} tokens.*is {longest + 1}; set it to at most"):
        check_context(Config.load(QUICKSTART, [*overrides, f"engine.max_context_tokens={longest + 1}"]))


def test_a_dry_run_says_how_the_model_calls_tools(
    small_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run(tmp_path, f"model={small_model}") == 0
    *_, template, last = capsys.readouterr().out.splitlines()
    assert template == (
        "the model takes text alone; its chat template: tool calls as hermes; serves chats, tool loops, Codex, "
        "Claude Code; given otherwise than sent: no definitions of tools"
    )
    assert "Not tried were memory, disk, sandboxes" in last and f"doctor --config {QUICKSTART}" in last


@pytest.mark.slow
def test_a_context_at_which_positions_change_is_refused_for_training(tmp_path: Path) -> None:
    model = model_of(tmp_path, PHI3)
    require_trainable(model, VLLM)
    longer = VLLM.model_copy(update={"max_context_tokens": 4097})
    check_model(str(model), longer)  # it can be evaluated
    with pytest.raises(ConfigError, match=r"exceeds 4096 tokens \(longrope\).*set it to at most 4096"):
        require_trainable(model, longer)
    model_of(tmp_path, PHI3 | {"sliding_window": 2047})
    with pytest.raises(ConfigError, match="see 2047 tokens back, and all of them in SGLang"):
        require_trainable(model, VLLM.model_copy(update={"backend": "sglang"}))
