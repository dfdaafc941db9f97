#!/usr/bin/env bash
# Makes the image that the tasks build upon: the sandboxes' default image with Codex, one static program, in /usr/local/bin.
# Needs npm (on this machine only), docker, and `python -m sandboxes image` once. An image that is there is left as it is.
set -euo pipefail
version=0.169.0
image=areal-agent-codex:$version
docker image inspect "$image" > /dev/null 2>&1 && exit 0
case $(uname -m) in aarch64) platform=linux-arm64 ;; *) platform=linux-x64 ;; esac

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm pack --silent --pack-destination "$folder" "@openai/codex@$version-$platform" > /dev/null
tar -xzf "$folder"/*.tgz -C "$folder" --wildcards --strip-components 4 "package/vendor/*/bin/codex" "package/vendor/*/rg"
printf 'FROM areal-agent-sandbox:latest\nCOPY codex rg /usr/local/bin/\n' > "$folder/Dockerfile"
rm "$folder"/*.tgz
docker build --quiet --network none --tag "$image" "$folder"
