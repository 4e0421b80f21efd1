"""Which arguments ms-swift's GRPO knows: unknown ones stop it. Made from the argument classes of ms-swift 4.6."""

import difflib

from cohort.check.findings import Finding
from cohort.check.launch import Launch
from cohort.check.readers.swift import MEGATRON
from cohort.check.rules.trl_keys import OF_TRANSFORMERS, keys_of

_OF_BOTH = keys_of(
    "adapters add_non_thinking_prefix add_version advantage_estimator agent_template aligner_lr async_generate "
    "attn_impl beta bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type bnb_4bit_use_double_quant "
    "cached_dataset cached_val_dataset callbacks center_rewards_coefficient check_model columns "
    "completion_length_limit_scope cosine_max_len cosine_max_len_value_correct cosine_max_len_value_wrong "
    "cosine_min_len_value_correct cosine_min_len_value_wrong create_checkpoint_symlink custom_dataset_info "
    "custom_register_path dataset dataset_num_proc dataset_shuffle decision_drop_instructions "
    "decision_shuffle_fields decision_state_as_text decision_subsample_options delta desirable_weight device_groups "
    "device_map disable_auto_column_mapping disable_ignore_empty_think download_mode dynamic_sample "
    "enable_channel_loss enable_dft_loss enable_npu_model_patch enable_thinking epsilon epsilon_high experts_impl "
    "external_plugins fipo_clip_high_only fipo_clip_range fipo_decay_rate fipo_safety_threshold freeze_aligner "
    "freeze_llm freeze_parameters freeze_parameters_ratio freeze_parameters_regex freeze_vit generation_batch_size "
    "gkd_logits_topk gym_env hqq_axis ignore_args_error importance_sampling_level init_strategy interleave_prob "
    "is_binary_loss_scale kl_in_reward label_smoothing lazy_tokenize lmbda load_args load_data_args "
    "load_from_cache_file local_repo_path log_completions log_entropy log_rollout_offpolicy_metrics logprobs "
    "lora_alpha lora_bias lora_dropout lora_dtype lora_rank loss_scale loss_type max_completion_length max_length "
    "max_memory max_model_len max_new_tokens max_pixels max_resample_times max_shard_size max_turns model "
    "model_author model_kwargs model_name model_revision model_type modules_to_save move_model_batches mrl_dims "
    "multi_turn_scheduler new_special_tokens norm_bbox num_beams num_generations num_generations_eval "
    "num_iterations num_labels off_policy_sequence_mask_delta offload_model offload_optimizer offload_teacher_model "
    "optimizer overlong_filter packing packing_length packing_num_proc packing_strategy padding_free padding_side "
    "preserve_thinking problem_type quant_bits quant_method ray_exp_name real_tau ref_adapters ref_model "
    "ref_model_mixup_alpha ref_model_sync_steps repetition_max_penalty repetition_n_grams repetition_penalty "
    "response_prefix reward_funcs reward_model reward_model_plugin reward_weights rlhf_type "
    "rollout_importance_sampling_mode rollout_importance_sampling_threshold rope_scaling rpo_alpha scale_rewards "
    "seq_kd sequence_parallel_size sft_alpha shuffle_buffer_size sleep_level soft_cache_length soft_max_length "
    "split_dataset_ratio steps_per_generation stop_words stopping_strategy stream streaming strict "
    "structured_outputs_regex swanlab_exp_name swanlab_project sync_ref_model system target_modules target_regex "
    "task_type tau_neg tau_pos teacher_kl_coef teacher_model teacher_model_revision teacher_model_server "
    "teacher_model_type teacher_tag_key temperature template template_backend top_entropy_quantile top_k "
    "top_logprobs top_p torch_dtype train_dataloader_shuffle trainable_parameters trainable_parameters_regex "
    "truncation_strategy tuner_backend tuner_type undesirable_weight use_chat_template use_gym_env use_hf use_ray "
    "use_rslora use_swift_lora use_vllm val_dataset val_dataset_shuffle vit_gradient_checkpointing vit_lr "
    "vllm_disable_cascade_attn vllm_enable_lora vllm_enable_prefix_caching vllm_enforce_eager vllm_engine_kwargs "
    "vllm_gpu_memory_utilization vllm_limit_mm_per_prompt vllm_max_model_len vllm_max_num_seqs "
    "vllm_mm_processor_cache_gb vllm_mode vllm_server_base_url vllm_server_group_port vllm_server_host "
    "vllm_server_pass_dataset vllm_server_port vllm_server_timeout vllm_tensor_parallel_size "
    "wandb_log_unique_prompts"
)

