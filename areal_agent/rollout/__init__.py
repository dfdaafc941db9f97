"""From tasks to groups of finished trajectories.

    tasks/        where tasks come from, and which one is next
    workflow.py   loading a user's workflow
    context.py    `rollout`: what a workflow receives
    runner.py     one rollout: session, workflow, reward, end
        clients.py  the HTTP clients of all rollouts     threads.py  workflows that are plain functions
    group.py      the siblings of one task
    buffer.py     finished groups, until they are trained
    producer.py   the admit loop, and batches      dynamic_sampling.py   groups that teach nothing
    executor.py   where rollouts run: the seam
    local.py      in this process: a gateway, a runner and a watchdog
        watchdog.py, blocking.py   the line of a workflow that blocks the event loop
    worker/       a process that does the same for a run elsewhere
    config.py     the sections `rollout`, `sandbox`, `eval`

The runner knows the gateway only by its HTTP; local.py puts the two together. None of these files knows a trainer.
"""
