"""Building a model into a folder:

- transformers loads it, weights tied; the report in the folder says what was done
- the folder appears whole or not at all, and nothing is left beside it
- what stands at the place is refused, unless it is the same model, built meanwhile
- its place in the cache depends on seed, recipe and what the demonstrations yield, wherever they are written
- demonstrations that end, fail, or differ from call to call are refused
- an interrupted build goes on, and ends with the same weights; a damaged state, or another model's, is left aside
- a run keeps a copy, which its resume takes whatever has become of the demonstrations and the cache
- torch's random state and threads are left as they were
- demonstrations that cannot be loaded are refused; the command says what is wrong in one line, with exit code 2
- slow: the recipe teaches copying
"""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from areal_agent.command import run_command
from areal_agent.errors import ConfigError
from areal_agent.files import RunFolder
from areal_agent.models.recipe import DEMONSTRATIONS, RECIPE, Conversation, Recipe, model_folder
from areal_agent.models.tiny import REPORT_NAME, TinyReport, WarmStartProgress, build, main
from areal_agent.observe.progress import Progress
from areal_agent.run.run import model_of_run
from envs.calculator.demonstrations import demonstrations

Built = tuple[Path, TinyReport]


def weights_of(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "areal_agent.models.tiny", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def broken_demonstrations(seed: int) -> Iterator[Conversation]:
    raise RuntimeError("no demonstrations today")


def few_demonstrations(seed: int) -> Iterator[Conversation]:
    yield [{"role": "user", "content": "one"}]


def unseeded_demonstrations(seed: int) -> Iterator[Conversation]:
    while True:
        yield [{"role": "user", "content": str(random.random())}]


def moved_demonstrations(seed: int) -> Iterator[Conversation]:
    """Those of the calculator, from another module."""
    return demonstrations(seed)


def other_demonstrations(seed: int) -> Iterator[Conversation]:
    return demonstrations(seed + 1)


@pytest.fixture(scope="module")
def built(small_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A new folder with a model in it, and the report."""
    folder = tmp_path_factory.mktemp("built") / "new" / "model"
    num_threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(2)
    report = build(folder, seed=1, recipe=small_recipe, threads=1)
    assert torch.get_num_threads() == 2, "torch is left as it was"
    assert torch.equal(torch.get_rng_state(), state)
    torch.set_num_threads(num_threads)
    return folder, report


def test_transformers_loads_it(built: Built) -> None:
    folder, report = built
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert (model.num_parameters(), len(tokenizer)) == (report.num_parameters, report.vocab_size)
    assert model.config.vocab_size == len(tokenizer)


def test_the_report_is_in_the_folder_and_nothing_is_beside_it(built: Built) -> None:
    folder, report = built
    assert json.loads((folder / REPORT_NAME).read_text()) == asdict(report)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_another_seed_builds_another_model_also_in_an_empty_folder(
    built: Built, small_recipe: Recipe, tmp_path: Path
) -> None:
    build(tmp_path, seed=2, recipe=small_recipe, threads=1)
    assert not torch.equal(weights_of(built[0]), weights_of(tmp_path))


def test_without_a_warm_start_it_is_random(small_recipe: Recipe, tmp_path: Path) -> None:
    steps: list[int] = []
    report = build(
        tmp_path / "model",
        seed=1,
        recipe=small_recipe,
        threads=1,
        is_untrained=True,
        on_progress=lambda one: steps.append(one.step),
    )
    assert (report.steps, steps) == (0, [])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    embedding = load_file(tmp_path / "model" / "model.safetensors")["model.embed_tokens.weight"]
    assert float(embedding.std()) == pytest.approx(0.02, rel=0.1)  # transformers' initialisation


def test_a_failure_leaves_nothing(small_recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="after 0 conversations: RuntimeError: no demonstrations today"):
        build(tmp_path / "model", seed=0, recipe=small_recipe, demonstrations=f"{__name__}:broken_demonstrations")
    assert list(tmp_path.iterdir()) == []


class Interrupted(Exception):
    """Raised by a test in the middle of a build."""


def build_half(out: Path, recipe: Recipe, *, seed: int = 1) -> None:
    """Begin a build that is interrupted after its first check."""

    def interrupt(progress: WarmStartProgress) -> None:
        raise Interrupted(progress.step)

    with pytest.raises(Interrupted, match="2"):
        build(out, seed=seed, recipe=recipe, threads=1, on_progress=interrupt)


def test_an_interrupted_build_goes_on_to_the_same_weights(built: Built, small_recipe: Recipe, tmp_path: Path) -> None:
    (whole, report), halved = built, tmp_path / "again" / "model"
    build_half(halved, small_recipe)
    steps: list[int] = []
    again = build(halved, seed=1, recipe=small_recipe, threads=1, on_progress=lambda one: steps.append(one.step))
    assert steps == [4, 6], "step 2 was not made again"
    assert replace(again, wall_s=0) == replace(report, wall_s=0)
    assert torch.equal(weights_of(whole), weights_of(halved))
    assert [path.name for path in halved.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("kind", ["damaged", "of another model"])
def test_a_state_that_does_not_fit_is_left_aside(small_recipe: Recipe, tmp_path: Path, kind: str) -> None:
    build_half(tmp_path / "model", small_recipe, seed=2 if kind == "of another model" else 1)
    (left,) = tmp_path.glob(".model.unfinished/*/step_000002/model.safetensors")
    if kind == "damaged":
        left.write_bytes(left.read_bytes()[:1000])
    build_half(tmp_path / "model", small_recipe)  # from its beginning


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_is_in_the_way_is_refused(small_recipe: Recipe, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "taken"
    inside = out if kind == "file" else out / "mine.txt"
    inside.parent.mkdir(exist_ok=True)
    inside.write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        build(out, seed=0, recipe=small_recipe)
    assert inside.read_text() == "mine"


def test_a_model_that_was_built_meanwhile_stays(built: Built, small_recipe: Recipe, tmp_path: Path) -> None:
    out = tmp_path / "model"

    def rival(progress: WarmStartProgress) -> None:
        if not out.exists():
            shutil.copytree(built[0], out)

    build(out, seed=1, recipe=small_recipe, threads=1, on_progress=rival)
    assert (out / "config.json").stat().st_mtime == (built[0] / "config.json").stat().st_mtime
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_something_else_that_appeared_meanwhile_is_not_overwritten(small_recipe: Recipe, tmp_path: Path) -> None:
    out = tmp_path / "model"

    def stranger(progress: WarmStartProgress) -> None:
        out.mkdir(exist_ok=True)
        (out / "mine.txt").write_text("mine")

    with pytest.raises(ConfigError, match="cannot write"):
        build(out, seed=0, recipe=small_recipe, threads=1, on_progress=stranger)
    assert (out / "mine.txt").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"model", ".model.unfinished"}, "the work is not lost"


def test_the_place_depends_on_what_decides_the_model() -> None:
    places = {
        model_folder(RECIPE, 0, DEMONSTRATIONS),
        model_folder(RECIPE, 1, DEMONSTRATIONS),
        model_folder(replace(RECIPE, batch_size=RECIPE.batch_size + 1), 0, DEMONSTRATIONS),
        model_folder(RECIPE, 0, f"{__name__}:other_demonstrations"),
    }
    assert len(places) == 4
    assert model_folder(RECIPE, 0, f"{__name__}:moved_demonstrations") in places


@pytest.mark.parametrize(
    ("name", "message"), [("few_demonstrations", "ended after 1 conv"), ("unseeded_demonstrations", "called again")]
)
def test_demonstrations_that_could_not_be_found_again_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_folder(RECIPE, 0, f"{__name__}:{name}")


def test_the_cache_is_in_the_users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AREAL_AGENT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model_folder(RECIPE, 0, DEMONSTRATIONS).parent == tmp_path / "areal_agent"


async def test_a_resume_takes_the_copy_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_AGENT_CACHE", str(tmp_path / "cache"))
    cached = model_folder(RECIPE, 0, f"{__name__}:moved_demonstrations")
    cached.mkdir(parents=True)
    (cached / "config.json").write_text("{}")
    folder, progress = RunFolder(tmp_path / "run"), Progress(total_steps=1, mode="none")
    began_with = await model_of_run(f"tiny:{__name__}:moved_demonstrations", 0, folder, progress)
    assert (began_with, (folder.model / "config.json").read_text()) == (folder.model, "{}")
    shutil.rmtree(tmp_path / "cache")
    assert await model_of_run(f"tiny:{__name__}:broken_demonstrations", 0, folder, progress) == folder.model


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
