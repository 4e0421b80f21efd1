#!/usr/bin/env bash
# Correctness and throughput on one GPU, in less than ten minutes: bench/gpu.py. `bench/gpu.sh --tiny` tries all of it on
# a CPU, and `bench/gpu.sh --modes` measures the keys of docs/memory.md instead. PYTHON is the interpreter (torch 2.11
# and transformers 5.17 or newer, no network); results go to $OUT, or to ./gpu-results.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
if [ "${1:-}" = --modes ]; then
  mkdir -p "${OUT:-gpu-results}"
  exec "${PYTHON:-python3}" bench/modes.py --json "${OUT:-gpu-results}/modes.json" "${@:2}"
fi
exec "${PYTHON:-python3}" bench/gpu.py --out "${OUT:-gpu-results}" "$@"