_OF_RLHF = keys_of(
    "acc_strategy adalora_beta1 adalora_beta2 adalora_deltaT adalora_init_r adalora_orth_reg_weight "
    "adalora_target_r adalora_tfinal adalora_tinit adapter_act adapter_length advantage_reweight boft_block_num "
    "boft_block_size boft_dropout boft_n_butterfly_factor chord_enable_phi_function chord_mu_decay_steps "
    "chord_mu_peak chord_mu_valley chord_mu_warmup_steps chord_sft_dataset chord_sft_per_device_train_batch_size "
    "cliprange cliprange_value cpo_alpha deepspeed_autotp_size discopop_tau ds3_gather_for_generation "
    "early_stop_interval enable_flattened_weight_sync eval_dataset eval_dataset_args eval_generation_config "
    "eval_limit eval_metric eval_use_evalscope extra_eval_args fourier_n_frequency fourier_scaling "
    "galore_cos_threshold galore_gamma_proj galore_optim_per_parameter galore_proj_bits galore_proj_group_size "
    "galore_proj_quant galore_proj_type galore_quantization galore_queue_size galore_rank galore_scale "
    "galore_target_modules galore_update_proj_gap galore_with_embedding gamma generation_config "
    "generation_max_length generation_num_beams init_weights kl_coef lam ld_alpha lisa_activated_layers "
    "lisa_step_interval llamapro_num_groups llamapro_num_new_blocks local_rollout_forward_batch_size "
    "lora_ga_batch_size lora_ga_direction lora_ga_iters lora_ga_max_length lora_ga_scale lora_ga_stable_gamma "
    "lorap_lr_ratio loss_weights max_epochs min_p missing_eos_penalty num_mini_batches num_ppo_epochs "
    "num_sample_generations predict_with_generate ref_model_revision ref_model_type reft_args "
    "reft_intervention_type reft_layer_key reft_layers reft_rank response_length resume_only_model reward_adapters "
    "reward_model_revision reward_model_type reward_template rlsd_lambda rlsd_lambda_decay_steps "
    "rlsd_lambda_warmup_steps rlsd_negative_only rlsd_reweight_clip_range router_aux_loss_coef safe_serialization "
    "sdar_gate_beta sdar_loss_coef simpo_gamma sortish_sampler swanlab_email_language swanlab_mode "
    "swanlab_notification_method swanlab_receiver_email swanlab_secret swanlab_sender_email swanlab_smtp_port "
    "swanlab_smtp_server swanlab_token swanlab_webhook_url swanlab_workspace target_parameters teacher_adapters "
    "teacher_deepspeed use_dora use_flash_ckpt use_galore use_logits_to_keep vera_d_initial vera_dropout "
    "vera_projection_prng_key vera_rank vf_coef vllm_data_parallel_size vllm_disable_custom_all_reduce "
    "vllm_enable_expert_parallel vllm_max_lora_rank vllm_pipeline_parallel_size vllm_quantization "
    "vllm_reasoning_parser vllm_speculative_config vllm_use_async_engine whiten_rewards zero_hpz_partition_size"
)

