"""The embedded engine: continuous batching on transformers' model code, served on SGLang's wire.

    server.py       aiohttp: requests in, answers out, also as events; no model code
       │  commands            ▲ futures; tokens of streamed requests as they are sampled
       ▼                      │
    scheduler.py    the model thread: obeys commands between steps; its numbers for Prometheus
       ▼
    workload.py     the rows and their steps: admit, prefill in chunks, decode, stamp weight versions
       ├─▶ model.py      token ids to logits
       │      loading.py     checks a model folder and loads it
       │      weights.py     reads new weights, proves that they fit, and copies them in place
       │      decoder.py     the forward pass and its attention
       │      packed.py      attention of many prompts in one call of a kernel, on a GPU
       │      fixed_shapes.py  decode steps that a GPU replays as graphs
       │      kv_cache.py    slots of keys and values, the prefix cache, and the room that they share
       │      transfer.py    weights as bytes over torch.distributed
       │      sharing.py     weights in memory of the trainer's that the engine opens
       └─▶ sampler.py    penalties, biases and grammars; logits to tokens and log-probabilities

One thread owns the model, the KV cache and all rows; everything else talks to it through its queue.
"""
