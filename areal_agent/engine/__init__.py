"""Inference engines: token ids in, sampled token ids with log-probabilities and weight versions out.

    config.py   the section `engine`
    limits.py   what an engine can serve, checked before a request is sent and again before it is run
    wire/       our records as SGLang's JSON and back; the one encoding that client and server share
    fields.py   reading JSON fields strictly
    http.py     `HttpEngine`: the client of any server on that wire
    transport.py HTTP to one server: what is sent, what comes back, and what failed
    pushes.py   begin, send, commit or abort: the pushes of weights that one engine takes
    stored_weights.py a stored set of weights, taken into memory and proved
    fake.py     `FakeEngine`: scripted, deterministic, in this process; for tests, of users too
    fake_row.py one request of the scripted engine      fake_faults.py  what can be made to go wrong with it
    fake_weights.py its weights, of which only the digests count
    virtual_clock.py a clock that goes when a test says so
    fleet/      several servers as one engine, whichever kind they are
    foreign/    the client of servers that are not ours: SGLang's (sglang/) and vLLM's (vllm/)
    embedded/   the engine that we bring: a server on that wire, on transformers' model code
    __main__.py `python -m areal_agent.engine`: the embedded engine as a process

`HttpEngine` and `FakeEngine` are `protocols.Engine`. torch is imported only in `embedded/`.
"""
