"""GPUs that a launch uses twice or not at all, as far as its file says which there are."""

from cohort.check.findings import Finding
from cohort.check.launch import Launch

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
    """In words."""
    return f"1 {kind}" if processes == 1 else f"{processes} {kind}es"


def evaluated_sizes(launch: Launch) -> tuple[int, ...]:
    """Numbers of processes for which an evaluation batch is judged.

    That of the launch; else usual ones, if the file says anything about evaluation batches.
    """
    if launch.processes is not None:
        return (int(launch.processes.value),) if int(launch.processes.value) > 0 else ()
    said = {"per_device_eval_batch_size", "num_generations_eval"} & set(launch.settings)
    return _USUAL_SIZES if said else ()


def length_finding(
    prompt: int | None, completion: int, context: int | None, *, prompt_key: str, completion_key: str, context_key: str
) -> list[Finding]:
    """Prompt and completion against the context of what samples. A prompt that is not said counts as one token."""
    if context is None or (prompt or 1) + completion <= context:
        return []
    total, nearest = f"{completion_key} {completion} and a prompt of any length", []
    if prompt:
        total = f"{prompt_key} {prompt} + {completion_key} {completion} = {prompt + completion}"
        nearest.append(f"{context_key}={prompt + completion}")
    if prompt is not None and context > prompt:
        nearest.append(f"{completion_key}={context - prompt}")
    return [Finding("CHK013", completion_key, f"{total} tokens exceed {context_key} {context}", tuple(nearest))]
