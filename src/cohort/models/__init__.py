"""Policies and critics: load, run and save transformers models."""

from cohort.models.activation_checkpointing import check_offload
from cohort.models.adapters.adapter_folder import AdapterSpec, saved_quantization, saved_rank, with_base
from cohort.models.adapters.merge_adapter import merge
from cohort.models.critic import Critic
from cohort.models.forward import PrefixState, SharedPrefix
from cohort.models.fsdp import CollectiveCounter
from cohort.models.lm_head.logprobs import linear_logprobs, linear_loss
from cohort.models.lm_head.tiled_matmul import Operands
from cohort.models.loading.load_model import (
    LoadRequest,
    check_adapter,
    check_model_folder,
    load_critic,
    load_policy,
    load_tokenizer,
    resolve_device,
)
from cohort.models.loading.meta_device import quiet_transformers
from cohort.models.model_limits import (
    check_dropout,
    check_lengths,
    check_router_loss,
    check_vocabulary,
    end_token_ids,
    trained_weights,
)
from cohort.models.policy import Policy
from cohort.models.quantization import check_quantization
from cohort.models.routers import RouterLogits, find_routers
from cohort.models.saving import SaveOptions, TensorSpec, save_policy, saved_bytes, stream_weights, weight_specs

__all__ = [
    "AdapterSpec",
    "CollectiveCounter",
    "Critic",
    "LoadRequest",
    "Operands",
    "Policy",
    "PrefixState",
    "RouterLogits",
    "SaveOptions",
    "SharedPrefix",
    "TensorSpec",
    "check_adapter",
    "check_dropout",
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
