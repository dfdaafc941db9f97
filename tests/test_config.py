"""Config faults are one line with the value and the remedy: 1. unknown keys, at every depth, with the nearest valid
one; 2. wrong types and bounds; 3. missing keys and files; 4. bad overrides. And: 5. shorthands, overrides and the
resolved file mean the same; 6. a preset over a resolved file replaces what the old one chose, and nothing else."""

from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from areal_agent import ConfigError
from areal_agent.algorithms.config import PRESETS, AlgorithmConfig
from areal_agent.config import Config
from areal_agent.sft.config import SftConfig

MINIMAL = {"tasks": "envs.calculator.tasks:load", "workflow": "envs.calculator.workflow:solve"}


def write(tmp_path: Path, **values: object) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | values))
    return path


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stepz=3", r"unknown key 'stepz'; did you mean 'steps'\?"),
        ("rollout.timeout=3", r"unknown key 'rollout.timeout'; did you mean 'rollout.timeout_s'\?"),
        ("tasks.argz=3", r"unknown key 'tasks.argz'; did you mean 'tasks.args'\?"),
        (
            "eval.tasks.sauce=3",
            "unknown key 'eval.tasks.sauce'; did you mean 'eval.tasks.source'|'eval.tasks.source' is missing",
        ),
        ("zzz=3", r"unknown key 'zzz'; valid: algorithm, batch_size"),
        ("steps=abc", r"steps is 'abc'; input should be a valid integer"),
        ("steps=-1", r"steps is -1; input should be greater than or equal to 1"),
        ("steps=2.5", r"steps is 2.5"),
        ("algorithm.behavior_weight_level=none", r"'none' and max_staleness is 4: tokens of older weights need"),
        ("group_size=1", r"group_size is 1, and advantage 'grpo' compares the rollouts of one group"),
        ("algorithm.minibatches=257", r"algorithm.minibatches is 257, but a step has only 256 rollouts"),
        ("steps=true", r"steps is True; give a number"),
        ("rollout.workers=65", r"rollout: workers is 65 and max_concurrent is 64, but every worker needs a rollout"),
        ("rollout={gateway_port: 65535, workers: 2}", r"gateway_port is 65535, and 2 workers would need ports up to"),
        ("rollout.temperature=off", r"rollout.temperature is False; give a number"),
        ("trainer.learning_rate=-1e-3", r"trainer.learning_rate is .*-1e-3|trainer.learning_rate is -0.001"),
        ("trainer.learning_rate=.nan", r"trainer.learning_rate is nan"),
        (
            "trainer.transfer=cuda_ipc",
            r"trainer.transfer is 'cuda_ipc'; input should be 'shared_memory', 'disk' or 'distributed'",
        ),
        ("straggler=hope", r"straggler is 'hope'; input should be 'wait', 'drop' or 'mask'"),
        ("algorithm=ppo9", r"algorithm.preset is 'ppo9'"),
        ("algorithm.presett=grpo", r"unknown key 'algorithm.presett'; did you mean 'algorithm.preset'\?"),
        ("seed.x=3", r"override 'seed.x=3': 'seed' is a value \(3\), not a section"),
        ("steps", r"override 'steps' is not of the form key=value"),
        ("steps=[1", r"override 'steps=\[1': '\[1' is not a YAML value"),
    ],
)
def test_faults_name_the_value_and_the_remedy(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Config.load(write(tmp_path, seed=3), [override])
    assert "\n" not in str(caught.value)


def test_missing_keys_are_named() -> None:
    with pytest.raises(ConfigError, match="config: 'tasks' is missing"):
        Config.parse({"workflow": "a:b"})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config '.*none.yaml': No such file"):
        Config.load(tmp_path / "none.yaml")


def test_a_key_that_is_given_twice_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("tasks: a:b\nsteps: 3\nsteps: 4\n")
    with pytest.raises(ConfigError, match=r"c\.yaml:3:1: not a YAML config: the key 'steps' is given twice"):
        Config.load(path)


@pytest.mark.parametrize(
    ("text", "overrides", "place"),
    [
        ("tasks: a:b\nengine:\n  threads: two\n", (), r"c\.yaml:3: engine\.threads is 'two'"),
        ("tasks: a:b\nengine:\n  theads: 2\n", (), r"c\.yaml:3: unknown key 'engine\.theads'"),
        ("tasks: a:b\nengine:\n  backend: vllm\n", (), r"c\.yaml:3: engine\.backend is 'vllm'"),
        ("tasks: a:b\nsteps: 3\n", ("steps=0",), r"override 'steps=0': steps is 0"),
        ("tasks: [x\nsteps: 3\n", (), r"c\.yaml:2:6: not a YAML config: while parsing a flow"),
        (
            "tasks: a:b\nrollout: {max_tokens: 2048}\n",
            (),
            r"c\.yaml:2: rollout\.max_tokens is 2048, and engine\.max_con",
        ),
        ("tasks: a:b\nsteps: 3\n", ("rollout.max_tokens=2048",), r"override 'rollout\.max_tokens=2048': rollout\.max_"),
        (
            "tasks: a:b\n",
            ("engin.threads=2",),
            r"override 'engin\.threads=2': unknown key 'engin'; did you mean 'engine'",
        ),
        ("tasks: a:b\ntrainer:\n# all left out\n", (), r"c\.yaml:2: trainer is None, and it is a section: give its"),
        (f"tasks: a:b\nrun_dir: {'[' * 1000}\n", (), r"c\.yaml: not a YAML config: it is nested too deeply"),
    ],
)
def test_a_fault_has_its_line(tmp_path: Path, text: str, overrides: tuple[str, ...], place: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=place):
        Config.load(tmp_path / "c.yaml", overrides)


def test_a_section_may_be_merged_with_another(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("tasks: a:b\nengine: &shared\n  threads: 2\ntrainer:\n  <<: *shared\n  learning_rate: 0.5\n")
    config = Config.load(path)
    assert (config.trainer.threads, config.trainer.learning_rate) == (2, 0.5)


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "just text"])
def test_what_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        Config.load(path)


