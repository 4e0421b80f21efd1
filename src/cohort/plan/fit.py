"""Check whether a run fits on a number of training GPUs, with servers alongside them."""

from cohort.config import Config
from cohort.plan.defaults import BYTES, server_memory_utilization, serving_dtype
from cohort.plan.hardware import Hardware
from cohort.plan.memory import PHASES, plan_memory
from cohort.plan.micro_batch_plan import min_budget, plan_micro_batches
from cohort.plan.shape import ModelShape
from cohort.plan.workload import process_workload

_KV_SHARE = 0.2  # of a server's GPU, reserved for the KV cache


def memory_shortfall(
    config: Config, shape: ModelShape, hardware: Hardware, num_training: int, *, shared: bool = False
) -> str | None:
    """Say what does not fit into GPU memory; None if everything does.

    Training is checked with the smallest token budget, since a run shrinks its budget as needed.

    Args:
        config: configuration of a run that uses servers.
        shape: shape of its model.
        hardware: type of GPU.
        num_training: number of training GPUs.
        shared: whether servers sleep on the training GPUs during training.
    """
    memory, rollout = hardware.gpu_memory_bytes, config.rollout
    assert rollout.uses_servers
    micro_batches = plan_micro_batches(config, num_training, min_budget(config))
    needed = plan_memory(process_workload(config, shape, hardware, micro_batches, shared=shared))
    if needed.peak_bytes > memory:
        return (
            f"training on {num_training} GPU{'s' * (num_training > 1)} needs {needed.peak_bytes / 1e9:.3g} GB per "
            f"GPU in {PHASES[needed.peak_phase]}, of {memory / 1e9:.3g} GB"
        )
    weights = BYTES[serving_dtype(config, on_gpu=True)] * shape.num_parameters / rollout.tensor_parallel
    room = max(0.0, server_memory_utilization(rollout, shared=shared) - _KV_SHARE) * memory
    if weights > room:
        return (
            f"a server's weights need {weights / 1e9:.3g} GB per GPU with rollout.tensor_parallel: "
            f"{rollout.tensor_parallel}, of {room / 1e9:.3g} GB available for them"
        )
    return None
