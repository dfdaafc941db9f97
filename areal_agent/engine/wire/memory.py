"""Releasing and resuming the memory of keys and values as JSON, and back: SGLang's paths, of its tags `kv_cache` alone.

POST /release_memory_occupation   {"tags"?: ["kv_cache"]}
POST /resume_memory_occupation    the same
"""

from typing import Any

from areal_agent.engine.fields import WireError, as_object, get, refuse_unknown

RELEASE_MEMORY = "/release_memory_occupation"
RESUME_MEMORY = "/resume_memory_occupation"

_TAGS = ["kv_cache"]


def encode_memory() -> dict[str, Any]:
    """The body of both."""
    return {"tags": _TAGS}


def check_memory(body: object, path: str) -> None:
    """Read it. Raises WireError for what is more than keys and values: weights stay where they are."""
    fields = as_object(body, "the body")
    refuse_unknown(fields, {"tags"}, path)
    tags = get({"tags": _TAGS, **fields}, "tags", list)
    if tags != _TAGS:
        raise WireError(f"tags is {tags!r:.80}; {path} takes {_TAGS}: of keys and values alone")
