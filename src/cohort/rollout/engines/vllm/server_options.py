"""Derive server options from a run's configuration."""

import os
import sys
from typing import Any

from cohort.config import Config, VllmRolloutConfig
from cohort.plan.defaults import server_memory_utilization, serving_dtype
from cohort.rollout.engines.vllm.server import ServerOptions


def vllm_python(named: str | None) -> str:
    """Return the Python of vLLM's environment, given the value of `rollout.vllm_python`."""
    return named or os.environ.get("COHORT_VLLM_PYTHON") or sys.executable


def server_options(config: Config, *, gpus: str, shared: bool = False) -> ServerOptions:
    """Return the options of one server.

    Args:
        config: configuration of a run with `rollout.engine: vllm`.
        gpus: the server's GPUs in the format of CUDA_VISIBLE_DEVICES; "" on CPU.
        shared: whether the server shares its GPUs with training.
    """
    rollout = config.rollout
    assert isinstance(rollout, VllmRolloutConfig)
    extra: dict[str, Any] = {"trust_remote_code": True} if config.model.trust_remote_code else {}
    return ServerOptions(
        python=vllm_python(rollout.vllm_python),
        model=config.model.path,
        device="cuda" if gpus else "cpu",
        dtype=serving_dtype(config, on_gpu=bool(gpus)),
        max_model_len=rollout.max_prompt_tokens + max(rollout.max_new_tokens, config.eval_max_new_tokens),
        max_num_seqs=rollout.max_num_seqs,
        gpus=gpus,
        tensor_parallel=rollout.tensor_parallel,
        gpu_memory_utilization=server_memory_utilization(rollout, shared=shared),
        sleep=shared,
        lora_rank=_adapter_rank(config),
        seed=config.train.seed,
        extra=extra | rollout.vllm_args,
    )


def _adapter_rank(config: Config) -> int:
    """Return the LoRA rank of the served adapter; 0 without an adapter."""
    adapter = config.model.adapter
    if adapter is None or adapter.path is None:
        return 0 if adapter is None else adapter.rank
    from cohort.models import saved_rank

    return saved_rank(adapter.path)
