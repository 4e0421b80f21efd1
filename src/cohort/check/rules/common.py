"""Rules shared by frameworks: GPUs used twice or idle, sampling servers, CISPO's clip."""

from cohort.check.findings import Finding
from cohort.check.launch import Launch, Settings

SAMPLING = {  # where completions are sampled, by the modes of TRL and ms-swift
    "none": "by the training processes, with transformers",
    "colocate": "by vLLM inside the training processes",
    "server": "by a vLLM server, which needs GPUs of its own",
    "a GPU of its own": "by vLLM on the GPU after the training processes' own",
    "workers": "by vLLM on the GPUs after the training processes' own",
}
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpu_findings(launch: Launch, *, local_server: bool, takes_one_for_vllm: bool = False) -> list[Finding]:
    """Overlap and idle GPUs.

    `local_server`: a server on this machine samples. One on another machine has GPUs of the same numbers.
    `takes_one_for_vllm`: the trainer itself takes the GPU after its processes for vLLM (TRL before 0.16).
    """
    gpus, per_node, of_server = launch.training_gpus or (), launch.processes_per_node, launch.server_gpus or ()
    found: list[Finding] = []
    if gpus and per_node is not None:
        used, fitting = per_node + takes_one_for_vllm, len(gpus) - takes_one_for_vllm
        nearest = (f"{fitting} processes",) if fitting else ()
        idle = [gpu for gpu in gpus[used:] if gpu not in of_server]
        if used > len(gpus):
            what = f"{per_node} processes" + (" and one GPU for vLLM" if takes_one_for_vllm else "")
            text = f"{what} need {used} GPUs, and {_VISIBLE} names {len(gpus)} ({', '.join(gpus)})"
            found.append(Finding("CHK012", _VISIBLE, text, nearest))
        elif idle and (of_server or not local_server):
            text = f"{per_node} processes leave GPU {', '.join(idle)} of {len(gpus)} visible ones without work"
            found.append(Finding("CHK011", _VISIBLE, text, nearest))
    both = [gpu for gpu in gpus if gpu in of_server and local_server]
    if both:
        free = ",".join(gpu for gpu in gpus if gpu not in both)
        text = f"GPU {', '.join(both)} is given to training and to the sampling server"
        found.append(Finding("CHK012", _VISIBLE, text, (f"{_VISIBLE}={free} for training",) if free else ()))
    return found


def server_findings(launch: Launch, prefix: str) -> list[Finding]:
    """Whether the sampling server's parallel sizes fit the GPUs that it is given (`prefix` is that of its options)."""
    gpus = launch.server_gpus
    keys = (f"{prefix}tensor_parallel_size", f"{prefix}data_parallel_size")
    sizes = [str(launch.server[key].value) if key in launch.server else "1" for key in keys]
    if gpus is None or not all(size.isdecimal() and int(size) for size in sizes):
        return []
    tensor, data = map(int, sizes)
    shape = f"the server's tensor parallel {tensor} x data parallel {data}"
    fits = (f"{keys[1]}={len(gpus) // tensor}",) if tensor <= len(gpus) else (f"{keys[0]}={len(gpus)}",)
    if tensor * data > len(gpus):
        return [Finding("CHK012", keys[0], f"{shape} needs {tensor * data} GPUs and sees {len(gpus)}", fits)]
    idle = ", ".join(gpus[tensor * data :])
    return [Finding("CHK011", keys[1], f"{shape} leaves GPU {idle} without work", fits)] if idle else []


def is_server_local(settings: Settings) -> bool:
    """Whether the sampling server of TRL or ms-swift is on this machine; not if its address could not be read."""
    keys = ("vllm_server_base_url", "vllm_server_host")
    host = str(settings.said(keys[0]) or settings.said(keys[1]) or "localhost")
    return settings.readable(*keys) and any(name in host for name in ("0.0.0.0", "127.0.0.1", "localhost"))


def counted(processes: int, kind: str = "process") -> str:
    """Return the count with its noun: `1 process`, `8 processes`."""
    return f"1 {kind}" if processes == 1 else f"{processes} {kind}es"


def cispo_findings(settings: Settings) -> list[Finding]:
    """TRL's and ms-swift's `epsilon_high` with the loss CISPO."""
    key = "epsilon_high" if settings.number("epsilon_high", None) is not None else "epsilon"
    cap = settings.number(key, 0.2)
    if cap > 1 or not settings.readable("epsilon_high", "epsilon"):
        return []
    message = (
        f"with loss_type cispo, {key} {cap:g} caps the importance weight itself: on-policy weights of 1 become "
        f"{cap:g}, and the gradient is {cap:g} times what it should be"
    )
    return [Finding("CHK015", key, message, ("epsilon_high=5.0",))]
