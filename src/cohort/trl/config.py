"""TRL's `GRPOConfig`: a dataclass over transformers' `TrainingArguments`, with the fields of TRL 1.16 and earlier."""

import os
import warnings
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
from transformers import TrainingArguments

from cohort.config.other_trainers import grpo_config_fields
from cohort.errors import UserError
from cohort.ranks.join import rank_of_launcher, started_by_torchrun

TRL_VERSION = "1.16"  # whose defaults the fields have
TRACKERS = ("tensorboard", "wandb", "trackio")
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})


def _dropped(default: Any = None) -> Any:
    return field(default=default, metadata={"help": "Of earlier versions of TRL or transformers."})


@dataclass
class GRPOConfig(TrainingArguments):
    """Arguments of `GRPOTrainer`, with TRL's names and defaults. docs/trl-fields.md says what each does here.

    Raises:
        UserError: a field that is not supported is set.
    """

    learning_rate: float = 1e-6
    logging_steps: float = 10
    gradient_checkpointing: bool = True
    bf16: bool | None = None
    remove_unused_columns: bool | None = False

    model_init_kwargs: dict[str, Any] | str | None = None
    trust_remote_code: bool = False
    router_aux_loss_coef: float | None = None
    disable_dropout: bool = False
    cast_lm_head_to_fp32: bool = False
    num_generations: int | None = 8
    num_generations_eval: int | None = None
    max_completion_length: int | None = 512
    ds3_gather_for_generation: bool = True
    shuffle_dataset: bool | None = True
    pad_to_multiple_of: int | str | None = "auto"
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    generation_kwargs: dict[str, Any] | str | None = None
    chat_template_kwargs: dict[str, Any] | str | None = None
    repetition_penalty: float = 1.0
    cache_implementation: str | None = None
    use_vllm: bool = False
    vllm_mode: str = "colocate"
    vllm_model_impl: str = "vllm"
    vllm_enable_sleep_mode: bool = False
    vllm_structured_outputs_regex: str | None = None
    vllm_server_base_url: str | None = None
    vllm_server_host: str = "0.0.0.0"
    vllm_server_port: int = 8000
    vllm_server_timeout: float = 240.0
    vllm_group_port: int = 51216
    vllm_gpu_memory_utilization: float = 0.3
    vllm_max_model_length: int | None = None
    vllm_tensor_parallel_size: int = 1
    beta: float = 0.0
    num_iterations: int = 1
    epsilon: float = 0.2
    delta: float | None = None
    epsilon_high: float | None = None
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    importance_sampling_level: str = "token"
    reward_weights: list[float] | None = None
    multi_objective_aggregation: str = "sum_then_normalize"
    scale_rewards: str = "group"
    loss_type: str = "dapo"
    mask_truncated_completions: bool = False
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    entropy_coef_min: float = 0.0
    entropy_coef_max: float = 1.0
    entropy_coef_delta: float = 0.005
    entropy_target: float = 0.2
    max_tool_calling_iterations: int | None = None
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None
    off_policy_mask_threshold: float | None = None
    use_bias_correction_kl: bool = True
    log_completions: bool = False
    log_multimodal: bool = True
    num_completions_to_print: int | None = None
    log_unique_prompts: bool = False
    log_completions_hub_repo: str | None = None
    use_transformers_continuous_batching: bool = False
    transformers_continuous_batching_config: dict[str, Any] | str | None = None
    use_transformers_paged: bool = False
    vllm_importance_sampling_cap: float | None = None

    # fields that TRL or transformers have dropped, in the form that scripts in the wild use
    max_prompt_length: int | None = _dropped()
    warmup_ratio: float | None = _dropped()
    overwrite_output_dir: bool = _dropped(False)
    logging_dir: str | None = _dropped()
    save_safetensors: bool = _dropped(True)
    include_tokens_per_second: bool = _dropped(False)
    group_by_length: bool = _dropped(False)
    no_cuda: bool = _dropped(False)
    evaluation_strategy: str | None = _dropped()
    per_gpu_train_batch_size: int | None = _dropped()
    half_precision_backend: str | None = _dropped()
    use_liger_loss: bool = _dropped(False)
    wandb_log_unique_prompts: bool = _dropped(False)
    vllm_device: str | None = _dropped()
    vllm_dtype: str | None = _dropped()
    vllm_max_model_len: int | None = _dropped()
    vllm_enable_prefix_caching: bool | None = _dropped()
    vllm_guided_decoding_regex: str | None = _dropped()
    per_gpu_eval_batch_size: int | None = _dropped()
    push_to_hub_token: str | None = _dropped()
    push_to_hub_model_id: str | None = _dropped()
    jit_mode_eval: bool = _dropped(False)
    use_mps_device: bool = _dropped(False)
    tpu_num_cores: int | None = _dropped()
    fp16_backend: str | None = _dropped()
    past_index: int = _dropped(-1)
    include_inputs_for_metrics: bool = _dropped(False)
    split_batches: bool | None = _dropped()
    dispatch_batches: bool | None = _dropped()

    def __post_init__(self) -> None:
        """Check the fields. No `use_cpu` is needed on a machine without a GPU.

        Raises:
            UserError: a field that is not supported is set.
        """
        if self.evaluation_strategy is not None:
            self.eval_strategy = self.evaluation_strategy
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        for name in ("token", "model_id"):
            setattr(self, f"hub_{name}", getattr(self, f"hub_{name}") or getattr(self, f"push_to_hub_{name}"))
        trackers = [self.report_to] if isinstance(self.report_to, str) else self.report_to or []
        for name in trackers:
            if name not in (*TRACKERS, "none", "all"):
                raise UserError(f"report_to: {name!r} is not supported; use {', '.join(TRACKERS)} or none")
        bf16 = self.bf16
        if not torch.cuda.is_available() or bf16 is None:  # transformers refuses what this machine lacks
            self.bf16 = False
        super().__post_init__()
        self.bf16 = bf16
        notes, given = grpo_config_fields(), set(changed_fields(self))
        for name in sorted(given & notes["refused"].keys()):
            raise UserError(f"{name}: {getattr(self, name)!r:.80} is not supported: {notes['refused'][name]}")
        if self.metric_for_best_model in ("loss", "eval_loss"):
            raise UserError(f"metric_for_best_model: {self.metric_for_best_model!r} is not measured; use eval_reward")
        for name in sorted(given & notes["dropped"].keys()):
            warnings.warn(f"{name} is a field of earlier versions: {notes['dropped'][name]}", stacklevel=3)

    @cached_property
    def _setup_devices(self) -> torch.device:
        """Return this process's device. Cohort joins the processes, which transformers would do here."""
        self.distributed_state = None
        self._n_gpu = int(torch.cuda.is_available() and not self.use_cpu)
        return torch.device("cuda", self.local_process_index) if self._n_gpu else torch.device("cpu")

    @property
    def world_size(self) -> int:
        """Number of training processes."""
        return int(os.environ["WORLD_SIZE"]) if started_by_torchrun() else 1

    @property
    def process_index(self) -> int:
        """Rank of this process."""
        return rank_of_launcher()

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine."""
        return int(os.environ.get("LOCAL_RANK", 0)) if started_by_torchrun() else 0


def changed_fields(args: GRPOConfig) -> list[str]:
    """Return the fields whose value is not their default."""
    found = []
    for each in fields(GRPOConfig):
        value = getattr(args, each.name)
        if value != each.default and not (value in _NOTHING and each.default in _NOTHING):
            found.append(each.name)
    return found
