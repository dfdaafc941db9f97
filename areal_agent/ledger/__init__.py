"""The durable journal of a run: one SQLite file that says what was sampled, what it earned and how it ended.

::

    ledger.py        Ledger: what everybody else uses. An asyncio face over the files below
    ├── lock.py      one live writer a run folder
    ├── writer.py    the writer thread: all that is queued goes into one transaction (group commit)
    ├── reader.py    the reader thread: consistent snapshots, which never hold up the writer
    ├── writes.py    what each write does to the tables: plain functions over a connection
    ├── reads.py     what each question asks of the tables
    ├── encoding.py  records to rows and back, exactly
    ├── schema.py    the tables, their version, and how the file is opened
    ├── digest.py    what identifies the sampled tokens of a trajectory
    └── records.py   what the ledger itself says: Incarnation, LedgerCounts
    verify.py        proves the invariants of a file, also while its run is live
    ├── invariants.py      the promises in words, and Violation
    ├── session_checks.py  what one session can break by itself
    └── table_checks.py    what tables can break against each other
    __main__.py      `python -m areal_agent.ledger verify RUN_DIR`

The life of a session's row, and the tables that hold it::

    sessions ─▶ turns ─▶ completions          while it is open
        └────▶ endings                        closed: status, rewards. Training data *waits* from here on
                 ├──▶ leases ──▶ fates        leased for a step; trained when a checkpoint with that step commits
                 └─────────────▶ fates        dropped

A trajectory waits when it has neither a lease nor a fate. After a crash, leases that no checkpoint holds return.
"""
