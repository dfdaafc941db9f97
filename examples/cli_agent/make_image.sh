#!/usr/bin/env bash
# Makes the image that the tasks build upon: the sandboxes' default image with Codex, one static program, in /usr/local/bin.
# Needs npm (on this machine only), docker, and `python -m sandboxes image` once. An image that is there is left as it is.
set -euo pipefail
version=0.171.0
image=areal-agent-codex:$version
programs=${XDG_CACHE_HOME:-$HOME/.cache}/areal_agent/clis
"$(dirname "$0")/fetch.sh" "codex@$version" "$programs"
docker image inspect "$image" > /dev/null 2>&1 && exit 0

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
printf 'FROM areal-agent-sandbox:latest\nCOPY codex rg /usr/local/bin/\n' > "$folder/Dockerfile"
tar -c -C "$folder" Dockerfile -C "$programs" codex rg | docker build --quiet --network none --tag "$image" -
