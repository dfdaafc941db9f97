"""Functions of one line, which a tiny model can learn to write: `f(x)` of two numbers.

tasks.py            the functions, and which numbers are held out
demonstrations.py   imperfect conversations, on which the tiny model is warm-started
"""
