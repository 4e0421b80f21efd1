"""Rules shared by frameworks: GPUs used twice or idle, evaluation, lengths, CISPO, vLLM without sleep."""

from collections.abc import Callable

from cohort.check.findings import Finding
from cohort.check.launch import Launch, Settings

_USUAL_SIZES = (8, 4, 2, 1)


def gpu_findings(
    launch: Launch, *, local_server: bool, remote_server: bool = False, takes_one_for_vllm: bool = False
) -> list[Finding]:
    """Overlap and idle GPUs.

    `local_server`: completions come from a server on this machine, which needs GPUs besides those that train.
    `remote_server`: they come from one on another machine, whose GPUs have the same numbers.
    `takes_one_for_vllm`: the trainer itself takes the GPU after its processes for vLLM (TRL before 0.16).
    """
    found: list[Finding] = []
    gpus, per_node = launch.training_gpus, launch.processes_per_node
    used = None if per_node is None else per_node + takes_one_for_vllm
    if gpus is not None and used is not None and used > len(gpus):
        what = f"{per_node} processes" + (" and one GPU for vLLM" if takes_one_for_vllm else "")
        found.append(
            Finding(
                "CHK012",
                "CUDA_VISIBLE_DEVICES",
                f"{what} need {used} GPUs, and CUDA_VISIBLE_DEVICES names {len(gpus)} ({', '.join(gpus)})",
                (f"{len(gpus) - takes_one_for_vllm} processes",) if len(gpus) > takes_one_for_vllm else (),
            )
        )
    rest = set((gpus or ())[used:]) - set(launch.server_gpus or ()) if used is not None else set()
    if gpus is not None and rest and not (local_server and launch.server_gpus is None):
        idle = ", ".join(gpu for gpu in gpus if gpu in rest)
        found.append(
            Finding(
                "CHK011",
                "CUDA_VISIBLE_DEVICES",
                f"{per_node} processes leave GPU {idle} of {len(gpus)} visible ones without work",
                (f"{len(gpus) - takes_one_for_vllm} processes",),
            )
        )
    both = set(gpus or ()) & set(launch.server_gpus or ()) if not remote_server else set()
    if both:
        free = [gpu for gpu in gpus or () if gpu not in both]
        found.append(
            Finding(
                "CHK012",
                "CUDA_VISIBLE_DEVICES",
                f"GPU {', '.join(sorted(both))} is given to training and to the sampling server",
                (f"CUDA_VISIBLE_DEVICES={','.join(free)} for training",) if free else (),
            )
        )
    return found


def node_gpu_findings(launch: Launch, *, server_elsewhere: bool) -> list[Finding]:
    """Processes of a node against the GPUs that the script asks Slurm for.

    `server_elsewhere`: completions come from a server, which may be what the other GPUs are for.
    """
    asked, per_node = launch.node_gpus, launch.processes_per_node
    if asked is None or per_node is None or launch.training_gpus is not None or per_node == asked.value:
        return []
    nearest = (f"{asked.value} processes", f"--gpus-per-node={per_node}")
    if per_node > asked.value:
        text = f"{per_node} processes on a node need as many GPUs, and it gets {asked.value} ({asked.where})"
        return [Finding("CHK012", "--gpus-per-node", text, nearest)]
    if server_elsewhere or launch.server or launch.server_gpus:
        return []
    idle = asked.value - per_node
    text = f"{per_node} processes on a node leave {idle} of its {asked.value} GPUs without work ({asked.where})"
    return [Finding("CHK011", "--gpus-per-node", text, nearest)]


