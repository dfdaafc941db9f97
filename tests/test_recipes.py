"""docs/recipes.md: its commands can be typed, it shows what the runs left, and a completed run is not made again."""

import shlex

import pytest

from areal_agent.config import Config
from areal_agent.sft.config import SftConfig
from benchmarks.recipes import __main__ as recipes

RECIPES = recipes.read_recipes()
COMMANDS = sorted({step["command"] for recipe in RECIPES.values() for step in recipe["steps"]})


@pytest.mark.parametrize("command", [one for one in COMMANDS if "--config" in one])
def test_the_config_of_every_command_is_valid(command):
    words = shlex.split(command.replace("\\\n", " "))
    at = words.index("--config")
    config = SftConfig if "areal_agent.sft" in words else Config
    assert config.load(recipes.ROOT / words[at + 1], words[at + 2 :]).model


def test_the_page_shows_the_results_of_every_recipe():
    results = recipes.read_results()
    assert set(results) == set(RECIPES)
    assert recipes.PAGE.read_text() == recipes.page(RECIPES, {name: results[name] for name in RECIPES})
    assert all(outcome.is_verified for outcome in results.values())
    assert recipes.RESULTS.read_text() == recipes.written(results)


def test_a_completed_run_is_kept_and_a_command_that_fails_ends_it(tmp_path):
    made = 'mkdir {0} && echo \'{{"status": "completed"}}\' > {0}/summary.json'
    steps = [{"command": made.format(name), "run": name} for name in ("first", "second")]
    recipes.make({"name": "two", "steps": steps}, None, tmp_path)
    recipes.make({"name": "two", "steps": steps}, None, tmp_path)  # mkdir would fail
    (tmp_path / "second/summary.json").write_text('{"status": "failed"}')
    with pytest.raises(SystemExit, match="two: the command failed: mkdir second"):  # it is no result
        recipes.make({"name": "two", "steps": steps}, None, tmp_path)
    with pytest.raises(SystemExit, match="two: the command failed: mkdir third/fourth"):
        recipes.make({"name": "two", "steps": [{"command": "mkdir third/fourth", "run": "third"}]}, None, tmp_path)
