"""Programs to write and to repair, judged by hidden cases in sandboxes.

write.py           a workflow: try programs with the `python` tool, then `submit` one
repair.py          a workflow: mend a program by what its visible tests say
judging.py         a task's cases, and what a program earns by them
conversation.py    what both workflows share: a turn of the model, its calls, the code in what it says
tiny/              functions of one line, for the tiny model
problems/          thirty problems for real models
"""
