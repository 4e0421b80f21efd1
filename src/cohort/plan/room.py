"""Whether a number of training GPUs, and servers beside them, have room for a run."""

from cohort.config import Config, ServersConfig
from cohort.plan.defaults import BYTES, memory_share, serving_dtype
from cohort.plan.hardware import Hardware
from cohort.plan.memory import PHASES, plan_memory
from cohort.plan.rows import plan_rows, smallest_budget
from cohort.plan.shape import ModelShape
from cohort.plan.work import work_of

_KV_SHARE = 0.2  # of a server's GPU, for keys and values


def why_it_does_not_fit(
    config: Config,
    rollout: ServersConfig,
    shape: ModelShape,
    hardware: Hardware,
    num_training: int,
    *,
    shared: bool = False,
) -> str | None:
    """What a GPU has too little memory for; None where all of it fits.

    Training has to fit with the smallest micro-batches, since a run makes them as small as it must.

    Args:
        config: of the run.
        rollout: its `rollout` section.
        shape: of its model.
        hardware: the kind of GPU.
        num_training: GPUs that train.
        shared: whether servers sleep on the same GPUs meanwhile.
    """
    memory, utilization = hardware.gpu_memory_bytes, memory_share(rollout, shared=shared)
    config = config.model_copy(update={"rollout": rollout})
    rows = plan_rows(config, num_training, smallest_budget(config))
    needed = plan_memory(work_of(config, shape, hardware, rows, num_training=num_training, shared=shared))
    if needed.peak_bytes > memory:
        return (
            f"training on {num_training} GPU{'s' * (num_training > 1)} takes {needed.peak_bytes / 1e9:.3g} GB of each "
            f"in {PHASES[needed.peak_phase]}, and each has {memory / 1e9:.3g} GB"
        )
    weights = BYTES[serving_dtype(config, on_gpu=True)] * shape.num_parameters / rollout.tensor_parallel
    room = max(0.0, utilization - _KV_SHARE) * memory
    if weights > room:
        return (
            f"the weights take {weights / 1e9:.3g} GB of each GPU of a server of rollout.tensor_parallel: "
            f"{rollout.tensor_parallel}, and {room / 1e9:.3g} GB are there for them"
        )
    return None
