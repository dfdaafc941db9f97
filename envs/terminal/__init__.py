"""Tasks as benchmarks ship them, solved in a shell; each task's own tests judge, in a fresh container.

workflow.py         a workflow: run commands with the `bash` tool until nothing is left to do
tasks.py            a folder of such tasks as a run's tasks
demonstrations.py   imperfect conversations, on which the tiny model is warm-started
folders/            three tiny tasks
"""
