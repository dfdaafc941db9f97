"""From tasks to groups of finished trajectories.

    tasks.py      where tasks come from            workflow.py   loading a user's workflow
    context.py    `rollout`: what a workflow receives
    runner.py     one rollout: session, workflow, reward, end
    group.py      the siblings of one task
    admission.py  how many rollouts may run (staleness)
    buffer.py     finished groups, until they are trained
    config.py     the sections `rollout`, `sandbox`, `tasks`, `eval`

The runner knows the gateway only by its HTTP; none of these files knows an engine or a trainer.
"""
