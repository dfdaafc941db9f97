"""An HTTP gateway with OpenAI's and Anthropic's APIs in front of an engine. Its ledger records every token.

::

    app.py            the routes, and how an answer is sent: whole or as a stream
    auth.py           the keys of sessions and of the gateway's owner; the Host and Origin headers
    bodies.py         reading and refusing JSON bodies; the gateway's limits
    images.py         images out of the bodies of every protocol, into the run's folder
    order.py          what a request asks for, whichever protocol it came in
    chat.py           /v1/chat/completions: its body and its answer
    conversation.py   the conversation of every protocol: its messages, and placing it
    tools.py          its tools, their schemas, and how an answer may use them
    completions.py    /v1/completions: its body and its answer
    responses.py      /v1/responses, what comes in: its body, and items as messages
    responses_answer.py   what goes out: items, events, and the responses that are kept
    messages.py       /v1/messages, Anthropic's protocol: its body and its answer
    session.py        one rollout's conversation, the gateway's main mutable object; the bodies of /rl/*
    turn.py           one turn: placing the prompt, sampling, recording
    draft.py          one answer while it is sampled: stop texts, tool calls, what a stream sends
    answers.py        finished answers, and the engine requests and deliveries of a session
    rollouts.py       the handlers of /rl/* and /export_trajectories
    sessions.py       all sessions: look-up, limits, timeouts, draining
    server.py         the listening socket, its connections, JSON replies and error objects
    metrics.py        counters and /metrics
    openapi.py        /openapi.json, /health and the model list
    online/           leasing finished rollouts to a trainer that runs elsewhere
    engine_servers.py connecting to engines that are already running
    __main__.py       the gateway as a program of its own (`python -m areal_agent.gateway`)

The path of a turn: `app` finds the session by its key, `chat`, `completions`, `responses` or `messages` reads the body,
`session` places the prompt in its forest (`tokens.forest`), `turn` samples it and appends the turn to the journal, and
`app` sends the answer. A stream sends text as it is sampled, but its finish reason only after the journal has the turn.
"""