_OF_MEGATRON = keys_of(
    "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split accumulate_allreduce_grads_in_fp32 "
    "adam_beta1 adam_beta2 adam_eps align_grad_reduce align_param_gather apply_dsa_kernel_fusion "
    "apply_query_key_layer_scaling apply_rope_fusion apply_wd_to_qk_layernorm async_save attention_backend "
    "attention_softmax_in_fp32 batch_p2p_comm bf16 bias_activation_fusion bias_dropout_fusion bridge_backend "
    "calculate_KL calculate_per_token_loss clip_grad context_parallel_size cp_comm_type cp_partition_mode "
    "cross_entropy_fusion_impl cross_entropy_loss_fusion csa_dense_mode data_parallel_random_init "
    "data_parallel_sharding_strategy data_seed data_sharding dataloader_multiprocessing_context "
    "dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor "
    "ddp_backend ddp_timeout decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers "
    "dist_ckpt_optim_fully_reshardable dist_ckpt_save_pre_mcore_014 distrib_optim_fully_reshardable_mem_efficient "
    "dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss end_weight_decay engram_tokenizer_map eval_iters eval_steps "
    "exp_avg_dtype exp_avg_sq_dtype expert_model_parallel_size expert_tensor_parallel_size f_divergence_type "
    "finetune fp16 fp4_format fp4_param_gather fp4_recipe fp8_amax_compute_algo fp8_amax_history_len fp8_format "
    "fp8_param_gather fp8_recipe global_batch_size gradient_accumulation_fusion greater_is_better group_by_length "
    "hub_token language_model_only linear_decoupled_in_proj local_rank logging_steps lr lr_decay_iters "
    "lr_decay_style lr_warmup_fraction lr_warmup_init lr_warmup_iters lr_wsd_decay_iters lr_wsd_decay_style "
    "main_grads_dtype main_params_dtype manual_gc manual_gc_eval manual_gc_steps masked_softmax_fusion "
    "mcore_adapter mcore_model mcore_ref_adapter mcore_ref_model megatron_extra_kwargs merge_lora "
    "metric_for_best_model mhc_recompute_layer_num micro_batch_size microbatch_group_size_per_vp_stage min_lr "
    "mlp_padding_free moe_aux_loss_coeff moe_enable_deepep moe_expert_capacity_factor moe_grouped_gemm "
    "moe_layer_recompute moe_pad_expert_input_to_capacity moe_permute_fusion moe_router_dtype "
    "moe_router_load_balancing_type moe_shared_expert_overlap moe_token_dispatcher_type moe_token_drop_policy "
    "moe_z_loss_coeff mtp_decoder_input_detach mtp_loss_scaling_factor mtp_num_layers mtp_shared_weights "
    "muon_coefficient_type muon_extra_scale_factor muon_fp32_matmul_prec muon_lr muon_min_lr muon_momentum "
    "muon_num_ns_steps muon_scalar_optimizer muon_scale_mode muon_split_qkv muon_tp_mode muon_use_nesterov "
    "nccl_comm_warmup no_load_optim no_load_rng no_save_optim no_save_rng num_train_epochs offload_bridge "
    "optimizer_cpu_offload optimizer_cuda_graph optimizer_offload_fraction output_dir overlap_grad_reduce "
    "overlap_p2p_comm overlap_param_gather overlap_param_gather_with_optimizer_step perform_initialization "
    "pipeline_model_parallel_layout pipeline_model_parallel_size recompute_granularity recompute_method "
    "recompute_modules recompute_num_layers reference_free remove_unused_columns report_to router_replay_mode "
    "save_missing_weights save_safetensors save_steps save_strategy save_total_limit seed "
    "sequence_packing_scheduler sequence_parallel sgd_momentum skip_megatron_init start_weight_decay "
    "strict_fsdp_dtensor_load te_rng_tracker tensor_model_parallel_size tensorboard_dir tensorboard_queue_size "
    "tp_comm_overlap train_iters use_cpu_initialization use_distributed_optimizer use_fused_mhc use_megatron_fsdp "
    "use_persistent_ckpt_worker use_precision_aware_optimizer virtual_pipeline_model_parallel_size vit_attn_impl "
    "vit_gradient_checkpointing_kwargs wandb_exp_name wandb_project weight_decay weight_decay_incr_style"
)


_NEW_NAMES = {"train_type": "tuner_type"}  # 4.0 still took the old one


def swift_key_findings(launch: Launch) -> list[Finding]:
    """Arguments that `swift rlhf` or `megatron rlhf` does not know. Groups of Ray's files are not judged."""
    on_megatron = launch.settings.get(MEGATRON)
    if on_megatron is not None and on_megatron.where == "train.gpus":
        return []
    known = _OF_BOTH | (_OF_MEGATRON if on_megatron is not None else _OF_RLHF | OF_TRANSFORMERS)
    ignores = str(launch.settings["ignore_args_error"].value).lower() if "ignore_args_error" in launch.settings else ""
    found = []
    for key, said in launch.settings.items():
        if key in known or key in (MEGATRON, "config") or "." in key:
            continue
        new = _NEW_NAMES.get(key)
        nearest = (new,) if new else tuple(difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.8))
        why = f"ms-swift 4.6 does not know {key} ({said.where})"
        why += f", which is called {new} from 4.0 on" if new else ""
        if ignores == "true":
            found.append(Finding("CHK005", key, f"{why}, and drops it with a warning", nearest))
        else:
            found.append(Finding("CHK006", key, f"{why}: \"remaining_argv: ['--{key}', ...]\"", nearest))
    return found
