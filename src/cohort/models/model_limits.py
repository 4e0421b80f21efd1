"""Limits of a model: vocabulary, EOS tokens, maximum positions, and trainable weights, some frozen by name."""

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from cohort.config import ModelConfig
from cohort.errors import UserError
from cohort.models.adapters.lora import Adapter, adapter_init
from cohort.models.batch_layout import depends_on_length, rope_settings, rope_type
from cohort.models.dropout import dropout_rates
from cohort.models.loading.meta_device import meta_model
from cohort.models.loading.multimodal import multimodal_of
from cohort.models.policy import Policy
from cohort.models.routers import find_routers
from cohort.records import Prompt

ROUTERS = "routers"  # special pattern: the routers of a mixture-of-experts model


def freeze(model: Any, patterns: Iterable[str]) -> None:
    """Freeze the weights whose names match any of the patterns.

    Args:
        model: a transformers model, possibly on the meta device.
        patterns: `model.freeze`, with shell-style wildcards.

    Raises:
        UserError: a pattern matches nothing, or nothing is left to train.
    """
    named = dict(model.named_parameters())
    for pattern in patterns:
        names = _of_routers(model) if pattern == ROUTERS else {name for name in named if fnmatchcase(name, pattern)}
        if not names:
            raise UserError(f"model.freeze: {pattern!r} matches no weight of the model{_hint(pattern, named)}")
        for name in names:
            named[name].requires_grad_(False)
    if patterns and not any(p.requires_grad for p in named.values()):
        raise UserError("model.freeze: all weights are frozen, nothing is left to train; freeze less")


def _of_routers(model: Any) -> set[str]:
    return {f"{router.name}.{name}" for router in find_routers(model) for name, _ in router.module.named_parameters()}


def _hint(pattern: str, names: Iterable[str]) -> str:
    if pattern == ROUTERS:
        return ", which has no routers; remove it"
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
    return f"; nearest: {', '.join(near)}" if near else ""


def trained_weights(config: ModelConfig) -> dict[str, Tensor]:
    """Return the weights that will be trained, by name, on the meta device.

    Raises:
        UserError: the model or its adapter cannot be used, or `model.freeze` does not match it.
    """
    model = meta_model(config)
    freeze(model, config.freeze)
    if config.adapter is not None:
        Adapter(model, adapter_init(config, checkpoint=None, keep_reference=False, seed=0, model=model), trainable=True)
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def check_router_loss(config: ModelConfig, coefficient: float) -> None:
    """Check that `train.router_aux_loss_coef` has an effect on the model, without loading weights.

    Raises:
        UserError: the model has no trainable routers that support a load-balancing loss.
    """
    if coefficient == 0:
        return
    model = meta_model(config)
    routers, text_config = find_routers(model), model.config.get_text_config()
    freeze(model, config.freeze)
    problem = None
    if not routers:
        problem = "the model has no supported mixture-of-experts routers"
    elif any("correction_bias" in name for name in model.state_dict()):
        problem = "the model balances its experts by a correction bias instead"
    elif not hasattr(text_config, "router_aux_loss_coef"):
        problem = "transformers has no load-balancing loss for this architecture"
    elif not any(p.requires_grad for router in routers for p in router.module.parameters()):
        problem = "model.freeze freezes all routers"
    if problem is not None:
        raise UserError(f"train.router_aux_loss_coef: {coefficient:g} has no effect: {problem}; remove it")


def check_dropout(config: ModelConfig) -> None:
    """Check that `model.dropout: true` has an effect, without loading weights.

    Raises:
        UserError: the model has no dropout.
    """
    if config.dropout and not dropout_rates(meta_model(config)):
        raise UserError("model.dropout: true has no effect: the model's config.json has no dropout; remove it")


def end_token_ids(policy: Policy, tokenizer: Any) -> frozenset[int]:
    """Collect the token ids that end a completion from the tokenizer, config and generation config.

    Raises:
        UserError: there is none.
    """
    config, multimodal = policy.model.config, multimodal_of(policy.model)
    sources = [tokenizer, config, config.get_text_config(), getattr(policy.model, "generation_config", None)]
    ids: set[int] = set()
    for source in sources if multimodal is None else [*sources, multimodal.model.config]:
        value = getattr(source, "eos_token_id", None)
        ids.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    if not ids:
        raise UserError(
            "model.path: no eos_token in the tokenizer, config.json or generation_config.json, so completions would "
            "never end"
        )
    return frozenset(ids)


def check_vocabulary(policy: Policy, prompts: Iterable[Prompt], tokenizer: Any = None) -> None:
    """Check that every token of the prompts has an embedding. They are not read if all tokens of `tokenizer` have one.

    Raises:
        UserError: one has none, e.g. because tokens were added to the tokenizer but not to the model.
    """
    rows = len(policy.model.get_input_embeddings().weight)
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    if vocabulary and max(vocabulary.values()) < rows:
        return
    largest = max(int(p.token_ids.max()) for p in prompts)
    if largest >= rows:
        raise UserError(
            f"model.path: a prompt has token id {largest}, but the model has only {rows} embeddings. tokenizer and "
            f"model do not match, or tokens were added without model.resize_token_embeddings"
        )


def check_lengths(
    config: ModelConfig,
    longest_prompt_tokens: int,
    *,
    max_new_tokens: int,
    field: str,
) -> None:
    """Check that the longest possible sequence fits the model's maximum positions.

    Args:
        config: the model.
        longest_prompt_tokens: tokens of the longest prompt.
        max_new_tokens: maximum tokens after it.
        field: key of that maximum.

    Raises:
        UserError: it does not; the message starts with `field`.
    """
    from transformers import AutoConfig

    try:
        text = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code).get_text_config()
    except Exception as error:  # transformers raises many types of errors
        raise UserError(f"model.path: {config.path!r}: cannot use config.json: {error}") from error
    limit = _max_positions(text)
    longest = longest_prompt_tokens
    if limit is not None and longest + max_new_tokens > limit:
        raise UserError(
            f"{field}: {max_new_tokens} plus the longest prompt of {longest} tokens is "
            f"{longest + max_new_tokens}, but the model has {limit} positions; use at most "
            f"{max(0, limit - longest)}, or lower rollout.max_prompt_tokens"
        )


def _max_positions(text_config: Any) -> int | None:
    """Maximum positions that a model was made for; None if its config does not say."""
    limit = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(limit, int):
        return None
    limits = []
    for rope in rope_settings(text_config):
        original = rope.get("original_max_position_embeddings") or limit
        if depends_on_length(rope):  # beyond this, of the longest sequence of a batch
            limits.append(original)
        elif rope_type(rope) in ("linear", "yarn"):  # some configs state the length before scaling, some after
            limits.append(max(limit, int(original * rope.get("factor", 1.0))))
        else:
            limits.append(limit)
    return min(limits)
