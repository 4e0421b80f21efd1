"""The `hardware` section."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from cohort.config.section import Section

MOST_PROCESSES = 100_000  # more than anybody has: a typo is answered and not computed


class HardwareConfig(Section):
    """Where the run runs."""

    processes: int | Literal["auto"] = Field(
        "auto",
        description="Training processes on this machine, one per GPU, or that many on its CPU. auto: every GPU, or "
        "with `rollout.engine: vllm` those that `rollout_gpus` leaves; 1 without GPUs, and where quantized weights, "
        "adafactor or `reference.device: cpu` work in one process only. A number is kept: torchrun has to start as "
        "many on each machine. The model, its gradients and the optimizer's state are spread over them (FSDP2). "
        "Changes speed and memory, never the gradient.",
    )
    rollout_gpus: int | Literal["shared", "auto"] = Field(
        "auto",
        description="With `rollout.engine: vllm`: GPUs of this machine that only sample; with processes: auto the "
        "others train. shared: every GPU does both in turn, vLLM sleeping while the policy trains. auto: picks a "
        "split, and says why.",
    )
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N.")
    reshard_after_forward: bool | int | Literal["auto"] = Field(
        "auto",
        description="With several processes: whether a layer's gathered weights are freed after its forward pass and "
        "gathered again in backward (true), or stay from forward to backward (false: no second gathering, and the "
        "whole model in `model.compute_dtype` on every GPU). A number N that divides the processes: they stay, spread "
        "over N neighbours. auto: true.",
    )
    timeout_s: float = Field(
        600.0,
        gt=0,
        description="Longest wait of a process for another one, in seconds; after that the run ends or restarts, and "
        "names who did not answer. Rewards have deadlines of their own (`rewards.timeout_s`).",
    )
    grace_s: float = Field(
        60.0,
        gt=0,
        description="SIGTERM, SIGINT (Ctrl-C), SIGHUP and SIGUSR1 have the run save and end. Where that takes longer "
        "than so many seconds, it ends without. Clusters often send SIGKILL 30 s after SIGTERM: choose less than they "
        "wait.",
    )
    max_restarts: int = Field(
        0,
        ge=0,
        description="How often the run starts again from its last checkpoint after a process died, failed or did not "
        "answer. A rank that fails twice with no step between is left out.",
    )

    @field_validator("processes", mode="before")
    @classmethod
    def _a_number_or_auto(cls, value: Any) -> Any:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if value == "auto" or (is_number and 1 <= value <= MOST_PROCESSES):
            return value
        most = f" and at most {MOST_PROCESSES}" if is_number and value > MOST_PROCESSES else ""
        raise ValueError(
            f"must be a whole number of at least 1{most}, or auto (every GPU of this machine; 1 without GPUs)"
        )

    @field_validator("reshard_after_forward", mode="before")
    @classmethod
    def _on_off_or_a_number(cls, value: Any) -> Any:
        if value == "auto" or isinstance(value, bool) or (isinstance(value, int) and value >= 2):
            return value
        raise ValueError("must be auto, true, false or a whole number of at least 2 that divides the processes")

    @field_validator("rollout_gpus", mode="before")
    @classmethod
    def _gpus_shared_or_auto(cls, value: Any) -> Any:
        if value in ("shared", "auto") or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
            return value
        raise ValueError("must be a whole number of at least 1, shared or auto")

    @model_validator(mode="after")
    def _one_process_per_gpu(self) -> Self:
        if ":" in self.device and self.processes not in (1, "auto"):
            raise ValueError(
                f"device: {self.device} names one GPU, and processes: {self.processes} would share it; use "
                f"device: cuda, and CUDA_VISIBLE_DEVICES to choose among the GPUs"
            )
        return self
