#!/usr/bin/env bash
# Correctness, time and memory on one GPU: bench/gpu.py, docs/gpu.md.
#   bench/gpu.sh check      only whether all packages are here
#   bench/gpu.sh quick      5 to 7 minutes on a large GPU (an estimate)
#   bench/gpu.sh full       quick, larger steps, and the tables of docs/benchmarks.md
#   bench/gpu.sh wheels     packages for a machine without a network: bench/gpu_packages.py --help
# With --tiny either is tried on a CPU. PYTHON is the interpreter (torch and Cohort's dependencies, no network; that of
# `make setup` where it is there), COHORT_VLLM_PYTHON that of an environment with vLLM. The result is gpu.json in $OUT,
# or in ./gpu-results, to which later calls add theirs, and gpu.tar with all files of that folder.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
if [ -z "${PYTHON:-}" ]; then
  if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi
case "${1:-}" in
  check | wheels) exec "$PYTHON" bench/gpu_packages.py "$@" ;;
  *) "$PYTHON" bench/gpu_packages.py check ;;
esac
visible=${CUDA_VISIBLE_DEVICES-0}
export CUDA_VISIBLE_DEVICES="${visible%%,*}"  # the first of several
exec "$PYTHON" bench/gpu.py --out "${OUT:-gpu-results}" "$@"
