PRAGMA application_id = 1095912519;
PRAGMA user_version = 5;
PRAGMA journal_mode = wal;
BEGIN TRANSACTION;
CREATE TABLE checkpoints (
    step INTEGER PRIMARY KEY,
    path TEXT                        -- NULL: known from a restart only, its own commit was lost in the crash
);
INSERT INTO "checkpoints" VALUES(1,'checkpoints/1');
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
INSERT INTO "completions" VALUES(1,1,'trained-c0',X'64000000650000006600000067000000',X'000000BF000000BF000000BF000000BF','[["0:0",0,4]]','stop','exact');
INSERT INTO "completions" VALUES(2,2,'trained-c1',X'64000000650000006600000067000000',X'000000BF000000BF000000BF000000BF','[["0:0",0,4]]','stop','exact');
INSERT INTO "completions" VALUES(3,3,'leased-c0',X'64000000650000006600000067000000',X'000000BF000000BF000000BF000000BF','[["0:0",0,4]]','stop','exact');
INSERT INTO "completions" VALUES(4,4,'leased-c1',X'64000000650000006600000067000000',X'000000BF000000BF000000BF000000BF','[["0:0",0,4]]','stop','exact');
INSERT INTO "completions" VALUES(5,5,'dropped-c0',X'64000000650000006600000067000000',X'000000BF000000BF000000BF000000BF','[["0:0",0,4]]','stop','exact');
INSERT INTO "completions" VALUES(6,6,'dropped-c1',X'64000000650000006600000067000000',X'000000BF000000BF000000BF000000BF','[["0:0",0,4]]','stop','exact');
INSERT INTO "completions" VALUES(7,7,'waiting-c0',X'64000000650000006600000067000000',X'000000BF000000BF000000BF000000BF','[["0:0",0,4]]','stop','exact');
INSERT INTO "completions" VALUES(8,8,'waiting-c1',X'64000000650000006600000067000000',X'000000BF000000BF000000BF000000BF','[["0:0",0,4]]','stop','exact');
INSERT INTO "completions" VALUES(9,9,'eval-c0',X'64000000650000006600000067000000',X'000000BF000000BF000000BF000000BF','[["0:0",0,4]]','stop','exact');
INSERT INTO "completions" VALUES(10,10,'eval-c1',X'64000000650000006600000067000000',X'000000BF000000BF000000BF000000BF','[["0:0",0,4]]','stop','exact');
INSERT INTO "completions" VALUES(11,11,'forked-c0',X'64000000650000006600000067000000',X'000000BF000000BF000000BF000000BF','[["0:0",0,4]]','stop','exact');
INSERT INTO "completions" VALUES(12,12,'forked-c1',X'64000000650000006600000067000000',X'000000BF000000BF000000BF000000BF','[["0:1",0,3],["1:2",3,4]]','stop','altered');
INSERT INTO "completions" VALUES(13,13,'unpaid-c0',X'64000000650000006600000067000000',X'000000BF000000BF000000BF000000BF','[["0:0",0,4]]','stop','exact');
INSERT INTO "completions" VALUES(14,14,'open-c0',X'64000000650000006600000067000000',X'000000BF000000BF000000BF000000BF','[["0:0",0,4]]','stop','exact');
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
INSERT INTO "endings" VALUES(2,2,'completed',NULL,1.0,'{}','{}','{}','[]',1700001000.0,'168143c2dbb4cbc83379d1ed4e077a54741208dd07e19c66eb8b02817335a536');
INSERT INTO "endings" VALUES(3,3,'completed',NULL,1.0,'{}','{}','{}','[]',1700001000.0,'168143c2dbb4cbc83379d1ed4e077a54741208dd07e19c66eb8b02817335a536');
INSERT INTO "endings" VALUES(4,4,'completed',NULL,1.0,'{}','{}','{}','[]',1700001000.0,'168143c2dbb4cbc83379d1ed4e077a54741208dd07e19c66eb8b02817335a536');
INSERT INTO "endings" VALUES(5,5,'completed',NULL,1.0,'{}','{}','{}','[]',1700001000.0,'168143c2dbb4cbc83379d1ed4e077a54741208dd07e19c66eb8b02817335a536');
INSERT INTO "endings" VALUES(6,6,'completed',NULL,0.5,'{"forked-c0":0.25}','{"format":1.0}','{"tries":2}','["forked-c1"]',1700001000.0,'7ffb340430eeb9d9ede49e258f3b933a83d64e8b9dd6884bdcd16df16965e43e');
INSERT INTO "endings" VALUES(7,7,'missing_reward','no reward',NULL,'{}','{}','{}','[]',1700001000.0,'87ece3bdb8bc0c3683d956377046c671ed05310e80355f58227c4a81a83f161b');
CREATE TABLE fates (
    session TEXT PRIMARY KEY,        -- its id; orphans need no row, their status is their fate
    trained_step INTEGER,
    dropped TEXT,
    CHECK ((trained_step IS NULL) != (dropped IS NULL))
) WITHOUT ROWID;
INSERT INTO "fates" VALUES('dropped',NULL,'stale');
INSERT INTO "fates" VALUES('trained',1,NULL);
CREATE TABLE incarnations (
    number INTEGER PRIMARY KEY,
    checkpoint_step INTEGER NOT NULL,
    started_s REAL NOT NULL,
    num_orphans INTEGER NOT NULL,
    num_returned INTEGER NOT NULL,
    trainer TEXT                     -- JSON: how its trainer was set up; NULL: it trained nothing, or was older
);
INSERT INTO "incarnations" VALUES(0,0,1795993448.47436,0,0,'{"seed":7}');
CREATE TABLE leases (
    session TEXT PRIMARY KEY,        -- its id; it may be in any file
    step INTEGER NOT NULL,
    digest TEXT NOT NULL,            -- of what was sampled and earned, and of num_loss_tokens
    num_loss_tokens INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO "leases" VALUES('leased',2,'725b784986dff43cac19a74a3486576712d7938bf33c4ab67d0d2e6bacbbb917',8);
INSERT INTO "leases" VALUES('trained',1,'862d9e9b6e583b3e668ac880b40bec11f4c640861c9d3210ed05462505f91f83',8);
CREATE TABLE notes (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL              -- JSON
);
INSERT INTO "notes" VALUES('status','"running"');
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
INSERT INTO "sessions" VALUES(1,'trained','g000000','task-1','train',7,'0000000000000000000000000000000000000000000000000000000000000000',1700000000.0);
INSERT INTO "sessions" VALUES(2,'leased','g000000','task-1','train',7,'0000000000000000000000000000000000000000000000000000000000000000',1700000000.0);
INSERT INTO "sessions" VALUES(3,'dropped','g000000','task-1','train',7,'0000000000000000000000000000000000000000000000000000000000000000',1700000000.0);
INSERT INTO "sessions" VALUES(4,'waiting','g000000','task-1','train',7,'0000000000000000000000000000000000000000000000000000000000000000',1700000000.0);
INSERT INTO "sessions" VALUES(5,'eval','g000000','task-1','eval',7,'0000000000000000000000000000000000000000000000000000000000000000',1700000000.0);
INSERT INTO "sessions" VALUES(6,'forked','g000000','task-1','train',7,'0000000000000000000000000000000000000000000000000000000000000000',1700000000.0);
INSERT INTO "sessions" VALUES(7,'unpaid','g000000','task-1','train',7,'cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd',1700000000.0);
INSERT INTO "sessions" VALUES(8,'open','g000000','task-1','train',7,'0000000000000000000000000000000000000000000000000000000000000000',1700000000.0);
CREATE TABLE steps (
    step INTEGER PRIMARY KEY,
    process INTEGER NOT NULL REFERENCES incarnations (number),
    incarnation INTEGER NOT NULL,    -- of the weights that the step began with; a gateway elsewhere may count otherwise
    sessions TEXT NOT NULL,          -- JSON: their ids, in the order of the batch
    teacher BLOB,                    -- float32, little-endian: what a teacher's server says of the loss tokens
    inputs TEXT NOT NULL,            -- JSON: digests of what the trainer was given, by field
    weights TEXT NOT NULL            -- digest of the weights that the step made
);
INSERT INTO "steps" VALUES(1,0,0,'["trained"]',X'000000BF0000A0BF','{"token_ids":"abababababababab"}','cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd');
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
INSERT INTO "turns" VALUES(1,1,'trained-t0',NULL,0,'new_conversation',X'010000000200000003000000','[{"role":"user","content":"what is 2 + 2?"}]','{"temperature":1.0,"top_p":1.0,"top_k":-1,"min_p":0.0,"frequency_penalty":0.0,"presence_penalty":0.0,"repetition_penalty":1.0,"logit_bias":[],"json_schema":null,"regex":null,"ebnf":null,"max_tokens":256,"min_tokens":0,"stop_token_ids":[0],"ignore_eos":false,"stop":[],"seed":null}',1700000000.0,1700000001.0,NULL);
INSERT INTO "turns" VALUES(2,1,'trained-t1','trained-c0',7,NULL,X'010000000200000003000000','[{"role":"user","content":"what is 2 + 2?"}]','{"temperature":1.0,"top_p":1.0,"top_k":-1,"min_p":0.0,"frequency_penalty":0.0,"presence_penalty":0.0,"repetition_penalty":1.0,"logit_bias":[],"json_schema":null,"regex":null,"ebnf":null,"max_tokens":256,"min_tokens":0,"stop_token_ids":[0],"ignore_eos":false,"stop":[],"seed":null}',1700000002.0,1700000003.0,NULL);
INSERT INTO "turns" VALUES(3,2,'leased-t0',NULL,0,'new_conversation',X'010000000200000003000000','[{"role":"user","content":"what is 2 + 2?"}]','{"temperature":1.0,"top_p":1.0,"top_k":-1,"min_p":0.0,"frequency_penalty":0.0,"presence_penalty":0.0,"repetition_penalty":1.0,"logit_bias":[],"json_schema":null,"regex":null,"ebnf":null,"max_tokens":256,"min_tokens":0,"stop_token_ids":[0],"ignore_eos":false,"stop":[],"seed":null}',1700000000.0,1700000001.0,NULL);
INSERT INTO "turns" VALUES(4,2,'leased-t1','leased-c0',7,NULL,X'010000000200000003000000','[{"role":"user","content":"what is 2 + 2?"}]','{"temperature":1.0,"top_p":1.0,"top_k":-1,"min_p":0.0,"frequency_penalty":0.0,"presence_penalty":0.0,"repetition_penalty":1.0,"logit_bias":[],"json_schema":null,"regex":null,"ebnf":null,"max_tokens":256,"min_tokens":0,"stop_token_ids":[0],"ignore_eos":false,"stop":[],"seed":null}',1700000002.0,1700000003.0,NULL);
INSERT INTO "turns" VALUES(5,3,'dropped-t0',NULL,0,'new_conversation',X'010000000200000003000000','[{"role":"user","content":"what is 2 + 2?"}]','{"temperature":1.0,"top_p":1.0,"top_k":-1,"min_p":0.0,"frequency_penalty":0.0,"presence_penalty":0.0,"repetition_penalty":1.0,"logit_bias":[],"json_schema":null,"regex":null,"ebnf":null,"max_tokens":256,"min_tokens":0,"stop_token_ids":[0],"ignore_eos":false,"stop":[],"seed":null}',1700000000.0,1700000001.0,NULL);
INSERT INTO "turns" VALUES(6,3,'dropped-t1','dropped-c0',7,NULL,X'010000000200000003000000','[{"role":"user","content":"what is 2 + 2?"}]','{"temperature":1.0,"top_p":1.0,"top_k":-1,"min_p":0.0,"frequency_penalty":0.0,"presence_penalty":0.0,"repetition_penalty":1.0,"logit_bias":[],"json_schema":null,"regex":null,"ebnf":null,"max_tokens":256,"min_tokens":0,"stop_token_ids":[0],"ignore_eos":false,"stop":[],"seed":null}',1700000002.0,1700000003.0,NULL);
INSERT INTO "turns" VALUES(7,4,'waiting-t0',NULL,0,'new_conversation',X'010000000200000003000000','[{"role":"user","content":"what is 2 + 2?"}]','{"temperature":1.0,"top_p":1.0,"top_k":-1,"min_p":0.0,"frequency_penalty":0.0,"presence_penalty":0.0,"repetition_penalty":1.0,"logit_bias":[],"json_schema":null,"regex":null,"ebnf":null,"max_tokens":256,"min_tokens":0,"stop_token_ids":[0],"ignore_eos":false,"stop":[],"seed":null}',1700000000.0,1700000001.0,NULL);
INSERT INTO "turns" VALUES(8,4,'waiting-t1','waiting-c0',7,NULL,X'010000000200000003000000','[{"role":"user","content":"what is 2 + 2?"}]','{"temperature":1.0,"top_p":1.0,"top_k":-1,"min_p":0.0,"frequency_penalty":0.0,"presence_penalty":0.0,"repetition_penalty":1.0,"logit_bias":[],"json_schema":null,"regex":null,"ebnf":null,"max_tokens":256,"min_tokens":0,"stop_token_ids":[0],"ignore_eos":false,"stop":[],"seed":null}',1700000002.0,1700000003.0,NULL);
INSERT INTO "turns" VALUES(9,5,'eval-t0',NULL,0,'new_conversation',X'010000000200000003000000','[{"role":"user","content":"what is 2 + 2?"}]','{"temperature":1.0,"top_p":1.0,"top_k":-1,"min_p":0.0,"frequency_penalty":0.0,"presence_penalty":0.0,"repetition_penalty":1.0,"logit_bias":[],"json_schema":null,"regex":null,"ebnf":null,"max_tokens":256,"min_tokens":0,"stop_token_ids":[0],"ignore_eos":false,"stop":[],"seed":null}',1700000000.0,1700000001.0,NULL);
INSERT INTO "turns" VALUES(10,5,'eval-t1','eval-c0',7,NULL,X'010000000200000003000000','[{"role":"user","content":"what is 2 + 2?"}]','{"temperature":1.0,"top_p":1.0,"top_k":-1,"min_p":0.0,"frequency_penalty":0.0,"presence_penalty":0.0,"repetition_penalty":1.0,"logit_bias":[],"json_schema":null,"regex":null,"ebnf":null,"max_tokens":256,"min_tokens":0,"stop_token_ids":[0],"ignore_eos":false,"stop":[],"seed":null}',1700000002.0,1700000003.0,NULL);
INSERT INTO "turns" VALUES(11,6,'forked-t0',NULL,0,'new_conversation',X'010000000200000003000000','[{"role":"user","content":"what is 2 + 2?"}]','{"temperature":1.0,"top_p":1.0,"top_k":-1,"min_p":0.0,"frequency_penalty":0.0,"presence_penalty":0.0,"repetition_penalty":1.0,"logit_bias":[],"json_schema":null,"regex":null,"ebnf":null,"max_tokens":256,"min_tokens":0,"stop_token_ids":[0],"ignore_eos":false,"stop":[],"seed":null}',1700000000.0,1700000001.0,NULL);
INSERT INTO "turns" VALUES(12,6,'forked-t1','forked-c0',5,NULL,X'010000000200000003000000','[{"role":"user","content":[{"type":"text","text":"what is it?"},{"type":"image_url","image_url":{"url":"sha256:92b2fa58028958317e408bd84ecfa70f5ee35b121991dbc232c49d166353708b"}}]}]','{"temperature":0.7,"top_p":0.9,"top_k":20,"min_p":0.1,"frequency_penalty":0.5,"presence_penalty":0.25,"repetition_penalty":1.5,"logit_bias":[[5,-1.0]],"json_schema":null,"regex":"[0-9]+","ebnf":null,"max_tokens":8,"min_tokens":0,"stop_token_ids":[0,2],"ignore_eos":false,"stop":["END"],"seed":3}',1700000002.0,1700000003.0,'[["92b2fa58028958317e408bd84ecfa70f5ee35b121991dbc232c49d166353708b",1,2]]');
INSERT INTO "turns" VALUES(13,7,'unpaid-t0',NULL,0,'new_conversation',X'010000000200000003000000','[{"role":"user","content":"what is 2 + 2?"}]','{"temperature":1.0,"top_p":1.0,"top_k":-1,"min_p":0.0,"frequency_penalty":0.0,"presence_penalty":0.0,"repetition_penalty":1.0,"logit_bias":[],"json_schema":null,"regex":null,"ebnf":null,"max_tokens":256,"min_tokens":0,"stop_token_ids":[0],"ignore_eos":false,"stop":[],"seed":null}',1700000000.0,1700000001.0,NULL);
INSERT INTO "turns" VALUES(14,8,'open-t0',NULL,0,'new_conversation',X'010000000200000003000000','[{"role":"user","content":"what is 2 + 2?"}]','{"temperature":1.0,"top_p":1.0,"top_k":-1,"min_p":0.0,"frequency_penalty":0.0,"presence_penalty":0.0,"repetition_penalty":1.0,"logit_bias":[],"json_schema":null,"regex":null,"ebnf":null,"max_tokens":256,"min_tokens":0,"stop_token_ids":[0],"ignore_eos":false,"stop":[],"seed":null}',1700000000.0,1700000001.0,NULL);
CREATE INDEX session_of_key ON sessions (key_hash);
CREATE INDEX completions_of_turn ON completions (turn);
CREATE INDEX leases_of_step ON leases (step);
COMMIT;
