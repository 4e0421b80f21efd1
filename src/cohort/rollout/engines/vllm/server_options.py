"""What the configuration of a run says to its servers."""

import os
import sys
from typing import Any

from cohort.config import Config, VllmRolloutConfig
from cohort.plan.defaults import server_memory_utilization, serving_dtype
from cohort.rollout.engines.vllm.server import ServerOptions


def vllm_python(named: str | None) -> str:
    """The Python of the environment that vLLM is in, where `rollout.vllm_python` does or does not name it."""
    return named or os.environ.get("COHORT_VLLM_PYTHON") or sys.executable


def server_options(config: Config, *, gpus: str, shared: bool = False) -> ServerOptions:
    """The options of one server.

    Args:
        config: of a run with `rollout.engine: vllm`.
        gpus: that the server gets, as CUDA_VISIBLE_DEVICES takes them; "" on CPU.
        shared: whether the policy trains on the same GPUs, in turn with the server.
    """
    rollout = config.rollout
    assert isinstance(rollout, VllmRolloutConfig)
    longest = rollout.max_completion_tokens
    if config.eval is not None:
        longest = max(longest, config.eval.max_completion_tokens or 0)
    extra: dict[str, Any] = {"trust_remote_code": True} if config.model.trust_remote_code else {}
    return ServerOptions(
        python=vllm_python(rollout.vllm_python),
        model=config.model.path,
        device="cuda" if gpus else "cpu",
        dtype=serving_dtype(config, on_gpu=bool(gpus)),
        max_model_len=rollout.max_prompt_tokens + longest,
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
    """Of the adapter that will be served; 0 without one."""
    adapter = config.model.adapter
    if adapter is None or adapter.path is None:
        return 0 if adapter is None else adapter.rank
    from cohort.models import saved_rank

    return saved_rank(adapter.path)
