"""How long a step takes and what a run costs, with the origin of every number.

The model is that of `cohort.plan.estimate`: operations and bytes of the mathematics, peaks and bandwidths of the
makers' data sheets, and shares of them that are assumed. A prediction, good to tell which phase dominates and what a
change is worth; a run's own metrics are the truth.
"""

from dataclasses import dataclass
from typing import Literal

from cohort.config import Config, VllmRolloutConfig
from cohort.plan.estimate import StepTimes, predict
from cohort.plan.hardware import Hardware
from cohort.plan.layout import Layout, sizes_of
from cohort.plan.shape import ModelShape

Origin = Literal["measured", "assumed", "derived"]
_RECOMPUTED = 4 / 3  # a second forward pass: 8 operations per weight and token instead of 6
_REFERENCE = 4 / 3  # a forward pass of another model: 2 more


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number of a plan, and where it comes from."""

    value: float
    origin: Origin
    how: str


def plan_timing(
    config: Config, shape: ModelShape, hardware: Hardware, layout: Layout, *, num_steps: int | None
) -> dict[str, Number]:
    """Seconds by phase, and the GPU hours of the run where its steps are known."""
    times = step_times(config, shape, hardware, layout)
    sampler = "decoding reads the weights at 60 % of the bandwidth or computes at 40 % of the peak (both assumed)"
    if config.rollout.engine == "local":
        sampler += "; PyTorch's own sampling is slower than that"
    numbers = {
        "training_s": Number(
            value=times.training_s,
            origin="derived",
            how="6 operations per weight and token at 40 % of the peak (assumed)",
        ),
        "sampling_s": Number(value=times.sampling_s, origin="derived", how=sampler),
        "step_s": Number(
            value=times.step_s,
            origin="derived",
            how="the longer phase" if times.overlap else "one phase after the other",
        ),
    }
    if num_steps is not None:
        hours = times.step_s * num_steps / 3600
        gpus = layout.num_training + (0 if layout.shared else layout.num_sampling)
        numbers["run_hours"] = Number(value=hours, origin="derived", how=f"{num_steps} steps")
        numbers["gpu_hours"] = Number(value=hours * gpus, origin="derived", how=f"{gpus} GPUs")
    return numbers


def step_times(config: Config, shape: ModelShape, hardware: Hardware, layout: Layout) -> StepTimes:
    """Both phases of a step, with what checkpointing and a reference model add to training."""
    rollout = config.rollout
    if not isinstance(rollout, VllmRolloutConfig):
        shared = {name: getattr(rollout, name) for name in type(rollout).model_fields if name != "engine"}
        config = config.model_copy(update={"rollout": VllmRolloutConfig(**shared)})
    tensor_parallel = rollout.tensor_parallel if isinstance(rollout, VllmRolloutConfig) else 1
    # servers of other people are taken to be as many GPUs as names
    sampling = layout.num_sampling or len(getattr(rollout, "urls", ())) * tensor_parallel
    times = predict(
        config,
        sizes_of(config, shape, hardware),
        num_training=layout.num_training,
        num_sampling=max(sampling, tensor_parallel),
    )
    factor = (_RECOMPUTED if config.model.gradient_checkpointing else 1.0) * (
        _REFERENCE if config.algorithm.beta > 0 else 1.0
    )
    return StepTimes(training_s=times.training_s * factor, sampling_s=times.sampling_s, overlap=times.overlap)