def test_one_file_of_tasks_needs_held_out_tasks() -> None:
    with pytest.raises(ConfigError, match=r"set eval\.tasks, or eval\.num_tasks=0"):
        Config.parse({"tasks": "tasks.jsonl"})


def test_shorthands_and_overrides(tmp_path: Path) -> None:
    config = Config.load(
        write(tmp_path, algorithm="rloo"), ["tasks.args={num: 3}", "algorithm.clip_low=0.1", "engine.threads=2"]
    )
    assert (config.tasks.source, config.tasks.args) == (MINIMAL["tasks"], {"num": 3})
    assert (config.algorithm.preset, config.algorithm.clip_low, config.engine.threads) == ("rloo", 0.1, 2)


def test_the_resolved_file_means_the_same(tmp_path: Path) -> None:
    config = Config.load(write(tmp_path), ["steps=7", "eval.num_tasks=0"])
    (tmp_path / "resolved.yaml").write_text(config.to_yaml())
    assert Config.load(tmp_path / "resolved.yaml") == config


@pytest.mark.parametrize(("old", "new"), [*pairwise([*PRESETS, next(iter(PRESETS))])])
def test_another_preset_over_a_resolved_file_is_that_preset(tmp_path: Path, old: str, new: str) -> None:
    resolved = Config.load(write(tmp_path, algorithm={"preset": old, "behavior_weight_high": 3.0}))
    (tmp_path / "resolved.yaml").write_text(resolved.to_yaml())
    changed = Config.load(tmp_path / "resolved.yaml", ["algorithm.minibatches=2", f"algorithm.preset={new}"])
    assert changed.algorithm == AlgorithmConfig(preset=new, behavior_weight_high=3.0, minibatches=2)


def test_what_is_given_beside_a_preset_holds_in_any_order(tmp_path: Path) -> None:
    config = Config.load(write(tmp_path), ["algorithm.advantage=grpo", "algorithm.preset=rloo"])
    assert config.algorithm.advantage == "grpo"


@pytest.mark.parametrize("path", sorted([*Path("configs").glob("*.yaml"), *Path("examples").glob("*/*.yaml")]), ids=str)
def test_every_config_of_the_project_is_valid(path: Path) -> None:
    (SftConfig if path.name == "sft.yaml" else Config).load(path)
