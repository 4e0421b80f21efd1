"""A cluster that is this machine: Slurm's commands and `cohort`, made up, for the scripts of `cohort launch slurm`."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from waiting import PATIENCE_S

FAKE_SCONTROL = """#!/bin/bash
[ "$1 $2" = "show job" ] && exec echo "${JOB:-}"
[ "$1" = requeue ] && exec touch "$PROBE_DIR/requeued"
[ "$1 $2" = "show hostnames" ] || exit 1
case $3 in
    node[[]1-2]) printf 'localhost\\nnode2\\n' ;;
    node[[]1-4]) printf 'localhost\\nnode2\\nnode3\\nnode4\\n' ;;
    *) exit 1 ;;
esac
"""

# One process per node of the step, at the same time, which ends with all that it has started.
# HIDDEN_FROM_OTHERS is a path that only the first node can see.
FAKE_SRUN = """#!/bin/bash
num_nodes=$SLURM_JOB_NUM_NODES
while [[ $1 == --* ]]; do
    [[ $1 == --nodelist=* ]] && names=${1#*=} && IFS=, read -ra listed <<< "$names" && num_nodes=${#listed[@]}
    shift
done
pids=()
stop() {  # a process that has not come to `setsid` yet has no group
    stopped=1
    for pid in "${pids[@]}"; do kill -- "-$pid" 2> /dev/null || kill "$pid"; done
}
trap stop TERM
for (( node = 0; node < num_nodes; node++ )); do
    command=("$@")
    if (( node > 0 )) && [ -n "${HIDDEN_FROM_OTHERS:-}" ]; then
        command=("${command[@]//"$HIDDEN_FROM_OTHERS"//nowhere}")
    fi
    SLURM_NODEID=$node SLURM_PROCID=$node NAMES=${names:-} PET_LOCAL_ADDR=localhost setsid "${command[@]}" &
    pids+=($!)
done
[ -z "${stopped:-}" ] || stop  # what was started after the signal
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit $status
"""

# Stands in for cohort: a server that writes down what it is and stays, or that fails as SERVE_FAILS says. It
# writes the mode and the content of the job's secret file into `secrets`.
FAKE_COHORT = """#!/bin/bash
name=$SLURM_NODEID-${!#}
echo started >> "$PROBE_DIR/$name.starts"
[ -n "${SERVE_FAILS:-}" ] && exit "$SERVE_FAILS"
if [ "$(wc -l < "$PROBE_DIR/$name.starts")" == 1 ] && [ "$name" == 0-8000 ]; then exit 1; fi
secret=$PROBE_DIR/runs/a/.secret
printf '%s %s\\n' "$(stat -c %a "$secret")" "$(cat "$secret")" >> "$PROBE_DIR/secrets"
printf '%s\\n' "$NAMES" "${CUDA_VISIBLE_DEVICES:-}" "$@" > "$PROBE_DIR/servers/$name"
exec sleep 300
"""


def make_cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes that are this machine; in `folder`, which is the working directory."""
    tools = folder / "tools"
    tools.mkdir()
    for name, text in {"scontrol": FAKE_SCONTROL, "srun": FAKE_SRUN, "cohort": FAKE_COHORT}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (folder / "found").mkdir()
    (folder / "servers").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(folder),
        "PROBE_DIR": str(folder),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_ON_NODE": "6",
    }.items():
        monkeypatch.setenv(name, value)
    return folder


def run_script(text: str) -> subprocess.CompletedProcess[str]:
    """Run a script and, if it takes too long, end all that it started."""
    process = subprocess.Popen(
        ["bash", "-c", text], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # torchrun hands it on to its ranks
        try:
            output, _ = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        pytest.fail(f"not done after {PATIENCE_S:g} s; it said:\n{output}")
    return subprocess.CompletedProcess(process.args, process.returncode, output)
