"""Which keys verl's configuration has: Hydra stops at others. Made from the files of verl 0.9 for its engines.

What `+key=value` adds need not be there. Of an empty mapping, such as `engine_kwargs.vllm`, any key is taken.
"""

import difflib

from cohort.check.findings import Finding
from cohort.check.launch import Launch

# sections: their keys
_KEYS: dict[str, str] = {
    "actor_rollout_ref": "hybrid_engine nccl_timeout",
    "actor_rollout_ref.actor": (
        "_target_ calculate_entropy calculate_sum_pi_squared clip_ratio clip_ratio_c clip_ratio_high "
        "clip_ratio_low data_loader_seed entropy_checkpointing entropy_coeff entropy_from_logits_chunk_size "
        "entropy_from_logits_with_chunking freeze_vision_tower grad_clip kl_loss_coef kl_loss_type "
        "loss_agg_mode loss_scale_factor pad_to_length ppo_epochs ppo_max_token_len_per_gpu "
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_mini_batch_size rollout_n shuffle strategy "
        "tau_neg tau_pos ulysses_sequence_parallel_size use_dynamic_bsz use_fused_kernels use_kl_loss "
        "use_prefix_grouper use_remove_padding use_torch_compile"
    ),
    "actor_rollout_ref.actor.checkpoint": "_target_ async_save load_contents mbridge_config save_contents strict",
    "actor_rollout_ref.actor.fsdp_config actor_rollout_ref.ref.fsdp_config": (
        "_target_ dtype entropy_checkpointing entropy_from_logits_chunk_size "
        "entropy_from_logits_with_chunking forward_only forward_prefetch fsdp_size full_determinism "
        "model_dtype offload_policy optimizer_offload pad_to_length pad_to_length_bucket param_offload "
        "reshard_after_forward seed strategy ulysses_sequence_parallel_size "
        "use_no_sync_for_gradient_accumulation use_orig_params use_torch_compile"
    ),
    (
        "actor_rollout_ref.actor.fsdp_config.qat actor_rollout_ref.actor.megatron.qat "
        "actor_rollout_ref.ref.fsdp_config.qat actor_rollout_ref.ref.megatron.qat"
    ): "_target_ activation_observer enable group_size ignore_patterns mode quantization_config_path",
    (
        "actor_rollout_ref.actor.fsdp_config.turbo_config.distributed "
        "actor_rollout_ref.ref.fsdp_config.turbo_config.distributed"
    ): (
        "expert_fully_shard_parallel_size expert_parallel_size fully_shard_parallel_size tensor_parallel_size "
        "ulysses_parallel_size"
    ),
    (
        "actor_rollout_ref.actor.fsdp_config.turbo_config.distributed.fsdp_plan "
        "actor_rollout_ref.ref.fsdp_config.turbo_config.distributed.fsdp_plan"
    ): ("fsdp_implementation num_to_backward_prefetch num_to_forward_prefetch output_dtype param_dtype reduce_dtype"),
    (
        "actor_rollout_ref.actor.fsdp_config.wrap_policy "
        "actor_rollout_ref.actor.torchtitan.wrap_policy "
        "actor_rollout_ref.ref.fsdp_config.wrap_policy actor_rollout_ref.ref.torchtitan.wrap_policy"
    ): "min_num_params",
    "actor_rollout_ref.actor.megatron": (
        "_target_ context_parallel_size dist_checkpointing_path dist_checkpointing_prefix "
        "dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient dtype "
        "dynamic_context_parallel entropy_from_logits_chunk_size entropy_from_logits_with_chunking "
        "expert_model_parallel_size expert_tensor_parallel_size forward_only max_seqlen_per_dp_cp_rank "
        "optimizer_offload override_ddp_config override_mcore_model_config pad_bshd_to_minibatch_max "
        "pad_to_length pad_to_length_bucket param_offload pipeline_model_parallel_size seed sequence_parallel "
        "tensor_model_parallel_size use_dist_checkpointing use_distributed_optimizer use_mbridge "
        "use_megatron_fsdp use_remove_padding vanilla_mbridge virtual_pipeline_model_parallel_size"
    ),
    "actor_rollout_ref.actor.megatron.override_transformer_config": (
        "attention_backend recompute_granularity recompute_method recompute_modules recompute_num_layers"
    ),
    (
        "actor_rollout_ref.actor.megatron.router_replay actor_rollout_ref.ref.megatron.router_replay"
    ): "_target_ mode record_file replay_file",
    "actor_rollout_ref.actor.optim": (
        "_target_ betas clip_grad decay_type eps exp_avg_dtype exp_avg_sq_dtype lr lr_decay_ratio "
        "lr_decay_steps lr_decay_style lr_min lr_scheduler_type lr_start lr_warmup_init lr_warmup_steps "
        "lr_warmup_steps_ratio lr_wsd_decay_steps lr_wsd_decay_style main_grads_dtype min_lr min_lr_factor "
        "min_lr_ratio muon_coefficient_type muon_extra_scale_factor muon_fp32_matmul_prec "
        "muon_match_adamw_update_rms muon_momentum muon_nesterov muon_num_ns_steps muon_scalar_optimizer "
        "muon_scale_mode muon_split_qkv muon_tp_mode name num_cycles optimizer optimizer_impl "
        "override_optimizer_config total_training_steps use_checkpoint_opt_param_scheduler "
        "use_layer_wise_distributed_optimizer use_precision_aware_optimizer warmup_style weight_decay "
        "weight_decay_incr_style zero_indexed_step"
    ),
    "actor_rollout_ref.actor.policy_loss": (
        "_target_ clip_cov_lb clip_cov_ratio clip_cov_ub dro_beta kl_cov_ratio loss_mode ppo_kl_coef"
    ),
    ("actor_rollout_ref.actor.profiler actor_rollout_ref.ref.profiler actor_rollout_ref.rollout.profiler"): (
        "_target_ all_ranks enable finish_hook_all_ranks finish_hook_cmd finish_hook_ranks ranks "
        "relocate_results save_path tool"
    ),
    (
        "actor_rollout_ref.actor.profiler.tool_config.npu actor_rollout_ref.ref.profiler.tool_config.npu"
    ): "_target_ analysis contents discrete level",
    (
        "actor_rollout_ref.actor.profiler.tool_config.nsys actor_rollout_ref.ref.profiler.tool_config.nsys"
    ): "_target_ discrete",
    (
        "actor_rollout_ref.actor.profiler.tool_config.precision_debugger "
        "actor_rollout_ref.ref.profiler.tool_config.precision_debugger "
        "actor_rollout_ref.rollout.profiler.tool_config.precision_debugger"
    ): "_target_ config_path stages steps strict",
    (
        "actor_rollout_ref.actor.profiler.tool_config.torch actor_rollout_ref.ref.profiler.tool_config.torch"
    ): "_target_ contents discrete",
    (
        "actor_rollout_ref.actor.profiler.tool_config.torch.schedule "
        "actor_rollout_ref.ref.profiler.tool_config.torch.schedule"
    ): "_target_ active repeat skip_first wait warmup",
    (
        "actor_rollout_ref.actor.profiler.tool_config.torch_memory "
        "actor_rollout_ref.ref.profiler.tool_config.torch_memory"
    ): "_target_ memory_snapshot_num_steps stack_depth trace_alloc_max_entries",
    "actor_rollout_ref.actor.qat": (
        "activation_observer enable group_size ignore_patterns mode quantization_config_path"
    ),
    "actor_rollout_ref.actor.torchtitan actor_rollout_ref.ref.torchtitan": (
        "_target_ activation_checkpoint attn_type context_parallel_size data_parallel_replicate_size "
        "data_parallel_shard_size data_parallel_size dtype entropy_checkpointing "
        "entropy_from_logits_chunk_size entropy_from_logits_with_chunking expert_parallel_size forward_only "
        "forward_prefetch full_determinism max_seq_len mixed_precision optimizer_offload param_offload "
        "pipeline_parallel_size reshard_after_forward seed spmd_backend strategy tensor_parallel_size "
        "use_orig_params use_torch_compile"
    ),
    "actor_rollout_ref.actor.veomni actor_rollout_ref.ref.veomni": (
        "_target_ activation_offload_host_cache_limit_gb activation_offload_modules attn_implementation "
        "basic_modules causal_conv1d_implementation chunk_gated_delta_rule_implementation ckpt_manager "
        "cross_entropy_loss_implementation dsa_attention_implementation dsa_indexer_implementation "
        "enable_async_activation_offload enable_fsdp_offload enable_full_shard enable_reentrant "
        "entropy_checkpointing entropy_from_logits_with_chunking expert_parallel_size force_use_huggingface "
        "forward_only forward_prefetch fsdp_size full_determinism init_device "
        "load_balancing_loss_implementation load_checkpoint_path mhc_implementation mixed_precision "
        "moe_implementation optimizer_offload pad_to_length pad_to_length_bucket param_offload "
        "qat_implementation rms_norm_gated_implementation rms_norm_implementation "
        "rotary_pos_emb_implementation seed strategy swiglu_mlp_implementation ulysses_parallel_size "
        "use_torch_compile"
    ),
    "actor_rollout_ref.actor.veomni.router_replay actor_rollout_ref.ref.veomni.router_replay": "_target_ mode",
    "actor_rollout_ref.model": (
        "_target_ custom_chat_template enable_activation_offload enable_gradient_checkpointing "
        "exclude_modules external_lib hf_config_path lora_adapter_path lora_alpha lora_rank override_config "
        "path target_modules tokenizer_path trust_remote_code use_fused_kernels use_liger use_remove_padding "
        "use_shm"
    ),
    "actor_rollout_ref.model.fused_kernel_options": "impl_backend",
    "actor_rollout_ref.model.lora": (
        "a2a_experimental adapter_path alpha dropout dropout_position dtype exclude_modules "
        "freeze_language_model freeze_vision_model freeze_vision_projection lora_A_init_method "
        "lora_B_init_method merge rank target_modules type"
    ),
    "actor_rollout_ref.model.mtp": (
        "_target_ detach_encoder enable enable_rollout enable_train method mtp_loss_scaling_factor "
        "num_speculative_tokens speculative_algorithm speculative_eagle_topk speculative_num_draft_tokens "
        "speculative_num_steps"
    ),
    "actor_rollout_ref.model.tiled_mlp": "enabled num_shards",
    "actor_rollout_ref.ref": (
        "_target_ entropy_checkpointing entropy_from_logits_chunk_size entropy_from_logits_with_chunking "
        "log_prob_max_token_len_per_gpu log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu "
        "log_prob_use_dynamic_bsz pad_to_length rollout_n strategy ulysses_sequence_parallel_size "
        "use_torch_compile"
    ),
    "actor_rollout_ref.ref.megatron": (
        "_target_ context_parallel_size dist_checkpointing_path dist_checkpointing_prefix "
        "dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient dtype "
        "dynamic_context_parallel entropy_from_logits_chunk_size entropy_from_logits_with_chunking "
        "expert_model_parallel_size expert_tensor_parallel_size forward_only max_seqlen_per_dp_cp_rank "
        "optimizer_offload override_ddp_config override_mcore_model_config override_transformer_config "
        "pad_bshd_to_minibatch_max pad_to_length pad_to_length_bucket param_offload "
        "pipeline_model_parallel_size seed sequence_parallel tensor_model_parallel_size "
        "use_dist_checkpointing use_distributed_optimizer use_mbridge use_megatron_fsdp use_remove_padding "
        "vanilla_mbridge virtual_pipeline_model_parallel_size"
    ),
    "actor_rollout_ref.ref.optim": (
        "_target_ betas clip_grad decay_type eps lr lr_warmup_steps lr_warmup_steps_ratio min_lr_factor name "
        "total_training_steps weight_decay"
    ),
    "actor_rollout_ref.rollout": (
        "_target_ calculate_log_probs cudagraph_capture_sizes data_parallel_size disable_log_stats do_sample "
        "dtype enable_chunked_prefill enable_prefix_caching enable_rollout_routing_replay enforce_eager "
        "expert_parallel_size free_cache_engine full_determinism gpu_memory_utilization ignore_eos "
        "layered_summon load_format log_prob_max_token_len_per_gpu log_prob_micro_batch_size "
        "log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz logprobs_mode max_model_len "
        "max_num_batched_tokens max_num_seqs mode moe_load_balance_metrics_interval mtp multi_stage_wake_up n "
        "n_gpus_per_node name nnodes over_sample_rate pipeline_model_parallel_size prompt_length qat "
        "quantization quantization_config_file response_length router_config_path scheduling_policy seed "
        "skip_tokenizer_init temperature tensor_model_parallel_size top_k top_p"
    ),
    "actor_rollout_ref.rollout.agent": "_target_ agent_loop_config_path default_agent_loop num_workers",
    "actor_rollout_ref.rollout.agent.custom_async_server": "_target_ name path",
    "actor_rollout_ref.rollout.checkpoint_engine": (
        "_target_ backend custom_backend_module engine_kwargs update_weights_bucket_megabytes"
    ),
    "actor_rollout_ref.rollout.disaggregation": (
        "bootstrap_port decode_replicas decode_tensor_model_parallel_size enabled ib_device prefill_replicas "
        "transfer_backend"
    ),
    "actor_rollout_ref.rollout.engine_kwargs": "sglang trtllm vllm",
    "actor_rollout_ref.rollout.multi_turn": (
        "_target_ enable format function_tool_path max_assistant_turns max_parallel_calls "
        "max_tool_response_length max_user_turns num_repeat_rollouts tokenization_sanity_check_mode "
        "tool_config_path tool_response_truncate_side use_inference_chat_template"
    ),
    "actor_rollout_ref.rollout.profiler.tool_config.npu": (
        "_target_ analysis contents discrete level profile_token_end profile_token_start"
    ),
    "actor_rollout_ref.rollout.profiler.tool_config.torch": (
        "_target_ contents discrete profile_token_end profile_token_start"
    ),
    "actor_rollout_ref.rollout.prometheus": "_target_ enable file port served_model_name",
    "actor_rollout_ref.rollout.trace": (
        "_target_ backend experiment_name max_samples_per_step_per_worker project_name token2text"
    ),
    "actor_rollout_ref.rollout.val_kwargs": "_target_ do_sample n temperature top_k top_p",
    "algorithm": "_target_ adv_estimator gamma kl_penalty lam norm_adv_by_std_in_grpo use_kl_in_reward use_pf_ppo",
    "algorithm.filter_groups": "_target_ enable max_inflight_gen_batches max_num_gen_batches metric",
    "algorithm.kl_ctrl": "_target_ horizon kl_coef target_kl type",
    "algorithm.pf_ppo": "reweight_method weight_pow",
    "algorithm.rollout_correction": (
        "bypass_mode loss_type rollout_is rollout_is_batch_normalize rollout_is_threshold rollout_rs "
        "rollout_rs_threshold"
    ),
    "data": (
        "apply_chat_template_kwargs audio_key dataloader_num_workers filter_overlong_prompts "
        "filter_overlong_prompts_workers function_tool_path gen_batch_size image_key image_patch_size "
        "max_prompt_length max_response_length mm_processor_kwargs prompt_key return_full_prompt "
        "return_multi_modal_inputs return_raw_chat return_raw_input_ids reward_fn_key seed shuffle tokenizer "
        "tool_config_path train_batch_size train_files train_max_samples truncation trust_remote_code use_shm "
        "val_batch_size val_files val_max_samples validation_shuffle video_key"
    ),
    "data.custom_cls trainer.v1.sampler.custom_sampler": "name path",
    "trainer": (
        "balance_batch checkpoint_callback_class critic_warmup default_hdfs_dir default_local_dir "
        "del_local_ckpt_after_load device esi_redundant_time experiment_name log_val_generations logger "
        "max_actor_ckpt_to_keep max_critic_ckpt_to_keep n_gpus_per_node nnodes project_name "
        "ray_wait_register_center_timeout resume_from_path resume_mode rollout_data_dir save_freq test_freq "
        "total_epochs total_training_steps use_v1 val_before_train val_only validation_data_dir"
    ),
    "trainer.v1": "sync trainer_mode",
    "trainer.v1.colocate_async": "num_warmup_batches",
    "trainer.v1.sampler": ("max_off_policy_strategy max_off_policy_threshold sampler_kwargs sync_refill_failed_groups"),
    "trainer.v1.separate_async": "num_warmup_batches parameter_sync_step",
    "trainer.v1.separate_async.hybrid_rollout": (
        "_target_ adaptive_switch_threshold enable_switch switch_cost_window_size switch_threshold_ratio "
        "switch_threshold_release_steps switch_threshold_step_down switch_threshold_step_up"
    ),
}
_KNOWN = frozenset(
    f"{section}.{key}" for sections, keys in _KEYS.items() for section in sections.split() for key in keys.split()
)
_SECTIONS = frozenset(
    ".".join(parts[:length]) for parts in (key.split(".") for key in _KNOWN) for length in range(1, len(parts))
)


def verl_key_findings(launch: Launch) -> list[Finding]:
    """Overrides of keys that are not there. YAML files are configurations of their own, and not judged."""
    if launch.form != "shell":
        return []
    found = []
    for key, said in launch.settings.items():
        section, name = key.split(".")[0], key.rpartition(".")[2]
        parents = {key.rsplit(".", n)[0] for n in range(1, key.count(".") + 1)}
        if said.added or section not in _SECTIONS or key in _KNOWN | _SECTIONS or parents & _KNOWN:
            continue
        nearest = tuple(difflib.get_close_matches(key, sorted(_KNOWN), n=1, cutoff=0.85))
        message = f"Could not override '{key}'. ... Key '{name}' is not in struct"
        text = f'verl 0.9 does not know {key} ({said.where}): "{message}"'
        found.append(Finding("CHK006", key, text, (*nearest, f"+{key}")))
    return found
