"""`python -m areal_agent.doctor`: what of a config works on this machine, what does not, and what to change.

::

    __main__.py ─▶ examination.py: the checks in their order; one that fails hides no other
                      │   findings.py    what a check says, and how it is printed
                      ├─▶ settings.py    workflow, tasks, ports, sandboxes, disk
                      ├─▶ model.py       the model's folder and sizes, its tokenizer and chat template
                      ├─▶ memory.py      the memory that this machine has, and that engine and trainer need
                      └─▶ trial.py       an engine and a trainer, started as a run starts them

The doctor has no checks of its own for what a run checks: it calls what a run would call, and reports the outcome.
"""
