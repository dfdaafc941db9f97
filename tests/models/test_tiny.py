"""Building a model into a folder:

- transformers loads it, weights tied; the report in the folder says what was done
- the folder appears whole or not at all, and nothing is left beside it
- what stands at the place is refused, unless it is the same model, built meanwhile
- its place in the cache depends on seed, recipe, demonstrations and the environment
- torch's random state and threads are left as they were
- demonstrations that cannot be loaded are refused; the command says what is wrong in one line, with exit code 2
- slow: the recipe teaches copying
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from areal_agent.command import run_command
from areal_agent.errors import ConfigError
from areal_agent.models.recipe import DEMONSTRATIONS, RECIPE, Conversation, Recipe, model_folder
from areal_agent.models.tiny import REPORT_NAME, TinyReport, WarmStartProgress, build, main


def weights_of(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "areal_agent.models.tiny", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def broken_demonstrations(seed: int) -> Iterator[Conversation]:
    raise RuntimeError("no demonstrations today")


@pytest.fixture(scope="module")
def built(small_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TinyReport]:
    """A new folder with a model in it, and the report."""
    folder = tmp_path_factory.mktemp("built") / "new" / "model"
    before = torch.get_num_threads(), torch.get_rng_state()
    report = build(folder, seed=1, recipe=small_recipe, threads=before[0] + 1)
    assert torch.get_num_threads() == before[0], "torch is left as it was"
    assert torch.equal(torch.get_rng_state(), before[1])
    return folder, report


def test_transformers_loads_it(built: tuple[Path, TinyReport]) -> None:
    folder, report = built
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert (model.num_parameters(), len(tokenizer)) == (report.num_parameters, report.vocab_size)
    assert model.config.vocab_size == len(tokenizer)


def test_the_report_is_in_the_folder_and_nothing_is_beside_it(built: tuple[Path, TinyReport]) -> None:
    folder, report = built
    assert json.loads((folder / REPORT_NAME).read_text()) == asdict(report)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_the_same_seed_builds_the_same_model(small_recipe: Recipe, tmp_path: Path) -> None:
    one, again, other = (tmp_path / name for name in ("one", "again", "other"))
    for folder, seed in ((one, 1), (again, 1), (other, 2)):
        build(folder, seed=seed, recipe=small_recipe, threads=1)
    assert torch.equal(weights_of(one), weights_of(again))
    assert not torch.equal(weights_of(one), weights_of(other))


def test_a_failure_leaves_nothing(small_recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        build(tmp_path / "model", seed=0, recipe=small_recipe, demonstrations=f"{__name__}:broken_demonstrations")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_taken(small_recipe: Recipe, tmp_path: Path) -> None:
    build(tmp_path, seed=0, recipe=small_recipe, threads=1)
    assert (tmp_path / "config.json").is_file()


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_is_in_the_way_is_refused(small_recipe: Recipe, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "taken"
    inside = out if kind == "file" else out / "mine.txt"
    inside.parent.mkdir(exist_ok=True)
    inside.write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        build(out, seed=0, recipe=small_recipe)
    assert inside.read_text() == "mine"


def test_a_model_that_was_built_meanwhile_stays(small_recipe: Recipe, tmp_path: Path) -> None:
    out = tmp_path / "model"
    rivals: list[float] = []

    def rival(progress: WarmStartProgress) -> None:
        if not out.exists():
            build(out, seed=0, recipe=small_recipe, threads=1)
            rivals.append((out / "config.json").stat().st_mtime)

    build(out, seed=0, recipe=small_recipe, threads=1, on_progress=rival)
    assert rivals == [(out / "config.json").stat().st_mtime]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_something_else_that_appeared_meanwhile_is_not_overwritten(small_recipe: Recipe, tmp_path: Path) -> None:
    out = tmp_path / "model"

    def stranger(progress: WarmStartProgress) -> None:
        out.mkdir(exist_ok=True)
        (out / "mine.txt").write_text("mine")

    with pytest.raises(ConfigError, match="cannot write"):
        build(out, seed=0, recipe=small_recipe, threads=1, on_progress=stranger)
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "mine.txt"]


def test_the_place_depends_on_what_decides_the_model() -> None:
    places = {
        model_folder(RECIPE, 0, DEMONSTRATIONS),
        model_folder(RECIPE, 1, DEMONSTRATIONS),
        model_folder(replace(RECIPE, batch_size=RECIPE.batch_size + 1), 0, DEMONSTRATIONS),
        model_folder(RECIPE, 0, f"{__name__}:broken_demonstrations"),
    }
    assert len(places) == 4


def test_the_cache_is_in_the_users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AREAL_AGENT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model_folder(RECIPE, 0, DEMONSTRATIONS).parent == tmp_path / "areal_agent"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("demonstrations", "not of the form"),
        ("no.such.module:f", "importing 'no.such.module' failed"),
        ("envs.calculator.tasks:demonstrations", "has no function 'demonstrations'"),
    ],
)
def test_demonstrations_that_cannot_be_loaded(tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(tmp_path / "model", seed=0, demonstrations=path)


def test_the_command_refuses_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tiny", "--out", str(tmp_path / "model"), "--threads", "0"])
    with pytest.raises(SystemExit) as ended:
        run_command(main)
    assert (ended.value.code, capsys.readouterr().err) == (2, "error: --threads is 0; give at least 1\n")


@pytest.mark.slow
def test_the_recipe_teaches_copying() -> None:
    """The quickstart's own model: its place in the cache depends on all that decides it, so an older one is as good."""
    folder = model_folder(RECIPE, 0, DEMONSTRATIONS)
    if not folder.exists():
        done = run("--out", str(folder), "--seed", "0", "--threads", "1")
        assert done.returncode == 0, done.stderr
        assert "100% warm start" in done.stderr
    assert json.loads((folder / REPORT_NAME).read_text())["copy_accuracy"] >= 0.93
