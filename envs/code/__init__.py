"""Programs to write and to repair, judged by hidden cases in sandboxes.

write.py           a workflow: try programs with the `python` tool, then `submit` one
repair.py          a workflow: repair a program by the reports of its visible tests
judging.py         a task's cases, and the reward of a program
records.py         LiveCodeBench's, APPS's, TACO's and HumanEval's records as problems for real models
conversation.py    what both workflows share: a turn of the model, its calls, the code in its answers
tiny/              functions of one line, for the tiny model
problems/          thirty problems for real models
"""
