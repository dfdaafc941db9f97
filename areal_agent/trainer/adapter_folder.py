"""Adapters as a folder in the format of PEFT, which transformers, SGLang and vLLM load beside the model they are for.

    adapter_config.json, adapter_model.safetensors

It knows names and numbers, not how adapters are trained.
"""

from collections.abc import Mapping
from pathlib import Path

import orjson
from safetensors.torch import save_file
from torch import Tensor

from areal_agent.trainer.config import LoraConfig

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What PEFT writes in front of the names that matrices have in the model."""


def write_adapter(folder: Path, matrices: Mapping[str, Tensor], config: LoraConfig, base: Path) -> None:
    """Make `folder`: the matrices by their names in the model, `...q_proj.lora_A.weight`, in one piece."""
    folder.mkdir()
    named = {PREFIX + name: one.detach().to("cpu").contiguous() for name, one in matrices.items()}
    save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(config.target_modules),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / CONFIG).write_bytes(orjson.dumps(fields, option=orjson.OPT_INDENT_2))
