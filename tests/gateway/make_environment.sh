#!/usr/bin/env bash
# Makes an environment with the clients whose pins clash with ours (openai 3, anthropic, openai-agents), for
# test_official_agents.py, and a folder `openai-3` with openai alone, which PYTHONPATH puts before our openai 2.
# Usage: make_environment.sh DIR; then AREAL_AGENT_CLIENTS_PYTHON=DIR/bin/python. A finished one is left as it is.
set -euo pipefail
dir=${1:?usage: make_environment.sh DIR}
[ -e "$dir/.made" ] && exit 0
[ -x "$dir/bin/python" ] || python3 -m venv "$dir"
pip=("$dir/bin/python" -m pip install -q --disable-pip-version-check)
"${pip[@]}" openai==3.54.0 anthropic==2.12.0 openai-agents==0.24.0
"${pip[@]}" --no-deps --target "$dir/openai-3" openai==3.54.0
touch "$dir/.made"
