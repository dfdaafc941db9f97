"""Adapters as a folder in the format of PEFT, which transformers, SGLang and vLLM load beside the model they are for.

It knows names and numbers, not how adapters are trained; what else a folder has is engine/foreign/adapters.py's.
"""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from areal_agent.engine.foreign.adapters import CONFIG, PREFIX, WEIGHTS, AdapterForm


def write_adapter(folder: Path, matrices: Mapping[str, Tensor], form: AdapterForm) -> None:
    """Fill `folder`: the matrices by their names in the model, `...q_proj.lora_A.weight`, in one piece, as they are."""
    named = {PREFIX + name: one.detach().to("cpu").contiguous() for name, one in matrices.items()}
    save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_bytes(form.encode())
