"""Codex, a CLI agent, solves a task inside the task's sandbox, which has no network; the task's hidden tests judge.

What Codex knows of the gateway is a loopback address, at which its requests reach this rollout's own session.
"""

from typing import Any

from areal_agent import Rollout
from envs.terminal.workflow import open_bench

COMMAND = "codex exec --ephemeral --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox".split()
"""Codex asks nobody and makes no sandbox of its own: it is in one."""
SETTINGS = (
    "web_search=disabled",  # the gateway refuses OpenAI's own tools
    "features.view_image=false",  # and images
    "features.multi_agent=false",  # sub-agents would be conversations of their own
    "features.goals=false",  # this and the next two: some 5,000 tokens less in each prompt
    "features.plugins=false",
    "skills.include_instructions=false",
    "features.unbounded_connection_retries=false",
)
VARIABLES = {"KEY": "any", "HOME": "/var/tmp"}
"""Requests bear the session's key, whatever Codex sends. HOME is outside of the folder that is judged."""


async def solve(task: dict[str, Any], rollout: Rollout) -> float:
    """Return the reward that the task's tests give to what Codex left in the sandbox, however it ended."""
    bench = await rollout.shared(open_bench)
    harbor = bench.task_in(task["folder"])
    await harbor.prepare()
    box = await rollout.enter(harbor.open(bench.pool))
    url = await box.expose_gateway(rollout)
    provider = f"model_providers.own={{name='own', base_url='{url}', env_key='KEY', wire_api='responses'}}"
    options = [word for setting in (*SETTINGS, provider, "model_provider=own") for word in ("-c", setting)]
    result = await box.exec([*COMMAND, *options, "-m", rollout.model, harbor.instruction], env=VARIABLES)
    verdict = await harbor.verify(box, bench.pool)
    rollout.log(codex=result.status.value, printed=result.stderr.decode(errors="replace")[-2000:], tests=verdict.detail)
    return verdict.reward
