"""From tasks to groups of finished trajectories.

config.py            the sections `rollout`, `sandbox`, `eval`
tasks/               where tasks come from, and which one is next
workflow.py          how a user's workflow becomes one callable
context.py           `rollout`: what a workflow receives
runner.py            one rollout: session, workflow, reward, end
watchdog.py          finds the workflow that blocks the event loop
local.py             rollouts in this process: a gateway, a runner and a watchdog
worker/              a process that does the same for a run elsewhere
producer.py          the admit loop, groups, their buffer, and batches
dynamic_sampling.py  drops groups that teach nothing
online.py            the client of a gateway that stands alone
"""
