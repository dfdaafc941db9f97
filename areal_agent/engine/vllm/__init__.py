"""A real vLLM server as an engine. Written for 0.32.0, and tested against its build for CPUs.

    server.py            `VllmServer`, the `foreign.server.ForeignServer` of one server
    launcher.py          starts vLLM's server, in vLLM's own environment
    worker_extension.py  runs in vLLM's workers, in the same environment
    image_files.py       runs in vLLM's front end, in the same environment

Everything that SGLang shares is in `foreign/`.
"""

from pathlib import Path

VLLM_LAUNCHER = Path(__file__).with_name("launcher.py")
"""Run it with the Python of vLLM's environment; it takes the arguments of `vllm serve`."""

ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The adapter ranks that vLLM can reserve room for."""
