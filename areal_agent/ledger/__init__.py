"""The durable journal of a run: files that say what was sampled, what it earned and how it ended.

::

    ledger.py        Ledger, which everybody else uses: asyncio calls over the files of a run
    ├── shard.py         LedgerShard: one file of sessions and its writer; a rollout worker has one of its own
    │   ├── lock.py          one live writer a file
    │   ├── writer.py        the writer thread: all that is queued goes into one transaction (group commit)
    │   └── session_writes.py    what is written of a session
    ├── bookkeeping.py   what is written of leases, fates, checkpoints: in the coordinator's file only
    ├── orphans.py       the shards of workers that are gone
    ├── reader.py        the reader thread: consistent snapshots, which never hold up a writer
    │   └── files.py         which files there are, and one state of all of them
    ├── questions.py     what is asked of the whole ledger, by Ledger.ask
    ├── reads.py         what is read of one file
    ├── encoding.py      records to rows and back, exactly
    ├── tables.py        the tables, their version and the upgrades to it; opening.py makes, opens and upgrades a file
    ├── digest.py        what proves that rows and trajectories are what they were
    ├── fates.py         which fate a rollout gets that ended with nothing to train
    └── records.py       Lease, Incarnation, LedgerCounts
    verify.py        proves the invariants of a ledger, also while its run is live
    ├── invariants.py      the promises in words, and Violation
    ├── session_checks.py  what one session can break by itself
    └── table_checks.py    what tables can break against each other
    export.py        one row a completion, for whoever studies a run; parquet.py writes them
    __main__.py      `python -m areal_agent.ledger verify RUN_DIR`, `... export RUN_DIR --parquet FILE`

The life of a session's row, and the tables that hold it::

    sessions ─▶ turns ─▶ completions          while it is open
        └────▶ endings                        closed: status, rewards. Training data *waits* from here on
    ..............................................................................................
                 ├──▶ leases ──▶ fates        leased for a step; trained when a checkpoint with that step commits
                 └─────────────▶ fates        dropped

Above the line: in the file of whoever served the session, `ledger.sqlite` or a worker's `ledger-w0.sqlite`. Below: in
`ledger.sqlite`, by session id, so that what happens to trajectories of several files happens at once. A trajectory
waits when it has neither a lease nor a fate; an orphan's status is its fate. After a crash, leases that no checkpoint
holds return.

A file of an older version of the tables is upgraded when it is opened for writing. Whoever only reads has an upgraded
copy of it, and changes nothing.
"""
