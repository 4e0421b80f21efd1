"""A Slurm cluster of one node that is this machine: munged, slurmctld and slurmd, started and ended by a test."""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from waiting import free_port, is_running, until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # where Debian has the daemons

# `high` preempts `low`, whose jobs then have GRACE_S to end by themselves.
GRACE_S = 120
_CONF = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MpiDefault=none
JobRequeue=1
KillWait=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=low Nodes={host} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s} State=UP
PartitionName=high Nodes={host} PriorityTier=10 PreemptMode=OFF State=UP
"""


def why_not() -> str | None:
    """Why there can be no such cluster here, or None."""
    if missing := [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]:
        return f"{', '.join(missing)} not found; on Debian: apt install slurm-wlm munge"
    return None if os.geteuid() == 0 else "the daemons of this cluster need root"


class Cluster:
    """The running cluster."""

    def __init__(self, folder: Path):
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _PATH}

    def run(self, *command: object) -> str:
        """What a command of Slurm prints."""
        words = list(map(str, command))
        return subprocess.run(words, check=True, capture_output=True, text=True, env=self.environment).stdout.strip()

    def submit(self, *command: object) -> str:
        """The number of a job."""
        return self.run("sbatch", "--parsable", *command)

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        words = self.run("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, number: str) -> str:
        """Such as RUNNING."""
        return self.job(number)["JobState"]


@contextmanager
def real_slurm(folder: Path) -> Iterator[Cluster]:
    """Start the cluster in a folder, whose path must be short, since it has a socket."""
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    (folder / "slurm.conf").write_text(
        _CONF.format(
            host=socket.gethostname().partition(".")[0],
            folder=folder,
            ports=(free_port(), free_port()),
            cpus=os.cpu_count(),
            grace_s=GRACE_S,
        )
    )
    cluster = Cluster(folder)
    munge = [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed", "key")]
    try:
        try:
            cluster.run("munged", "--force", f"--socket={folder}/munge.socket", *munge)
            cluster.run("slurmctld")
            cluster.run("slurmd")
            until(lambda: "idle" in cluster.run("sinfo", "--noheader", "--format=%T"), timeout_s=60, every_s=0.2)
        except (subprocess.CalledProcessError, AssertionError) as error:
            pytest.skip(f"Slurm is installed but does not start here: {error} {getattr(error, 'stderr', '')}")
        try:
            yield cluster
        finally:
            cluster.run("scancel", "--user=root")
            until(lambda: not cluster.run("squeue", "--noheader"), timeout_s=60, every_s=0.2)
    finally:
        for name in ("slurmd", "slurmctld", "munge"):
            with suppress(OSError, ValueError):
                pid = int((folder / f"{name}.pid").read_text())
                os.kill(pid, signal.SIGTERM)
                until(lambda pid=pid: not is_running(pid), timeout_s=30)
