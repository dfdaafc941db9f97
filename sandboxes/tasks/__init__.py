"""Tasks as benchmarks ship them: a folder with an instruction, an image, tests that judge, and a solution.

::

    harbor.py     HarborTask: a task's sandbox, and its verdict from a fresh one; also a command line
    task_toml.py  the settings of such a folder

Harbor's format (`task.toml`, as its version 0.25 reads it) holds Terminal-Bench's tasks, and SWE-bench's by adapters.
"""
