"""The `hardware` section."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from cohort.config.section import Section, must_be, number_or

MAX_PROCESSES = 100_000  # catches typos before anything is computed for them


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
        "`model.compute_dtype` on every GPU). N, a divisor of the processes: keep them sharded over "
        "groups of N ranks. auto: true.",
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
