"""Which keys TRL's `GRPOConfig` and its scripts know, by version, and what becomes of the others.

The first table was made from the sources of TRL 0.15 to 0.22, 0.24 to 0.28, 1.0, 1.10 and 1.16: a version between two
of these is judged like the older one. The next three come from transformers 4.57 and 5.23.
"""

import difflib

from cohort.check.findings import Finding
from cohort.check.launch import Launch, Said
from cohort.check.readers.trl_yaml import OPEN_R1_ONLY

_Version = tuple[int, ...]


def keys_of(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


# (known from, known before): keys
_GRPO: dict[tuple[_Version, _Version | None], str] = {
    ((0, 15), (0, 18)): ("vllm_device vllm_dtype vllm_max_model_len"),
    ((0, 15), (0, 28)): ("max_prompt_length"),
    ((0, 15), None): (
        "beta ds3_gather_for_generation log_completions max_completion_length model_init_kwargs num_generations "
        "ref_model_mixup_alpha ref_model_sync_steps reward_weights sync_ref_model temperature use_vllm "
        "vllm_gpu_memory_utilization"
    ),
    ((0, 16), (0, 18)): ("vllm_enable_prefix_caching"),
    ((0, 16), (0, 28)): ("vllm_guided_decoding_regex"),
    ((0, 16), None): (
        "cache_implementation epsilon epsilon_high min_p num_iterations repetition_penalty scale_rewards top_k "
        "top_p vllm_server_host vllm_server_port vllm_server_timeout"
    ),
    ((0, 17), (0, 27)): ("wandb_log_unique_prompts"),
    ((0, 17), (0, 28)): ("use_liger_loss"),
    ((0, 17), None): ("disable_dropout loss_type mask_truncated_completions num_completions_to_print shuffle_dataset"),
    ((0, 18), None): (
        "delta generation_batch_size steps_per_generation vllm_mode vllm_server_base_url vllm_tensor_parallel_size"
    ),
    ((0, 19), None): ("generation_kwargs"),
    ((0, 20), None): ("importance_sampling_level top_entropy_quantile use_transformers_paged"),
    ((0, 21), None): ("vllm_model_impl"),
    ((0, 24), None): ("vllm_enable_sleep_mode vllm_importance_sampling_cap vllm_importance_sampling_correction"),
    ((0, 25), None): ("cast_lm_head_to_fp32 chat_template_kwargs"),
    ((0, 26), None): (
        "log_unique_prompts num_generations_eval sapo_temperature_neg sapo_temperature_pos "
        "use_bias_correction_kl vllm_importance_sampling_mode vllm_max_model_length"
    ),
    ((0, 27), None): (
        "max_tool_calling_iterations multi_objective_aggregation off_policy_mask_threshold vllm_group_port "
        "vllm_structured_outputs_regex"
    ),
    ((0, 28), None): ("log_completions_hub_repo"),
    ((1, 0), None): ("pad_to_multiple_of vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos"),
    ((1, 10), None): (
        "entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target log_multimodal "
        "router_aux_loss_coef transformers_continuous_batching_config trust_remote_code use_adaptive_entropy "
        "use_transformers_continuous_batching vllm_importance_sampling_clip_max "
        "vllm_importance_sampling_clip_min"
    ),
}
_TRANSFORMERS = keys_of(
    "accelerator_config adam_beta1 adam_beta2 adam_epsilon auto_find_batch_size average_tokens_across_devices "
    "batch_eval_metrics bf16 bf16_full_eval data_seed dataloader_drop_last dataloader_num_workers "
    "dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor ddp_backend "
    "ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_timeout debug deepspeed disable_tqdm "
    "do_eval do_predict do_train eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_steps "
    "eval_strategy eval_use_gather_object fp16 fp16_full_eval fsdp fsdp_config full_determinism "
    "gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs greater_is_better "
    "hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip "
    "include_for_metrics include_num_input_tokens_seen label_names label_smoothing_factor learning_rate "
    "length_column_name liger_kernel_config load_best_model_at_end local_rank log_level log_level_replica "
    "log_on_each_node logging_first_step logging_nan_inf_filter logging_steps logging_strategy lr_scheduler_kwargs "
    "lr_scheduler_type max_grad_norm max_steps metric_for_best_model neftune_noise_alpha num_train_epochs optim "
    "optim_args optim_target_modules output_dir parallelism_config per_device_eval_batch_size "
    "per_device_train_batch_size prediction_loss_only project push_to_hub remove_unused_columns report_to "
    "restore_callback_states_from_checkpoint resume_from_checkpoint run_name save_on_each_node save_only_model "
    "save_steps save_strategy save_total_limit seed skip_memory_metrics tf32 torch_compile torch_compile_backend "
    "torch_compile_mode torch_empty_cache_steps trackio_space_id use_cpu use_liger_kernel warmup_steps weight_decay"
)
_TRANSFORMERS_4_ONLY = keys_of(
    "adafactor fp16_backend fp16_opt_level fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap group_by_length "
    "half_precision_backend include_inputs_for_metrics include_tokens_per_second jit_mode_eval logging_dir "
    "mp_parameters no_cuda overwrite_output_dir past_index per_gpu_eval_batch_size per_gpu_train_batch_size "
    "push_to_hub_model_id push_to_hub_organization push_to_hub_token ray_scope save_safetensors torchdynamo "
    "tpu_metrics_debug tpu_num_cores use_legacy_prediction_loop use_mps_device warmup_ratio"
)
_TRANSFORMERS_5_ONLY = keys_of(
    "activation_checkpointing activation_checkpointing_kwargs dataloader_in_order "
    "dataloader_multiprocessing_context ddp_static_graph enable_jit_checkpoint trackio_bucket_id "
    "trackio_static_space_id train_sampling_strategy use_cache"
)
OF_TRANSFORMERS = _TRANSFORMERS | _TRANSFORMERS_4_ONLY | _TRANSFORMERS_5_ONLY  # of any version
_SCRIPT = keys_of(
    "accelerate_config attn_implementation bnb_4bit_quant_storage bnb_4bit_quant_type config dataset_config "
    "dataset_name dataset_streaming dataset_test_split dataset_train_split datasets env "
    "gradient_checkpointing_use_reentrant ignore_bias_buffers load_in_4bit load_in_8bit lora_alpha lora_dropout "
    "lora_modules_to_save lora_r lora_target_modules lora_target_parameters lora_task_type model_name_or_path "
    "model_revision num_machines num_processes reward_funcs reward_model_name_or_path streaming test_split_size "
    "trust_remote_code use_bnb_nested_quant use_dora use_peft use_rslora"
)
_OPEN_R1 = OPEN_R1_ONLY | {"hub_model_revision", "num_completions_to_print", "wandb_entity", "wandb_project"}
_NEW_NAMES = {
    "evaluation_strategy": "eval_strategy",
    "log_completions_hub": "log_completions_hub_repo",
    "max_length": "max_completion_length",
    "provider_type": "code_provider",
    "torch_dtype": "dtype",
    "use_liger_loss": "use_liger_kernel",
    "use_transformers_paged": "use_transformers_continuous_batching",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
    "vllm_max_model_len": "vllm_max_model_length",
    "wandb_log_unique_prompts": "log_unique_prompts",
}
# still read, and on their way out
_DEPRECATED: dict[str, _Version] = {"vllm_importance_sampling_cap": (1, 10), "use_transformers_paged": (1, 10)}
# 0.16 and 0.17 still take these and do nothing with them: the server has its own options
_FOR_THE_SERVER = keys_of(
    "vllm_device vllm_dtype vllm_enable_prefix_caching vllm_gpu_memory_utilization vllm_max_model_len"
)


def known_keys(version: _Version, framework: str = "trl") -> frozenset[str]:
    """Every key that this version of TRL reads, from a recipe or as an argument."""
    own = {
        key
        for (first, before), keys in _GRPO.items()
        if first <= max(version, (0, 15)) and (before is None or version < before)
        for key in keys.split()
    }
    own |= {"dtype"} if version >= (0, 24) else set()
    own |= {"torch_dtype"} if version < (0, 28) else set()
    own |= _OPEN_R1 if framework == "open-r1" else set()
    fives = _TRANSFORMERS_5_ONLY if version >= (1, 0) else frozenset()
    return frozenset(own) | _TRANSFORMERS | _TRANSFORMERS_4_ONLY | fives | _SCRIPT


def key_findings(launch: Launch, version: _Version) -> list[Finding]:
    """What is to say about each key of a recipe, of `GRPOConfig(...)` or of a command line."""
    known = known_keys(version, launch.framework)
    told = ".".join(map(str, version))
    found: list[Finding] = []
    for key, said in launch.settings.items():
        if key.startswith("trainer.") or said.added:  # of GRPOTrainer(...), which other rules look at
            continue
        if key not in known:
            found.append(_unknown(key, said, launch, known, told))
        elif key in _DEPRECATED and version >= _DEPRECATED[key]:
            new, since = _NEW_NAMES[key], _text(_DEPRECATED[key])
            message = f"{key} ({said.where}) is called {new} from TRL {since} on, and goes in 2.0"
            found.append(Finding("CHK007", key, message, (new,)))
        elif key in _FOR_THE_SERVER and (0, 16) <= version < (0, 18) and said.value is not None:
            message = f"{key} ({said.where}) does nothing in TRL {told}: it is an option of `trl vllm-serve` there"
            found.append(Finding("CHK005", key, message))
        elif key in _TRANSFORMERS_4_ONLY and version >= (1, 0):
            fate = "stops there" if _is_strict(launch, said) else "is dropped without a word"
            message = f"{key} ({said.where}) is gone in transformers 5, where it {fate}; transformers 4 still has it"
            found.append(Finding("CHK005", key, message, ("warmup_steps",) if key == "warmup_ratio" else ()))
    return found


def _unknown(key: str, said: Said, launch: Launch, known: frozenset[str], told: str) -> Finding:
    new = _NEW_NAMES.get(key)
    nearest = (new,) if new in known else tuple(difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.8))
    history = _history(key)
    why = f"TRL {told} does not know {key} ({said.where}){f', which was there {history}' if history else ''}"
    if _is_strict(launch, said):
        if launch.form == "python":
            text = f"{why}: \"GRPOConfig.__init__() got an unexpected keyword argument '{key}'\""
        else:
            text = f"{why}: \"Some specified arguments are not used by the HfArgumentParser: ['--{key}', ...]\""
        return Finding("CHK006", key, text, nearest)
    if new in known:
        return Finding("CHK007", key, f"{why}; it is called {new}, and the old name is dropped without a word", nearest)
    return Finding("CHK005", key, f"{why}, and drops it without a word", nearest)


def _is_strict(launch: Launch, said: Said) -> bool:
    """Whether an unknown key stops the run here: an argument does, a line of a recipe does not."""
    return launch.form == "python" or (launch.form == "shell" and said.where.startswith("the command"))


def _history(key: str) -> str:
    for (first, before), keys in _GRPO.items():
        if key in keys.split():
            return f"from {_text(first)} to before {_text(before)}" if before else f"from {_text(first)} on"
    return ""


def _text(version: _Version) -> str:
    return ".".join(map(str, version))
