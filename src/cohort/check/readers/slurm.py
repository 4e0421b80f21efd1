"""What a script asks Slurm for: `#SBATCH` lines, which sbatch reads up to the first command."""

import re
from dataclasses import dataclass, replace

from cohort.check.launch import Launch, Said
from cohort.plan.hardware import GPUS

_LINE = re.compile(r"#SBATCH[ \t]+(.+)")
_OPTION = re.compile(r"(--[a-z-]+|-[NGC])(?:=|[ \t]+)?([^\s#]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Nodes and GPUs of a job, as far as the script says."""

    nodes: int | None = None
    gpus_per_node: Said | None = None
    gpu: str | None = None  # by the name that `cohort plan` has for it

    def variables(self) -> dict[str, str]:
        """What Slurm sets in the job's environment."""
        nodes = dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), self.nodes)
        each = self.gpus_per_node.value if self.gpus_per_node else None
        gpus = dict.fromkeys(("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), each)
        return {name: str(value) for name, value in {**nodes, **gpus}.items() if value is not None}


def read_job(text: str) -> Job:
    """The options of a script; none where it has no such lines."""
    said: dict[str, tuple[str, int]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.startswith("#"):
            break
        match = _LINE.match(line)
        for name, value in _OPTION.findall(match[1]) if match else ():
            said[{"-N": "--nodes", "-G": "--gpus", "-C": "--constraint"}.get(name, name)] = (value, number)
    nodes = _whole(said.get("--nodes", ("", 0))[0].partition("-")[0])
    found: Said | None = None
    kind = said.get("--constraint", ("", 0))[0]
    for name, share in (("--gpus", nodes or 1), ("--gres", 1), ("--gpus-per-node", 1)):
        value, number = said.get(name, ("", 0))
        wanted = next((part for part in value.split(",") if name != "--gres" or part.startswith("gpu:")), "")
        type_, count = _gpus(wanted.removeprefix("gpu:"))
        if count is not None and count % share == 0:
            found, kind = Said(count // share, f"line {number}: #SBATCH {name}={value}"), type_ or kind
    return Job(nodes=nodes, gpus_per_node=found, gpu=_known(kind))


def on_job(launch: Launch, job: Job) -> Launch:
    """The launch with what its script asks for, where its commands do not say."""
    if job.gpus_per_node is None:
        return launch
    processes = launch.processes
    told = not any(unread.key == "(recipe)" for unread in launch.unread)  # otherwise the nodes come with the recipe
    if told and processes is None and launch.framework in ("trl", "open-r1"):
        processes = Said((job.nodes or 1) * job.gpus_per_node.value, job.gpus_per_node.where)
    others = tuple(on_job(other, job) for other in launch.others)
    return replace(launch, processes=processes, node_gpus=job.gpus_per_node, gpu=job.gpu, others=others)


def _gpus(text: str) -> tuple[str, int | None]:
    """Kind and number of `h100:8`, `8` or `h100`."""
    kind, _, count = text.rpartition(":")
    return kind, _whole(count)


def _whole(text: str) -> int | None:
    return int(text) if text.isdecimal() and 0 < int(text) < 100_000 else None


def _known(kind: str) -> str | None:
    """The GPU that a site's name for it contains, such as nvidia_h100_80gb."""
    words = re.split(r"[^a-z0-9]+", kind.lower())
    return next((gpu for gpu in GPUS if gpu in words), None)
