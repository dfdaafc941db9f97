"""The OpenAI-compatible HTTP in front of the engine: agents speak text, the ledger gets every token.

::

    app.py           the routes: who may call what, and how an answer leaves
    auth.py          keys                              callers.py       whose key it is
    about.py         models, health, metrics           replies.py       JSON answers and OpenAI's error objects
    endpoints/       /v1/chat/completions and /v1/completions: what their bodies say, how their answers look
    fields.py        what defines a JSON body          control.py       bodies of /rl/*
    sampling.py      temperature, max_tokens ...       delivery.py      how an answer leaves, whole or streamed
    session.py       one rollout's conversation: the one mutable noun
    turns/           its turns, from the prompt's place to the record
    rewards.py       what it has earned                services.py      what all sessions share
    sessions.py      all of them, by id and by key     stats.py         what the gateway counts
    traffic.py       who may come in                   closing.py       silent sessions, and the end of the gateway
    serve.py         the listening socket              connection.py    one client's connection
    hosts.py         Host and Origin                   bodies.py        the JSON of a request
    limits.py        all bounds                        metrics.py       /metrics
    openapi.py       /openapi.json, from those definitions

A turn on its way: `app` finds the session by its key, `endpoints` reads the body, `session` places it in its forest
(`tokens.tree`), `turns` asks the engine and appends the turn to the journal, and `delivery` lets the answer leave: the
text of a stream at once, that it is finished only when the journal has it.
"""
