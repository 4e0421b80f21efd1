"""Values of `auto` and sizes of logit tiles, shared by plan, training and servers."""

from typing import Literal

from cohort.config import Config, ModelConfig, ServersConfig

TILE_ELEMENTS = 1 << 24  # logits per tile: 64 MiB in float32
# Smaller tiles are as fast on CPU and take less memory.
CPU_TILE_ELEMENTS = 1 << 22
# Measured on CPU (docs/log.md): more tokens per tile write the weight's gradient less often, fewer the hidden states'.
TILE_TOKENS = 2048
# Tokens per full-vocabulary tile on a GPU. Each tile reads the weight and its gradient once, which takes as long as
# multiplying a few hundred tokens: smaller tiles are memory-bound.
LOSS_TILE_TOKENS = 1024


def tile_shape(num_tokens: int, num_ids: int, tile_elements: int) -> tuple[int, int]:
    """Tokens and vocabulary entries of a tile of at most `tile_elements` logits."""
    t = num_tokens if num_tokens * num_ids <= tile_elements else min(num_tokens, TILE_TOKENS, tile_elements)
    t = max(1, t)
    return t, min(num_ids, max(1, tile_elements // t))


def loss_tile_elements(num_ids: int, *, on_gpu: bool) -> int:
    """Logits per full-vocabulary tile with `gradients_in_forward`."""
    return max(TILE_ELEMENTS, LOSS_TILE_TOKENS * num_ids) if on_gpu else TILE_ELEMENTS


def loss_tile_tokens(num_tokens: int, num_ids: int, tile_elements: int) -> int:
    """Tokens per full-vocabulary tile."""
    return max(1, min(num_tokens, tile_elements // num_ids))


def copied_weight_rows(num_ids: int, width: int, tile_elements: int) -> int:
    """Rows of the head weight [num_ids, width] that are cast at a time: at most a tile's size."""
    return max(1, min(num_ids, tile_elements // width))


BUCKET_BYTES = 256 << 20  # of weights transferred to servers at a time; a larger tensor goes alone
PACKED_WEIGHTS_BYTES = 64 << 20  # least size of linear layers that the local sampler packs on CPUs
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}  # per number
_OWN_GPU_UTILIZATION = 0.9
_SHARED_GPU_UTILIZATION = 0.45


def compute_dtype(model: ModelConfig, *, on_gpu: bool) -> Literal["float32", "bfloat16", "float64"]:
    """Dtype of training's matmuls."""
    if model.compute_dtype != "auto":
        return model.compute_dtype
    return "bfloat16" if on_gpu and model.dtype == "float32" else model.dtype


def checkpointing(model: ModelConfig) -> bool | Literal["selective"]:
    """`model.gradient_checkpointing`; none if `auto` has not been resolved, as on CPU."""
    return False if model.gradient_checkpointing == "auto" else model.gradient_checkpointing


def with_communication(config: Config, dp_replicate: int, sync_each_micro_batch: bool) -> Config:
    """The configuration with other values of these two keys of `hardware`."""
    keys = {"dp_replicate": dp_replicate, "sync_each_micro_batch": sync_each_micro_batch}
    return config.model_copy(update={"hardware": config.hardware.model_copy(update=keys)})


def replicas(config: Config) -> int:
    """`hardware.dp_replicate`; 1 if `auto` has not been resolved, as on CPU."""
    return 1 if config.hardware.dp_replicate == "auto" else config.hardware.dp_replicate


def with_checkpointing(config: Config, kind: bool | Literal["auto", "selective"]) -> Config:
    """The configuration with another `model.gradient_checkpointing`."""
    return config.model_copy(update={"model": config.model.model_copy(update={"gradient_checkpointing": kind})})


def serving_dtype(config: Config, *, on_gpu: bool) -> Literal["float32", "bfloat16"]:
    """Dtype of the servers' weights, by default training's compute dtype (servers have no float64).

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
