PRAGMA application_id = 1095912531;
PRAGMA user_version = 5;
PRAGMA journal_mode = wal;
BEGIN TRANSACTION;
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
INSERT INTO "completions" VALUES(1,1,'sharded-c0',X'64000000650000006600000067000000',X'000000BF000000BF000000BF000000BF','[["0:0",0,4]]','stop','exact');
INSERT INTO "completions" VALUES(2,2,'sharded-c1',X'64000000650000006600000067000000',X'000000BF000000BF000000BF000000BF','[["0:0",0,4]]','stop','exact');
INSERT INTO "completions" VALUES(3,3,'open in a shard-c0',X'64000000650000006600000067000000',X'000000BF000000BF000000BF000000BF','[["0:0",0,4]]','stop','exact');
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
INSERT INTO "endings" VALUES(1,1,'completed',NULL,1.0,'{}','{}','{}','[]',1700001000.0,'168143c2dbb4cbc83379d1ed4e077a54741208dd07e19c66eb8b02817335a536');
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
INSERT INTO "sessions" VALUES(1,'sharded','g000000','task-1','train',7,'0000000000000000000000000000000000000000000000000000000000000000',1700000000.0);
INSERT INTO "sessions" VALUES(2,'open in a shard','g000000','task-1','train',7,'0000000000000000000000000000000000000000000000000000000000000000',1700000000.0);
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
    images TEXT,                     -- JSON: [[digest, start, end], ...] in new_prompt_ids; NULL: none
    UNIQUE (session, id)
);
INSERT INTO "turns" VALUES(1,1,'sharded-t0',NULL,0,'new_conversation',X'010000000200000003000000','[{"role":"user","content":"what is 2 + 2?"}]','{"temperature":1.0,"top_p":1.0,"top_k":-1,"min_p":0.0,"frequency_penalty":0.0,"presence_penalty":0.0,"repetition_penalty":1.0,"logit_bias":[],"json_schema":null,"regex":null,"ebnf":null,"max_tokens":256,"min_tokens":0,"stop_token_ids":[0],"ignore_eos":false,"stop":[],"seed":null}',1700000000.0,1700000001.0,NULL);
INSERT INTO "turns" VALUES(2,1,'sharded-t1','sharded-c0',7,NULL,X'010000000200000003000000','[{"role":"user","content":"what is 2 + 2?"}]','{"temperature":1.0,"top_p":1.0,"top_k":-1,"min_p":0.0,"frequency_penalty":0.0,"presence_penalty":0.0,"repetition_penalty":1.0,"logit_bias":[],"json_schema":null,"regex":null,"ebnf":null,"max_tokens":256,"min_tokens":0,"stop_token_ids":[0],"ignore_eos":false,"stop":[],"seed":null}',1700000002.0,1700000003.0,NULL);
INSERT INTO "turns" VALUES(3,2,'open in a shard-t0',NULL,0,'new_conversation',X'010000000200000003000000','[{"role":"user","content":"what is 2 + 2?"}]','{"temperature":1.0,"top_p":1.0,"top_k":-1,"min_p":0.0,"frequency_penalty":0.0,"presence_penalty":0.0,"repetition_penalty":1.0,"logit_bias":[],"json_schema":null,"regex":null,"ebnf":null,"max_tokens":256,"min_tokens":0,"stop_token_ids":[0],"ignore_eos":false,"stop":[],"seed":null}',1700000000.0,1700000001.0,NULL);
CREATE INDEX session_of_key ON sessions (key_hash);
CREATE INDEX completions_of_turn ON completions (turn);
COMMIT;
