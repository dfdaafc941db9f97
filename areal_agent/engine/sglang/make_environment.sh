#!/usr/bin/env bash
# Makes an environment with SGLang 0.5.23 for CPUs: 3.5 GB, several minutes. The command for it is
# `python -m areal_agent.engine.environment sglang DIR`; slow tests take AREAL_AGENT_SGLANG_PYTHON=DIR/bin/python.
set -euo pipefail
dir=${1:?usage: make_environment.sh DIR}
[ -e "$dir/.made" ] && exit 0
[ -x "$dir/bin/python" ] || "${PYTHON:-python3}" -m venv "$dir"
pip=("$dir/bin/python" -m pip install -q --disable-pip-version-check)
"${pip[@]}" -U pip wheel setuptools
"${pip[@]}" torch==2.13.0
"${pip[@]}" --no-deps sglang==0.5.23
# What its path on a CPU imports; that the parts for GPUs are missing, which pip complains of, does not matter there.
"${pip[@]}" aiohttp 'anthropic>=0.20.0' blobfile==3.0.0 compressed-tensors==0.18.0 datasets distro easydict einops \
    fastapi gguf httpx interegular IPython 'llguidance>=1.7.6,<2' 'mistral_common>=1.11.5' modelscope msgspec ninja \
    numba==0.65.1 numpy nvidia-ml-py openai==2.8.0 openai-harmony==0.0.4 orjson outlines==0.1.11 packaging \
    partial_json_parser pillow 'prometheus-client>=0.20.0' psutil py-spy pybase64 pydantic 'python-dateutil<3' \
    python-multipart 'pyzmq>=25.1.2' regex requests scipy sentencepiece==0.2.1 setproctitle soundfile==0.13.1 tiktoken \
    tokenizers==0.23.2 tqdm transformers==5.19.0 'uvicorn>=0.51' uvloop watchfiles xgrammar==0.2.7 xxhash zstandard
"${pip[@]}" --no-deps torchvision==0.28.0 timm==1.0.25 # only the Python parts of torchvision load
touch "$dir/.made"
