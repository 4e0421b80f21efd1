"""What a model can take: which tokens it knows and which end a completion, and how many positions."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cohort.config import ModelConfig
from cohort.errors import UserError
from cohort.policy.adapter import Adapter, adapter_start
from cohort.policy.frozen import freeze
from cohort.policy.policy import Policy
from cohort.policy.routers import find_routers
from cohort.policy.skeleton import empty_model
from cohort.records import Prompt


def trained_weights(config: ModelConfig) -> dict[str, Tensor]:
    """What will be trained, by name, without memory for it.

    Raises:
        UserError: the model or its adapter cannot be used, or `model.freeze` does not go with it.
    """
    model = empty_model(config)
    freeze(model, config.freeze)
    if config.adapter is not None:
        Adapter(
            model, adapter_start(config, checkpoint=None, keep_reference=False, seed=0, model=model), trainable=True
        )
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def check_router_loss(config: ModelConfig, coefficient: float) -> None:
    """Compare `train.router_aux_loss_coef` with the model, none of whose weights are loaded.

    Raises:
        UserError: the model has no routers that are balanced by such a loss, or they are frozen.
    """
    if coefficient == 0:
        return
    model = empty_model(config)
    routers, text_config = find_routers(model), model.config.get_text_config()
    freeze(model, config.freeze)
    problem = None
    if not routers:
        problem = "the model is no mixture of experts whose routers are known here, so that there is nothing to balance"
    elif any("correction_bias" in name for name in model.state_dict()):
        problem = "the model's experts are chosen by scores with a correction bias, and not by their probabilities"
    elif not hasattr(text_config, "router_aux_loss_coef"):
        problem = "the library has no load-balancing loss for this architecture"
    elif not any(p.requires_grad for router in routers for p in router.module.parameters()):
        problem = "model.freeze leaves no router to train"
    if problem is not None:
        raise UserError(f"train.router_aux_loss_coef: {coefficient:g} has no effect: {problem}; remove it")


def end_token_ids(policy: Policy, tokenizer: Any) -> frozenset[int]:
    """Every token id that ends a completion, by the tokenizer, the config or the generation config.

    Raises:
        UserError: there is none, so completions would never end.
    """
    config = policy.model.config
    ids: set[int] = set()
    for source in (tokenizer, config, config.get_text_config(), getattr(policy.model, "generation_config", None)):
        value = getattr(source, "eos_token_id", None)
        ids.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    if not ids:
        raise UserError(
            "model.path: neither the tokenizer nor config.json nor generation_config.json has an eos_token, so "
            "completions would never end"
        )
    return frozenset(ids)


def check_vocabulary(policy: Policy, prompts: Sequence[Prompt]) -> None:
    """Compare the token ids of prompts with the rows of the model's embedding.

    Raises:
        UserError: a token has no embedding, as after adding tokens to a tokenizer and not to its model.
    """
    rows = len(policy.model.get_input_embeddings().weight)
    largest = max(int(p.token_ids.max()) for p in prompts)
    if largest >= rows:
        raise UserError(
            f"model.path: a prompt has the token id {largest}, and the model has embeddings for {rows} tokens; "
            f"tokenizer and model do not belong together, or tokens were added without model.resize_token_embeddings"
        )


def check_lengths(
    config: ModelConfig,
    prompts: Sequence[Prompt],
    *,
    max_completion_tokens: int,
    field: str = "rollout.max_completion_tokens",
) -> None:
    """Compare the longest sequence that can be sampled with the positions that the model knows.

    Raises:
        UserError: the model would have to extrapolate; `field` is the key that the message names.
    """
    from transformers import AutoConfig

    try:
        text = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code).get_text_config()
    except Exception as error:  # the loader raises many types; all mean the same to the user
        raise UserError(f"model.path: {config.path!r}: config.json cannot be used: {error}") from error
    limit = _known_positions(text)
    longest = max(len(p.token_ids) for p in prompts)
    if limit is not None and longest + max_completion_tokens > limit:
        raise UserError(
            f"{field}: {max_completion_tokens} after the longest prompt of {longest} tokens makes "
            f"{longest + max_completion_tokens}, and the model knows {limit} positions; use at most "
            f"{max(0, limit - longest)}, or lower rollout.max_prompt_tokens"
        )


def _known_positions(text_config: Any) -> int | None:
    """How many positions a model computes as it was made to; None where its config does not say."""
    limit = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(limit, int):
        return None
    rope = getattr(text_config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or limit
    if rope.get("rope_type") in ("longrope", "dynamic"):
        # beyond this the rotation depends on the longest row of a batch, so on how the batch was put together
        return original
    if rope.get("rope_type") in ("linear", "yarn"):  # some configs state the length before, some after stretching
        return max(limit, int(original * rope.get("factor", 1.0)))
    return limit
