"""From tasks to groups of finished trajectories.

config.py         the sections `tasks`, `rollout`, `sandbox`, `eval`
tasks.py          sources ─▶ rows ─▶ tasks: columns, filter, ids
draws.py          which task is next: the shuffled stream, once per epoch over restarts; the curriculum
workflow.py       how a user's workflow becomes one callable
context.py        `rollout`: what a workflow receives
models.py         other models that workflows ask, such as a judge
runner.py         one rollout: session, workflow, reward, end
watchdog.py       finds the workflow that blocks the event loop, and ends what blocks it too long
unawaited.py      finds calls that a workflow made and did not await
local.py          rollouts in this process: a gateway, a runner and a watchdog
relay.py          the same before an API that knows no tokens, for evaluations
worker.py         a process that does what local.py does for a run elsewhere; worker_client.py is the main process's end
producer.py       the admit loop, groups, their buffer, dynamic sampling, and batches
online.py         the client of a gateway that stands alone
"""
