"""The terminal environment; the model is scripted, the containers are real.

A command earns what the tests of its task say: the right one of the demonstrations 1, the wrong one 0.
"""

from itertools import islice
from pathlib import Path

import pytest

from areal_agent.errors import SandboxError
from areal_agent.types import Status
from envs.terminal.demonstrations import COMMANDS, demonstrations
from envs.terminal.tasks import load
from envs.terminal.workflow import solve
from sandboxes.containers.provider import DockerProvider
from tests.envs.stage import END, open_stage, renderer_of, told


async def test_commands_earn_what_the_tasks_tests_say(tmp_path: Path) -> None:
    try:
        await (await DockerProvider.start(needs_default_image=True)).close()
    except SandboxError as error:
        pytest.skip(str(error))
    renderer = renderer_of(demonstrations(0), tmp_path)
    tasks = {task["messages"][0]["content"]: task for task in load("train", 0, 3)}
    assert set(tasks) == set(COMMANDS) == {one[0]["content"] for one in islice(demonstrations(0), 50)}
    instruction = "Sort names.txt."
    for (command, printed), reward in zip(COMMANDS[instruction], (1.0, 0.0), strict=True):
        call = f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "{command}"}}}}\n</tool_call>{END}'
        async with open_stage(renderer, tasks[instruction]) as play:
            trajectory = await play(solve, call, f"Done.{END}", backend="docker")
        assert (trajectory.status, trajectory.rewards.final, told(trajectory)) == (Status.COMPLETED, reward, [printed])
