"""`python -m areal_agent.episode`: recorded episodes, played again.

__main__.py   the command line, and one session played again
values.py     fresh samples after a turn: the value of each turn, with its confidence interval
regrade.py    rewards computed anew, and a copy of the run that has them
engine.py     the engine of fresh samples: a URL, or a model that is served for the while
"""
