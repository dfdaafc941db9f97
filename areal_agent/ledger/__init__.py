"""The durable journal of a run: SQLite files that record what was sampled, what it earned and what became of it.

::

    ledger.py       Ledger, the run's entry point: asyncio calls over all files of a run
    shard.py        LedgerShard: one file of sessions and its writer thread (group commit)
    files.py        the tables, opening and upgrading a file, its lock, and a snapshot of all files of a ledger
    writes.py       functions that write to one file
    questions.py    functions over a snapshot of all files, called by `Ledger.ask`
    encoding.py     records to rows and back, and the digests that prove rows unchanged
    verify.py       checks the invariants of a ledger, even while its run is live
    export.py       one row per completion, written to a Parquet file
    __main__.py     `python -m areal_agent.ledger verify RUN_DIR`, `export`, `replay`

The life of a session, and the tables that hold it::

    sessions ─▶ turns ─▶ completions          while it is open
        └────▶ endings                        closed: status, rewards. Training data *waits* from here on
    ..............................................................................................
                 ├──▶ leases ──▶ fates        leased for a step; trained when a checkpoint with that step commits
                 └─────────────▶ fates        dropped

The tables above the line are in the file of the process that served the session: `ledger.sqlite`, or a worker's shard
`ledger-w0.sqlite`. The tables below it are in `ledger.sqlite` and refer to sessions by id, so that one transaction
covers trajectories from several files. A trajectory waits while it has neither a lease nor a fate; an orphan's status
is its fate. After a crash, leases that no checkpoint covers are returned, and their trajectories wait again.
"""
