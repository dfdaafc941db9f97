"""Thirty problems for real models, each with a program that solves it, one that does not, visible and hidden cases.

problem.py     what a problem is, and its texts
lists.py  strings.py  numbers.py    the problems
tasks.py       `load` and `load_repairs`: the problems as tasks of the two workflows
"""
