"""The `hardware` and `sandbox` sections."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from cohort.config.section import Section, Size, must_be, number_or

MAX_PROCESSES = 100_000  # catches typos before anything is computed for them


def _is_auto_or_bool(value: object) -> bool:
    return value == "auto" or isinstance(value, bool)


class HardwareConfig(Section):
    """Processes, GPUs and timeouts."""

    processes: Annotated[
        int | Literal["auto"],
        number_or(
            "auto",
            rule=f"a whole number from 1 to {MAX_PROCESSES}, or auto (every GPU of this machine; 1 without GPUs)",
            is_valid=lambda n: 1 <= n <= MAX_PROCESSES,
        ),
    ] = Field(
        "auto",
        description="Training processes on this machine, one per GPU (or that many on CPU). auto: every GPU, or with "
        "`rollout.engine: vllm` those not used for rollouts; 1 without GPUs and for features limited to "
        "one process (quantized weights, adafactor, `reference.device: cpu`). A number must match "
        "torchrun's processes per machine. Model, gradients and optimizer state are sharded over them "
        "(FSDP2). Affects speed and memory, never the gradient.",
    )
    rollout_gpus: Annotated[
        int | Literal["shared", "auto"],
        number_or("shared", "auto", rule="a whole number of at least 1, shared or auto", is_valid=lambda n: n >= 1),
    ] = Field(
        "auto",
        description="With `rollout.engine: vllm`: number of this machine's GPUs reserved for rollouts; with "
        "processes: auto the others train. shared: every GPU does both in turn, and vLLM sleeps during "
        "training. auto: choose a split and report why.",
    )
    device: Annotated[
        str,
        must_be("auto, cpu, cuda or cuda:N", lambda x: bool(re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(x)))),
    ] = Field("auto", description="Device: auto, cpu, cuda or cuda:N.")
    reward_workers: Annotated[
        int | Literal["auto"],
        number_or(
            "auto", rule="a whole number of at least 1, or auto (this machine's cores)", is_valid=lambda n: n >= 1
        ),
    ] = Field(
        "auto",
        description="Child processes on each machine that grade answers for `math` and its kin, shared by its training "
        "processes: each has its part, at least one. auto: one per core, at most 16 per training process.",
    )
    reshard_after_forward: Annotated[
        bool | int | Literal["auto"],
        must_be(
            "auto, true, false or a whole number of at least 2 that divides the processes",
            lambda x: x == "auto" or isinstance(x, bool) or (isinstance(x, int) and x >= 2),
        ),
    ] = Field(
        "auto",
        description="With several processes: true: free a layer's gathered weights after its forward pass and gather "
        "them again in backward. false: keep them until backward (one all-gather less; the whole model in "
        "`model.compute_dtype` on every GPU). N, a divisor of the processes that share a copy of the model: keep them "
        "sharded over groups of N ranks. auto: true.",
    )
    dp_replicate: Annotated[
        int | Literal["auto"],
        number_or("auto", rule="a whole number of at least 1, or auto", is_valid=lambda n: n >= 1),
    ] = Field(
        "auto",
        description="Number of copies of the model, over which training is data parallel (hybrid sharding, HSDP). Each "
        "is sharded over an equal share of the processes, in the order of their ranks. With one per machine, weights "
        "are gathered within machines, which exchange gradients once per update. Must divide the processes of all "
        "machines. auto: 1, or one per machine where this fits and is faster, by the plan (`cohort plan`).",
    )
    sync_each_micro_batch: Annotated[bool | Literal["auto"], must_be("auto, true or false", _is_auto_or_bool)] = Field(
        "auto",
        description="With several processes: true: reduce gradients over them after every micro-batch. false: "
        "accumulate whole gradients on every process (4 bytes per trained weight), and reduce them once per update. "
        "auto: true, or false where this fits and is faster, by the plan.",
    )
    timeout_s: float = Field(
        600.0,
        gt=0,
        description="Maximum time in seconds that a process waits for another. After that the run ends or restarts, "
        "and reports which rank did not answer. Rewards have their own timeouts (`rewards.timeout_s`).",
    )
    grace_s: float = Field(
        60.0,
        gt=0,
        description="Seconds to save and exit after SIGTERM, SIGINT (Ctrl-C), SIGHUP or SIGUSR1; after that the run "
        "exits without saving. Clusters often send SIGKILL 30 s after SIGTERM: use less than that.",
    )
    max_restarts: int = Field(
        0,
        ge=0,
        description="Maximum restarts from the last checkpoint after a process fails. A rank that fails twice without "
        "a step in between is left out.",
    )

    @model_validator(mode="after")
    def _check_device(self) -> Self:
        if ":" in self.device and self.processes not in (1, "auto"):
            raise ValueError(
                f"device: {self.device} names one GPU, and processes: {self.processes} would share it; use "
                f"device: cuda, and CUDA_VISIBLE_DEVICES to choose among the GPUs"
            )
        return self


class SandboxConfig(Section):
    """Sandbox for code of completions. Limits hold for one verdict: all test cases of one completion."""

    backend: Literal["auto", "sandlock", "bubblewrap", "container", "sandbox_fusion"] = Field(
        "auto",
        description="`auto`: the first of bubblewrap, sandlock and container whose escape checks pass. "
        "`sandbox_fusion`: a server at `url`.",
    )
    url: str | None = Field(None, description="Address of a SandboxFusion server, such as http://host:8080.")
    container: str = Field(
        "docker run",
        min_length=1,
        description="Command that starts a container, such as `docker run` or `podman run`.",
    )
    image: str = Field("python:3.11-slim", min_length=1, description="Container image; it needs Python 3.11 or later.")
    confinement: Literal["full", "partial", "none"] = Field(
        "full",
        description="Least that the run accepts. `full`: a backend that withstands every escape check. `partial`: else "
        "the one that withstands most; the run names what it does not hold. `none`: else no sandbox at all: code runs "
        "with this user's rights and network, and limits are best effort.",
    )
    packages: tuple[str, ...] = Field(
        (), description="Installed Python packages that the code may import, such as [numpy]. Default: only the stdlib."
    )
    max_concurrent: Annotated[
        int | Literal["auto"],
        number_or("auto", rule="a whole number of at least 1, or auto (two per CPU)", is_valid=lambda n: n >= 1),
    ] = Field("auto", description="Verdicts computed at a time. auto: two per CPU.")
    wall_s: float = Field(30.0, gt=0, description="Wall time in seconds.")
    cpu_s: int = Field(10, ge=1, description="CPU time in seconds per process.")
    memory: Size = Field("512MB", description="Memory.")
    max_processes: int = Field(32, ge=1, description="Processes and threads.")
    max_file_size: Size = Field("16MB", description="Size of a file.")
    tmp_size: Size = Field("64MB", description="Size of the private /tmp.")
    max_open_files: int = Field(64, ge=16, description="Open files per process.")
    max_output: Size = Field("1MB", description="Output, and return values, of all test cases.")

    @model_validator(mode="before")
    @classmethod
    def _read_former_key(cls, values: Any) -> Any:
        """Read `unsafe_no_sandbox`, the former `confinement: none`."""
        if not isinstance(values, dict) or not isinstance(values.get("unsafe_no_sandbox"), bool):
            return values
        values = dict(values)
        return ({"confinement": "none"} if values.pop("unsafe_no_sandbox") else {}) | values

    @model_validator(mode="after")
    def _check_backend(self) -> Self:
        if self.backend == "sandbox_fusion" and self.url is None:
            raise ValueError("backend: sandbox_fusion needs url, such as http://localhost:8080")
        if self.backend != "sandbox_fusion":
            self.refuse("url", f"backend: {self.backend}", "remove it, or use backend: sandbox_fusion")
        if self.backend in ("container", "sandbox_fusion"):
            where = "the image" if self.backend == "container" else "the server"
            self.refuse("packages", f"backend: {self.backend}", f"remove it, and install them in {where}")
        if self.backend == "sandbox_fusion":
            self.refuse("confinement", f"backend: {self.backend}", "remove it, or use backend: auto")
        if self.backend not in ("auto", "container"):
            for key in ("container", "image"):
                self.refuse(key, f"backend: {self.backend}", "remove it, or use backend: container")
        return self


DEFAULT_SANDBOX = SandboxConfig()
