"""Mathematical problems with a `python` tool; answers, boxed or free, are judged by math-verify (the extra `math`).

tasks.py      generated problems; real sets are files or data sets with the columns `problem` and `answer`
workflow.py   `solve`: one conversation with the tool, to its reward
judge.py      whether an answer is right
verifier.py   math-verify, as a process runs it
processes.py  processes that a question may hang or kill; reasoning_gym/ scores in them, too
served.py     what such a process runs
"""
