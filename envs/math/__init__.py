"""Mathematical problems with a `python` tool; answers, boxed or free, are judged by math-verify (the extra `math`).

tasks.py      generated problems; real sets are files or data sets with the columns `problem` and `answer`
workflow.py   `solve`: one conversation with the tool, to its reward
judge.py      whether an answer is right: processes that an answer may hang or kill
verifier.py   what such a process runs
"""
