"""The tables of a ledger's files and their version. It knows nothing of connections and records.

Every file has tables of sessions; the coordinator's has the bookkeeping of all sessions, its shards' too. Within a
file, sessions are numbered in the order in which they were opened, and its other tables refer to them by that number;
the bookkeeping knows them by id. Nothing is stored twice: of a turn's prompt only the new tokens, of its messages only
the new ones.
"""

from enum import IntEnum

VERSION = 3
"""Goes up with every change of the tables; SQLite keeps it in the file as `user_version`."""


class FileKind(IntEnum):
    """Which file of a ledger it is. SQLite keeps it in the file, as its `application_id`."""

    COORDINATOR = 0x41524C47  # "ARLG"
    SHARD = 0x41524C53  # "ARLS"


SESSION_TABLES = """
CREATE TABLE sessions (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    group_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    purpose TEXT NOT NULL,
    seed INTEGER NOT NULL,
    key_hash TEXT NOT NULL,
    started_s REAL NOT NULL
);
CREATE INDEX session_of_key ON sessions (key_hash);
CREATE TABLE turns (
    number INTEGER PRIMARY KEY,
    session INTEGER NOT NULL REFERENCES sessions (number),
    id TEXT NOT NULL,
    parent TEXT,
    fork_at INTEGER NOT NULL,
    fork_reason TEXT,
    new_prompt_ids BLOB NOT NULL,    -- int32, little-endian
    request_delta TEXT NOT NULL,     -- JSON: messages
    sampling TEXT NOT NULL,          -- JSON: SamplingParams
    started_s REAL NOT NULL,
    ended_s REAL NOT NULL,
    UNIQUE (session, id)
);
CREATE TABLE completions (
    number INTEGER PRIMARY KEY,
    turn INTEGER NOT NULL REFERENCES turns (number),
    id TEXT NOT NULL UNIQUE,
    token_ids BLOB NOT NULL,         -- int32, little-endian
    logprobs BLOB NOT NULL,          -- float32, little-endian
    versions TEXT NOT NULL,          -- JSON: [["0:7", start, end], ...]
    finish_reason TEXT NOT NULL,
    distribution TEXT NOT NULL
);
CREATE INDEX completions_of_turn ON completions (turn);
CREATE TABLE endings (
    number INTEGER PRIMARY KEY,      -- the order of closing
    session INTEGER NOT NULL UNIQUE REFERENCES sessions (number),
    status TEXT NOT NULL,
    error TEXT,
    final_reward REAL,               -- NULL: none was given
    rewards TEXT NOT NULL,           -- JSON: {completion id: reward}
    parts TEXT NOT NULL,             -- JSON: {name: reward}
    logged TEXT NOT NULL,            -- JSON
    undelivered TEXT NOT NULL,       -- JSON: [completion id, ...]
    ended_s REAL NOT NULL,
    digest TEXT NOT NULL             -- of the columns from status on: rewards that changed since are found
);
"""

BOOKKEEPING_TABLES = """
CREATE TABLE leases (
    session TEXT PRIMARY KEY,        -- its id; it may be in any file
    step INTEGER NOT NULL,
    digest TEXT NOT NULL,            -- of what was sampled and earned, and of num_loss_tokens
    num_loss_tokens INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX leases_of_step ON leases (step);
CREATE TABLE fates (
    session TEXT PRIMARY KEY,        -- its id; orphans need no row, their status is their fate
    trained_step INTEGER,
    dropped TEXT,
    CHECK ((trained_step IS NULL) != (dropped IS NULL))
) WITHOUT ROWID;
CREATE TABLE checkpoints (
    step INTEGER PRIMARY KEY,
    path TEXT                        -- NULL: known from a restart only, its own commit was lost in the crash
);
CREATE TABLE incarnations (
    number INTEGER PRIMARY KEY,
    checkpoint_step INTEGER NOT NULL,
    started_s REAL NOT NULL,
    num_orphans INTEGER NOT NULL,
    num_returned INTEGER NOT NULL
);
CREATE TABLE notes (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL              -- JSON
);
"""

TABLES = {FileKind.COORDINATOR: SESSION_TABLES + BOOKKEEPING_TABLES, FileKind.SHARD: SESSION_TABLES}
