#!/usr/bin/env bash
# Correctness, time and memory on one GPU: bench/gpu.py, docs/gpu.md.
#   bench/gpu.sh quick      less than four minutes
#   bench/gpu.sh full       quick, and the tables of docs/benchmarks.md
# With --tiny either is tried on a CPU. PYTHON is the interpreter (torch 2.11 and transformers 5.17 or newer, no network;
# that of `make setup` where it is there), COHORT_VLLM_PYTHON that of an environment with vLLM. The result is gpu.json in $OUT, or in ./gpu-results.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
if [ -z "${PYTHON:-}" ]; then
  if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi
visible=${CUDA_VISIBLE_DEVICES-0}
export CUDA_VISIBLE_DEVICES="${visible%%,*}"  # the first of several
exec "$PYTHON" bench/gpu.py --out "${OUT:-gpu-results}" "$@"
