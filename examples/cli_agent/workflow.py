"""Codex, a CLI agent, solves a task inside the task's sandbox, which has no network; the task's hidden tests judge.

What Codex knows of the gateway is a loopback address, at which its requests reach this rollout's own session.
"""

from typing import Any

from areal_agent import Rollout, SandboxError
from envs.terminal.workflow import open_bench

SANDBOX_BACKENDS = ("docker",)
COMMAND = ("codex", "exec", "--ephemeral", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
"""Codex asks nobody and makes no sandbox of its own: it is in one."""
PROVIDER = (
    "{{name='own', base_url='{}', env_key='KEY', wire_api='responses', request_max_retries=1, stream_max_retries=1}}"
)
SETTINGS = (
    "model_provider=own",
    "web_search=disabled",  # the gateway refuses OpenAI's own tools
    "features.view_image=false",  # nor images, which its model does not see
    "features.multi_agent=false",  # sub-agents would be conversations of their own
    "features.goals=false",  # with the next two, a prompt of 22 kB instead of 39
    "features.plugins=false",
    "skills.include_instructions=false",
    "features.unbounded_connection_retries=false",
)
VARIABLES = {"KEY": "any", "HOME": "/var/tmp"}
"""Requests bear the session's key, whatever Codex sends. HOME is outside of the folder that is judged."""
LOST = (
    "ERROR: unexpected status 5",
    "ERROR: We’re currently experiencing high demand",  # what it says of a status of 500
    "ERROR: stream disconnected",
    "ERROR: exceeded retry limit",
    "ERROR: Connection failed",
)
"""How the line begins that Codex ends with if it got no answer. Other ends are the model's: a full context, say."""


async def solve(task: dict[str, Any], rollout: Rollout) -> float:
    """Return the reward that the task's tests give to what Codex left in the sandbox, whether it ended well or not."""
    bench = await rollout.shared(open_bench)
    harbor = bench.task_in(task["folder"])
    await harbor.prepare()
    box = await rollout.enter(harbor.open(bench.pool))
    provider = PROVIDER.format(await box.expose_gateway(rollout))
    options = [word for one in (*SETTINGS, f"model_providers.own={provider}") for word in ("-c", one)]
    result = await box.exec([*COMMAND, *options, "-m", rollout.model, harbor.instruction], env=VARIABLES)
    printed = result.stderr.decode(errors="replace")
    rollout.log(codex=result.status.value, printed=printed[-2000:])
    errors = [line for line in printed.splitlines() if line.startswith("ERROR: ")]
    if not result.is_ok and errors and errors[-1].startswith(LOST):
        raise SandboxError(f"Codex got no answer from the gateway: {errors[-1]}")
    verdict = await harbor.verify(box, bench.pool)
    rollout.log(tests=verdict.detail)
    return verdict.reward
