"""Our records as the JSON of SGLang's native HTTP API, and back: the subset that client and embedded server share.

    generate.py   `/generate`: a request, and its answer in one piece
    stream.py     the same answer in events, as it is sampled
    sampling.py   `sampling_params`
    tokens.py     what is said of every token: log-probability, likeliest tokens
    versions.py   weight versions, and the spans of tokens that they sampled
    control.py    abort, pause, continue
    weights.py    weight updates in one call
    distributed_weights.py  weights that the trainer sends by torch.distributed
    pushes.py     the same in a push: begin, send, commit, abort
    memory.py     the memory of keys and values, released and resumed
    info.py       what an engine says of itself
    failure.py    what an engine says when it cannot

It knows neither sockets nor models. Reading is strict in both directions: a field that is missing, of the wrong type
or unknown raises `WireError`, never becomes a default. The one exception is `/server_info`, of which SGLang says less.
"""

from areal_agent.engine.wire.control import (
    ABORT_REQUEST,
    CONTINUE_GENERATION,
    HEALTH,
    METRICS,
    MODEL_INFO,
    PAUSE_GENERATION,
    RELEASE_MEMORY,
    RESUME_MEMORY,
    SERVER_INFO,
    EngineStats,
    Pause,
    check_memory,
    decode_abort,
    decode_continue,
    decode_info,
    decode_pause,
    decode_stats,
    encode_abort,
    encode_continue,
    encode_info,
    encode_memory,
    encode_pause,
)
from areal_agent.engine.wire.fields import Failure, decode_failure, encode_failure
from areal_agent.engine.wire.generate import (
    GENERATE,
    MAX_SEED,
    STREAM_END,
    EventSplitter,
    GenerateCall,
    ResultReader,
    decode_call,
    decode_event,
    decode_result,
    encode_chunk,
    encode_event,
    encode_request,
    encode_result,
)
from areal_agent.engine.wire.weights import (
    ABORT_PUSH,
    BEGIN_PUSH,
    COMMIT_PUSH,
    SEND_PUSH,
    UPDATE_FROM_DISK,
    UPDATE_FROM_SHARED_MEMORY,
    PushCommit,
    PushSend,
    WeightUpdate,
    decode_disk_update,
    decode_push,
    decode_push_commit,
    decode_push_send,
    decode_shared_memory_update,
    encode_push,
    encode_push_commit,
    encode_push_send,
    encode_update,
)

__all__ = [
    "ABORT_PUSH",
    "ABORT_REQUEST",
    "BEGIN_PUSH",
    "COMMIT_PUSH",
    "CONTINUE_GENERATION",
    "GENERATE",
    "HEALTH",
    "MAX_SEED",
    "METRICS",
    "MODEL_INFO",
    "PAUSE_GENERATION",
    "RELEASE_MEMORY",
    "RESUME_MEMORY",
    "SEND_PUSH",
    "SERVER_INFO",
    "STREAM_END",
    "UPDATE_FROM_DISK",
    "UPDATE_FROM_SHARED_MEMORY",
    "EngineStats",
    "EventSplitter",
    "Failure",
    "GenerateCall",
    "Pause",
    "PushCommit",
    "PushSend",
    "ResultReader",
    "WeightUpdate",
    "check_memory",
    "decode_abort",
    "decode_call",
    "decode_continue",
    "decode_disk_update",
    "decode_event",
    "decode_failure",
    "decode_info",
    "decode_pause",
    "decode_push",
    "decode_push_commit",
    "decode_push_send",
    "decode_result",
    "decode_shared_memory_update",
    "decode_stats",
    "encode_abort",
    "encode_chunk",
    "encode_continue",
    "encode_event",
    "encode_failure",
    "encode_info",
    "encode_memory",
    "encode_pause",
    "encode_push",
    "encode_push_commit",
    "encode_push_send",
    "encode_request",
    "encode_result",
    "encode_update",
]
