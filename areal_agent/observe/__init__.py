"""What a run says of itself while it runs and afterwards. It knows nothing of ledger, engine, trainer or run.

::

    clock.py          TimeAccount: every second of one side belongs to exactly one activity
    busy.py           BusyClock: how long at least one of something was under way
    spans.py          SpanLog, SpanUnion: the same over several processes
    metrics.py        metrics.jsonl: one row a step, appended
    rows.py           what a row says of a batch, and what the rows of a run add up to
    step_view.py      StepView: the numbers of one step that a person sees, and how they are written
    progress.py       Progress: shows a run, live in a terminal, as plain lines elsewhere
    ├── progress_live.py
    └── progress_plain.py
    curve.py          curve.png
    logging.py        one log file a process
    config.py         the config section
"""
