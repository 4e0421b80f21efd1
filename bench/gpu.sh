#!/usr/bin/env bash
# Correctness, time and memory on one GPU: bench/gpu.py, docs/gpu.md.
#   bench/gpu.sh quick      less than four minutes
#   bench/gpu.sh full       quick, and the tables of docs/benchmarks.md
# With --tiny either is tried on a CPU. PYTHON is the interpreter (torch 2.11 and transformers 5.17 or newer, no network);
# COHORT_VLLM_PYTHON that of an environment with vLLM. The result is gpu.json in $OUT, or in ./gpu-results.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" bench/gpu.py "$@" --out "${OUT:-gpu-results}"
