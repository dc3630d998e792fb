#!/bin/sh
# Measure and photograph the report that docs/benchmarks.md shows: needs `coldblock` and chromium on the PATH.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
coldblock bench jitter --engine-flags='--threads 1' --out "$folder"
chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1280,1960 \
    --screenshot="$(dirname "$0")/report.png" "file://$folder/bench-jitter.html"
