"""A real vLLM server as an engine. Written for 0.32.0, and tested against its build for CPUs.

    server.py      `VllmServer`: one server, as `foreign/` wants it
    dialect.py     how it is asked for a completion      sampling.py  how that is sampled, in vLLM's words
    answer.py      reads the events of an answer
    loader.py      lets it load weights      receiver.py  lets it take them from the trainer
    info.py        what it says of itself
    launcher.py    runs in vLLM's own environment: starts its server      worker_extension.py  which its workers import

The client, its requests, its weights and the model behind it: `foreign/`. vLLM's own ways are known here alone.
No torch.
"""

from pathlib import Path

VLLM_LAUNCHER = Path(__file__).with_name("launcher.py")
"""Run it with the Python of vLLM's environment; arguments are those of `vllm serve`."""

ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Of adapters, as vLLM makes room for them."""
