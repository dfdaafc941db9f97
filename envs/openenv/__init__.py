"""Servers of OpenEnv, whoever wrote them (no extra: see README.md).

tasks.py     `load`: seeds of a server's environment; those of the split `test` are not trained
workflow.py  `solve`: answers, or calls of the server's tools, are actions; the sum of the rewards is the reward
"""
