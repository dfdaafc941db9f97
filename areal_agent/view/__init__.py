"""Shows what a run recorded: on a page in the browser, or in a terminal with `--list` and `--text [SESSION]`.

`__main__.py` is the command line with the list of groups, `session.py` shows one session as a conversation, and
`terminal.py` prints both, with the text of models and tools made harmless. The page's server is `server.py`: it answers
with what `recorded.py` reads of a run and `trajectory.py` of a rollout, and `export.py` makes one file of a rollout.
`page/` is what runs in the browser. The ledger is asked by `ledger/questions.py` and `ledger/pages.py`, and its answers
are read by `tokens/transcript.py`.
"""
