"""Shows what a run recorded, in a terminal: `python -m areal_agent.view RUN_DIR --text [SESSION]`.

::

    __main__.py    the command line: what to show, and what to say when that cannot be shown
    terminal.py    `Screen`: lines in colour, and text of models and tools made harmless
    rollouts.py    groups with their siblings, rewards and fates
    session.py     one session as a conversation: answers, branches, versions, and what is in the loss

What is shown is asked of the ledger by the functions of `ledger/questions.py`, and read by `tokens/transcript.py`.
"""
