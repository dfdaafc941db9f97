"""How an agent's call may ask to be sampled, and what it may say without being heard or without getting it."""

from areal_agent.gateway.openapi.parts import (
    NAME,
    JsonSchema,
    closed_object,
    integer,
    list_of,
    number,
    one_of,
    optional,
)

_MAX_INT = 2**31 - 1

WISHES: dict[str, JsonSchema] = optional(
    temperature=number(0, 2),
    top_p={"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    top_k=integer(-1, _MAX_INT),
    min_p=number(0, 1),
    frequency_penalty=number(-2, 2),
    presence_penalty=number(-2, 2),
    repetition_penalty={"type": "number", "exclusiveMinimum": 0, "maximum": 2},
    logit_bias={
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": number(-100, 100),
        "maxProperties": 1024,
    },
    max_tokens=integer(1, _MAX_INT) | {"description": "Cut to the room that the context has left."},
)
"""What a session may say for all its turns, and each turn over that."""

SAMPLING: dict[str, JsonSchema] = WISHES | optional(
    n=integer(1, 128),
    stop={"anyOf": [NAME, list_of(NAME, maxItems=16)]},
    seed=integer(-(2**63), 2**63 - 1),
    stream={"type": "boolean"},
    stream_options=closed_object(optional(include_usage={"type": "boolean"}, include_obfuscation={"const": False})),
    return_token_ids={"type": "boolean"},
)
"""What both kinds of turn understand."""

IGNORED: dict[str, JsonSchema] = {
    name: {"description": "Says nothing about the answer: taken and not used."}
    for name in (
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
    )
}

REFUSED: dict[str, JsonSchema] = {
    name: one_of(None, *values) | {"description": "Not supported: any other value is refused."}
    for name, values in {
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "reasoning_effort": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "verbosity": ("medium",),
        "web_search_options": (),
    }.items()
}
