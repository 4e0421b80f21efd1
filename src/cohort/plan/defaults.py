"""What `auto` means for dtypes and for a server's share of a GPU: the same for estimates, training and servers."""

from typing import Literal

from cohort.config import Config, ModelConfig, ServersConfig

PORTION_BYTES = 256 << 20  # of weights that are lent to vLLM at a time; a tensor that is larger is a portion by itself
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}  # of one number
_SHARE_OF_OWN_GPU = 0.9
_SHARE_OF_SHARED_GPU = 0.45


def compute_dtype(model: ModelConfig, *, on_gpu: bool) -> Literal["float32", "bfloat16", "float64"]:
    """That of training's matrix products."""
    if model.compute_dtype != "auto":
        return model.compute_dtype
    return "bfloat16" if on_gpu and model.dtype == "float32" else model.dtype


def serving_dtype(config: Config, *, on_gpu: bool) -> Literal["float32", "bfloat16"]:
    """That of the servers' weights: as training computes, where nothing else is wanted; vLLM has no float64.

    Args:
        config: of a run that uses servers.
        on_gpu: whether it is trained, or served, on GPUs.
    """
    assert config.rollout.uses_servers
    if config.rollout.dtype != "auto":
        return config.rollout.dtype
    return "bfloat16" if compute_dtype(config.model, on_gpu=on_gpu) == "bfloat16" else "float32"


def memory_share(rollout: ServersConfig, *, shared: bool) -> float:
    """Of a server's GPU that it takes; `shared` where training takes turns with it there."""
    if rollout.gpu_memory_utilization != "auto":
        return rollout.gpu_memory_utilization
    return _SHARE_OF_SHARED_GPU if shared else _SHARE_OF_OWN_GPU
