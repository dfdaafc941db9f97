"""What the tests of doors to other libraries share: rollouts that run at once, and servers as processes."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from areal_agent.engine.fake import FakeEngine, Reply
from areal_agent.errors import EngineError
from areal_agent.models.recipe import END
from areal_agent.rollout.runner import RolloutSpec
from areal_agent.testing import SANDBOX, MemoryJournal, open_scripted, plain_renderer
from areal_agent.types import GenerateRequest, SessionPurpose, Task, Trajectory

CONTEXT = 8_000
STARTED, ENDED = "started", "ended"


async def play_all(
    workflow: Any, tasks: Sequence[Mapping[str, Any]], said: Mapping[str, Sequence[str]], fifo: Path
) -> list[Trajectory]:
    """Play the tasks at once; return their trajectories in this order.

    A prompt with a key of `said` is answered with its texts in turn; then the engine fails. The last task calls
    `wait_forever`, and is cancelled there.
    """
    renderer, journal = plain_renderer(), MemoryJournal()
    left = {key: iter(texts) for key, texts in said.items()}

    def answer(request: GenerateRequest) -> Reply:
        prompt = renderer.text_of(request.input_ids, has_ended=False)
        text = next((next(texts, None) for key, texts in left.items() if key in prompt), None)
        return EngineError("no answer is left") if text is None else renderer.ids_of(text + END)

    async with open_scripted(
        workflow,
        FakeEngine(answer),
        renderer=renderer,
        journal=journal,
        sandbox=SANDBOX,
        timeout_s=300.0,
        max_tokens=1_000,
        max_context_tokens=CONTEXT,
        max_concurrent=len(tasks),
    ) as runner:
        specs = [
            RolloutSpec(
                session_id=f"s{index:02}",
                group_id="g",
                task=Task(id=f"t{index}", data=dict(task)),
                seed=0,
                purpose=SessionPurpose.TRAIN,
            )
            for index, task in enumerate(tasks)
        ]
        running = [asyncio.ensure_future(runner.run(spec)) for spec in specs]
        assert await asyncio.to_thread(fifo.read_text) == STARTED
        running[-1].cancel()
        assert await asyncio.to_thread(fifo.read_text) == ENDED
        await asyncio.wait(running)
    return sorted(journal.closed, key=lambda trajectory: trajectory.session_id)


async def wait_forever(fifo: Path) -> None:
    """Wait for a cancellation, as a tool of the last task."""
    write = fifo.write_text
    write(STARTED)
    try:
        await asyncio.Event().wait()
    finally:
        write(ENDED)


@contextmanager
def serving(folder: Path, program: str) -> Iterator[str]:
    """Run a Python program that is a uvicorn server, in `folder`; yield its URL."""
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    said: list[str] = []
    try:
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"running on (http://\S+)", line):
                yield found[1]
                break
        else:
            raise AssertionError("".join(said))
    finally:
        process.kill()
        process.communicate()
