"""Policies and critics: load, run and save transformers models."""

from cohort.policy.activations import check_offload
from cohort.policy.adapter_folder import AdapterSpec, saved_quantization, saved_rank, with_base
from cohort.policy.critic import Critic
from cohort.policy.export import TensorSpec, saved_bytes, stream_weights, weight_specs
from cohort.policy.limits import check_lengths, check_router_loss, check_vocabulary, end_token_ids, trained_weights
from cohort.policy.load import LoadRequest, check_adapter, load_critic, load_policy, resolve_device
from cohort.policy.logprobs import LinearLoss, linear_logprobs, linear_loss
from cohort.policy.merge import merge
from cohort.policy.model_folder import check_model_folder, load_tokenizer
from cohort.policy.policy import ModelTraits, Policy
from cohort.policy.quantization import check_quantization
from cohort.policy.routers import Router, RouterLogits, find_routers
from cohort.policy.saving import SaveOptions, save_policy
from cohort.policy.sharding import CollectiveCounter
from cohort.policy.skeleton import quiet_transformers
from cohort.policy.stream import PrefixState, SharedPrefix

__all__ = [
    "AdapterSpec",
    "CollectiveCounter",
    "Critic",
    "LinearLoss",
    "LoadRequest",
    "ModelTraits",
    "Policy",
    "PrefixState",
    "Router",
    "RouterLogits",
    "SaveOptions",
    "SharedPrefix",
    "TensorSpec",
    "check_adapter",
    "check_lengths",
    "check_model_folder",
    "check_offload",
    "check_quantization",
    "check_router_loss",
    "check_vocabulary",
    "end_token_ids",
    "find_routers",
    "linear_logprobs",
    "linear_loss",
    "load_critic",
    "load_policy",
    "load_tokenizer",
    "merge",
    "quiet_transformers",
    "resolve_device",
    "save_policy",
    "saved_bytes",
    "saved_quantization",
    "saved_rank",
    "stream_weights",
    "trained_weights",
    "weight_specs",
    "with_base",
]
