"""The OpenAI-compatible HTTP in front of the engine: agents speak text, the ledger gets every token.

::

    app.py           the routes: who may call what, and how an answer leaves
    auth.py          keys                              callers.py       whose key it is
    about.py         models, health, metrics           replies.py       JSON answers and OpenAI's error objects
    chat.py          /v1/chat/completions, its body and its answer
    conversation.py  messages and tools of a body      sampling.py      temperature, max_tokens ... of a body
    fields.py        reading decoded JSON strictly     control.py       bodies of /rl/*
    session.py       one rollout's conversation: the one mutable noun
    calls.py         its engine requests in flight
    sessions.py      all of them, by id and by key     stats.py         what the gateway counts
    traffic.py       who may come in                   closing.py       silent sessions, and the end of the gateway
    serve.py         the listening socket              connection.py    one client's connection
    hosts.py         Host and Origin                   bodies.py        the JSON of a request
    limits.py        all bounds                        metrics.py       /metrics
    openapi/         /openapi.json

A turn on its way: `app` finds the session by its key, `chat` reads the body, `session` places it in its forest
(`tokens.tree`), asks the engine, appends the turn to the journal, and only then lets the answer leave.
"""
