"""The engine that comes with areal_agent: continuous batching on transformers' model code, on SGLang's wire.

    server.py       aiohttp: requests and commands in, answers out (streaming.py: in events); no torch
       │  commands            ▲ futures; token_stream.py: tokens as they are sampled
       ▼                      │
    scheduler.py    the model thread: drains commands between steps
       ▼
    workload.py     the rows and one step of them: admit, prefill in chunks, decode, stamp versions
       │               row.py: one request and what it has so far     prefix_cache.py: what can be begun with
       │               counts.py, latency.py: what it has done, for metrics.py
       ├─▶ model_runner.py   token ids to logits      decoder.py: the forward pass     attention.py, kv_cache.py: where
       │                     keys and values lie      kv_room.py: how many of them    model_files.py: what can be loaded
       ├─▶ slot_store.py     which of them running rows have, and which are kept for others
       ├─▶ batch.py          how its rows sample
       │      adjustments.py  penalties and biases of logits     grammar.py  which tokens may come next
       │      sampler.py  logits to tokens and log-probabilities
       └─▶ weights.py        reads and proves a new set of weights, then copies it in place; model_weights.py: in pushes

One thread owns the model, the KV cache and all rows; everything else talks to it through its queue.
"""
