"""Values of `auto` for dtypes and GPU memory utilization, shared by plan, training and servers."""

from typing import Literal

from cohort.config import Config, ModelConfig, ServersConfig

BUCKET_BYTES = 256 << 20  # of weights transferred to vLLM at a time; a larger tensor goes alone
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}  # per number
_OWN_GPU_UTILIZATION = 0.9
_SHARED_GPU_UTILIZATION = 0.45


def compute_dtype(model: ModelConfig, *, on_gpu: bool) -> Literal["float32", "bfloat16", "float64"]:
    """Dtype of training's matmuls."""
    if model.compute_dtype != "auto":
        return model.compute_dtype
    return "bfloat16" if on_gpu and model.dtype == "float32" else model.dtype


def serving_dtype(config: Config, *, on_gpu: bool) -> Literal["float32", "bfloat16"]:
    """Dtype of the servers' weights, by default training's compute dtype (vLLM has no float64).

    Args:
        config: configuration of a run that uses servers.
        on_gpu: whether the run uses GPUs.
    """
    assert config.rollout.uses_servers
    if config.rollout.dtype != "auto":
        return config.rollout.dtype
    return "bfloat16" if compute_dtype(config.model, on_gpu=on_gpu) == "bfloat16" else "float32"


def server_memory_utilization(rollout: ServersConfig, *, shared: bool) -> float:
    """`gpu_memory_utilization` of a server; `shared`: training uses the same GPU in turn."""
    if rollout.gpu_memory_utilization != "auto":
        return rollout.gpu_memory_utilization
    return _SHARED_GPU_UTILIZATION if shared else _OWN_GPU_UTILIZATION
