"""`python -m areal_agent.doctor`: what of a config works on this machine, what does not, and what to change.

::

    __main__.py ─▶ examination.py: the checks in their order; one that fails hides no other
                      │   finding.py     what a check says        report.py   how that is printed
                      ├─▶ settings.py    workflow, tasks, ports: what preflight.py knows, fault by fault
                      ├─▶ model.py       the model's folder       tokenizer.py, template.py   what a gateway has of it
                      ├─▶ memory_check.py ─▶ memory.py   the estimate, its formulas and its parts: pure
                      │        trainer_memory.py   engine_memory.py   memory_parts.py   shape.py
                      ├─▶ storage.py     disk, shared memory      machine.py  what this machine has
                      ├─▶ sandboxes.py   asks `python -m sandboxes doctor`
                      └─▶ trial.py       an engine and a trainer, started as a run starts them:
                             sampling.py   ids in and out, interruption      rollouts.py  a group to train on
                             pushing.py    a train step, a push under running requests

Nothing of a run is written twice: each check calls what a run would call, and tells how that went.
"""
