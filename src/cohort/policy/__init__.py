"""The policy: a Hugging Face model, its logprobs, and its files."""

from cohort.policy.load import (
    check_lengths,
    check_vocabulary,
    end_token_ids,
    load_policy,
    load_tokenizer,
    quiet_transformers,
    resolve_device,
)
from cohort.policy.logprobs import linear_logprobs
from cohort.policy.policy import ModelTraits, Policy
from cohort.policy.sharding import Collectives

__all__ = [
    "Collectives",
    "ModelTraits",
    "Policy",
    "check_lengths",
    "check_vocabulary",
    "end_token_ids",
    "linear_logprobs",
    "load_policy",
    "load_tokenizer",
    "quiet_transformers",
    "resolve_device",
]