def server_size_finding(launch: Launch, prefix: str) -> list[Finding]:
    """Whether the sampling server's parallel sizes fit the GPUs that it is given (`prefix` is that of its options)."""
    gpus = launch.server_gpus
    keys = (f"{prefix}tensor_parallel_size", f"{prefix}data_parallel_size")
    sizes = [str(launch.server[key].value) if key in launch.server else "1" for key in keys]
    if gpus is None or not all(size.isdecimal() for size in sizes):
        return []
    needed = int(sizes[0]) * int(sizes[1])
    shape = f"the server's tensor parallel {sizes[0]} x data parallel {sizes[1]}"
    if needed > len(gpus):
        text = f"{shape} needs {needed} GPUs and sees {len(gpus)}"
        fits = tuple(
            f"{key}={len(gpus) // int(other)}"
            for key, other in zip(keys, reversed(sizes), strict=True)
            if int(other) <= len(gpus)
        )
        return [Finding("CHK012", keys[0], text, fits)]
    if needed < len(gpus):
        idle = ", ".join(gpus[needed:])
        text = f"{shape} leaves GPU {idle} without work"
        return [Finding("CHK011", f"{prefix}data_parallel_size", text, (f"{prefix}data_parallel_size={len(gpus)}",))]
    return []


def counted(processes: int, kind: str = "process") -> str:
    """Return the count with its noun: `1 process`, `8 processes`."""
    return f"1 {kind}" if processes == 1 else f"{processes} {kind}es"


def evaluation_findings(
    launch: Launch, refusal: Callable[[int], str | None], *, per_device: int, generations: int, text: str
) -> list[Finding]:
    """An evaluation batch that would be refused if evaluation were on, with the file's or a usual number of processes.

    Args:
        launch: the run.
        refusal: the framework's message for a number of processes; None if it accepts the batch.
        per_device: completions per process.
        generations: completions per prompt.
        text: why the batch is not used now, and what would refuse it.
    """
    said = {"per_device_eval_batch_size", "num_generations_eval"} & set(launch.settings)
    sizes = (int(launch.processes.value),) if launch.processes else _USUAL_SIZES if said else ()
    for world_size in sizes:
        message = refusal(world_size) if world_size > 0 else None
        if message is not None:
            fits = [n for n in range(1, 4 * generations + 1) if n * world_size % generations == 0]
            nearest = sorted(fits, key=lambda n: abs(n - per_device))[:2]
            fixes = tuple(f"per_device_eval_batch_size={n}" for n in nearest)
            about = f"{text} with {counted(world_size)}"
            return [Finding("CHK009", "per_device_eval_batch_size", about, fixes, says=message)]
    return []


def cispo_findings(settings: Settings) -> list[Finding]:
    """TRL's and ms-swift's `epsilon_high` with the loss CISPO."""
    cap = settings.number("epsilon_high", None)
    cap = cap if cap is not None else settings.number("epsilon", 0.2)
    if cap > 1 or not settings.readable("epsilon_high", "epsilon"):
        return []
    key = "epsilon_high" if "epsilon_high" in settings else "epsilon"
    message = (
        f"with loss_type cispo, {key} {cap:g} caps the importance weight itself: on-policy weights of 1 become "
        f"{cap:g}, and the gradient is {cap:g} times what it should be"
    )
    return [Finding("CHK015", key, message, ("epsilon_high=5.0",))]


def awake_findings(settings: Settings, key: str, fix: str, *, sleeps: bool, share: float) -> list[Finding]:
    """vLLM inside the training processes that keeps its memory while they train."""
    if sleeps:
        return []
    share = settings.number("vllm_gpu_memory_utilization", share)
    return [Finding("CHK018", key, f"vLLM holds {share:.0%} of every GPU while training", (fix,))]


def is_local(host: object) -> bool:
    """Whether a server's address is this machine."""
    return any(name in str(host) for name in ("0.0.0.0", "127.0.0.1", "localhost"))


def length_finding(
    prompt: int | None, completion: int, context: int | None, *, prompt_key: str, completion_key: str, context_key: str
) -> list[Finding]:
    """Check prompt plus completion against the server's context. An unknown prompt length counts as one token."""
    if context is None or (prompt or 1) + completion <= context:
        return []
    total, nearest = f"{completion_key} {completion} and a prompt of any length", []
    if prompt:
        total = f"{prompt_key} {prompt} + {completion_key} {completion} = {prompt + completion}"
        nearest.append(f"{context_key}={prompt + completion}")
    if prompt is not None and context > prompt:
        nearest.append(f"{completion_key}={context - prompt}")
    return [Finding("CHK013", completion_key, f"{total} tokens exceed {context_key} {context}", tuple(nearest))]
