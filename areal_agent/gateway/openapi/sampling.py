"""How an agent's call may ask to be sampled, and what it may say without being heard or without getting it."""

from areal_agent.gateway.openapi.parts import JsonSchema, integer, list_of, nullable, number, one_of, optional, text

_MAX_INT = 2**31 - 1

SAMPLING: dict[str, JsonSchema] = optional(
    n=integer(1, 128),
    stop={"anyOf": [text(1), list_of(text(1), maxItems=16)]},
    seed=integer(-(2**63), 2**63 - 1),
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
    },
    max_tokens=integer(1, _MAX_INT),
    stream={"type": "boolean"},
    stream_options={"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
    return_token_ids={"type": "boolean"},
)
"""What both kinds of turn understand; what is left out is as the session said, or the model's own."""

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
    name: nullable(one_of(*values)) | {"description": "Not supported: any other value is refused."}
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
