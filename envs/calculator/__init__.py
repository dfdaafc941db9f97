"""Arithmetic too hard for the model's head: it writes a program, reads what that printed, and answers.

tasks.py           the questions, and which operands are held out
workflow.py        `solve`: one conversation with the tool, to its reward
reward.py          when an answer is right
demonstrations.py  imperfect conversations, on which the tiny model is warm-started
"""
