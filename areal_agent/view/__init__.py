"""Shows what a run recorded, in a terminal: `python -m areal_agent.view RUN_DIR --text [SESSION]`.

`__main__.py` is the command line with the list of groups, `session.py` shows one session as a conversation, and
`terminal.py` prints both, with the text of models and tools made harmless. What is shown is asked of the ledger by the
functions of `ledger/questions.py`, and read by `tokens/transcript.py`.
"""
