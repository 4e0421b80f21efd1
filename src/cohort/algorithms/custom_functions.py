"""Custom advantages, policy losses and loss weights: load them, try them on toy inputs, and check their outputs.

P prompts, G generations, K rewards, L tokens of the longest completion, N completions, T loss tokens.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cohort.algorithms.statistics import AdvantageInputs
from cohort.config import CustomFunction
from cohort.config.user_code import error_location, load_function
from cohort.errors import UserError, describe_error, suggest
from cohort.packing.batch import LossInputs, LossOutput, PolicyLoss
from cohort.records import FloatArray, IntArray

_LENGTHS = (3, 1, 4)  # completion lengths of the toy input for policy losses


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTraits:
    """Properties of a policy loss, found by running it."""

    sequence_level: bool  # a token's loss depends on the other tokens of its trajectory
    learns_without_advantage: bool  # tokens with advantage 0 have a gradient


def load_advantage(choice: CustomFunction) -> Callable[[AdvantageInputs], Tensor]:
    """Load a custom advantage.

    Raises:
        UserError: it fails to load or does not accept its arguments.
    """
    function = _CheckedFunction("advantage", choice)

    def advantage(x: AdvantageInputs) -> Tensor:
        advantages = function(_copied(x))  # it may modify its inputs
        if not isinstance(advantages, Tensor) or not advantages.is_floating_point():
            raise function.error(f"returned {_kind(advantages)}; must be a float tensor, [P, G] or [P, G, L]")
        shape = x.token_shape
        if tuple(advantages.shape) not in (shape[:2], shape):
            raise function.error(
                f"returned {_kind(advantages)} for rewards {shape[:2]}; must be {shape[:2]}, one per completion, or "
                f"{shape}, one per token"
            )
        return advantages.detach()

    return advantage


def load_policy_loss(choice: CustomFunction) -> PolicyLoss:
    """Load a custom policy loss; it may return a tensor instead of a `LossOutput`.

    Raises:
        UserError: it fails to load or does not accept its arguments.
    """
    function = _CheckedFunction("policy_loss", choice)

    def policy_loss(x: LossInputs) -> LossOutput:
        out = function(x)
        out = LossOutput(per_token_loss=out) if isinstance(out, Tensor) else out
        if not isinstance(out, LossOutput):
            raise function.error(f"returned {_kind(out)}; must be a tensor [T] or a cohort.packing.batch.LossOutput")
        metrics = out.token_metrics or {}
        for name, tensor in {"per_token_loss": out.per_token_loss, **metrics}.items():
            if not isinstance(tensor, Tensor) or tensor.shape != x.logprobs.shape:
                raise function.error(
                    f"returned {_kind(tensor)} as {name}; must be one number per token, here "
                    f"{tuple(x.logprobs.shape)}, neither summed nor averaged"
                )
        if out.per_token_loss.dtype != x.logprobs.dtype:
            raise function.error(
                f"returned a loss of {out.per_token_loss.dtype}; must have the dtype of the logprobs, "
                f"{x.logprobs.dtype}"
            )
        return replace(out, token_metrics={name: tensor.detach() for name, tensor in metrics.items()})

    return policy_loss


def load_loss_weight(choice: CustomFunction) -> Callable[[IntArray, np.ndarray], FloatArray]:
    """Load a custom loss weight.

    Raises:
        UserError: it fails to load or does not accept its arguments.
    """
    function = _CheckedFunction("loss_weight", choice)

    def loss_weight(lengths_N: IntArray, included_N: np.ndarray) -> FloatArray:
        with np.errstate(all="ignore"):  # the result is checked below
            returned = function(lengths_N.copy(), included_N.copy())
        weights_N = _real_numbers(returned)
        if weights_N is None or weights_N.shape != lengths_N.shape or not np.isfinite(weights_N).all():
            shown = _kind(returned) if weights_N is None else weights_N.tolist()
            raise function.error(
                f"returned {shown} for {len(lengths_N)} completions; must be one finite number for each"
            )
        if weights_N[~included_N].any():
            raise function.error(
                "returned a nonzero weight for an excluded completion (included_N is False); must be 0"
            )
        return weights_N

    return loss_weight


def try_advantage(choice: CustomFunction, *, num_generations: int, num_rewards: int) -> None:
    """Run a custom advantage on small groups: with a signal, an unscored completion, equal rewards, and no rewards.

    Raises:
        UserError: it fails to load or breaks a rule.
    """
    advantage = load_advantage(choice)
    field = _field("advantage", choice)
    lengths_PG = torch.arange(2 * num_generations).reshape(2, -1) % 4 + 1
    rewards_PG = torch.arange(2.0 * num_generations, dtype=torch.float64).reshape(2, -1) + 1.0
    one_unscored_PG = rewards_PG.clone()
    one_unscored_PG[0, 0] = torch.nan
    no_signal_PG = torch.ones_like(rewards_PG)  # a group of equal rewards, and one without any
    no_signal_PG[1] = torch.nan
    for rewards in (rewards_PG, one_unscored_PG, no_signal_PG):
        x = _advantage_inputs(rewards, lengths_PG, num_rewards)
        advantages = advantage(x)
        scored = advantages[~rewards.isnan() if advantages.dim() == 2 else x.token_mask]
        if not scored.isfinite().all():
            raise UserError(f"{field}: returned NaN or infinity for a scored completion (rewards {rewards.tolist()})")
        if rewards is rewards_PG and not scored.any():
            more = "; raise rollout.num_generations above 1" if num_generations == 1 else ""
            raise UserError(
                f"{field}: returned 0 for every completion of groups of {num_generations} (rewards "
                f"{rewards.tolist()}), so nothing would be learned{more}"
            )


def try_loss_weight(choice: CustomFunction) -> None:
    """Run a custom loss weight on four completions, with some and with all of them excluded.

    Raises:
        UserError: it fails to load or breaks a rule.
    """
    loss_weight = load_loss_weight(choice)
    lengths_N = np.array([3, 1, 4, 2])
    if not loss_weight(lengths_N, np.array([True, True, False, True])).any():
        raise UserError(
            f"{_field('loss_weight', choice)}: returned 0 for every completion, so nothing would be learned"
        )
    loss_weight(lengths_N, np.zeros(4, dtype=bool))


def try_policy_loss(choice: CustomFunction, *, has_reference: bool) -> LossTraits:
    """Run a custom policy loss on three completions, on each of them alone, and on an empty micro-batch.

    It is tried off-policy, and on-policy as at the first update of every rollout.

    Raises:
        UserError: it fails to load or breaks a rule.
    """
    policy_loss, field = load_policy_loss(choice), _field("policy_loss", choice)
    on_policy, x = (_loss_inputs(has_reference=has_reference, policy_distance=distance) for distance in (0.0, 1.0))
    learns = False
    for tried, where in (
        (x, ""),
        (on_policy, " on-policy (x.logprobs == x.old_logprobs), as at every rollout's start"),
    ):
        losses, gradient = _with_gradient(policy_loss, tried)
        if not losses.isfinite().all() or not gradient.isfinite().all():
            raise UserError(
                f"{field}: the loss or its gradient is NaN or infinite{where}: losses {losses.tolist()}, gradient "
                f"{gradient[0].tolist()}"
            )
        learns |= bool(gradient.any())
    if not learns:
        raise UserError(
            f"{field}: the loss has no gradient with respect to the logprobs, so nothing would be learned; do not "
            f"detach x.logprobs"
        )
    x = _loss_inputs(has_reference=has_reference)
    completions = [slice(0, 3), slice(3, 4), slice(4, 8)]  # of `_LENGTHS`
    if not _is_separable(policy_loss, x, completions):
        raise UserError(
            f"{field}: a completion's loss depends on the other completions of its micro-batch, which are arbitrary; a "
            f"token's loss may depend on its own completion only (x.trajectory_ids)"
        )
    try:
        policy_loss(_part(x, slice(0, 0)))
    except UserError as error:
        raise UserError(f"{error}. The input was a micro-batch without tokens, which can occur in training") from error
    return loss_traits(policy_loss, has_reference=has_reference)


def loss_traits(policy_loss: PolicyLoss, *, has_reference: bool) -> LossTraits:
    """Find a policy loss's traits by running it on single tokens, and without advantages at several distances."""
    x = _loss_inputs(has_reference=has_reference)
    single = [slice(t, t + 1) for t in range(len(x.logprobs))]
    spread = (
        _loss_inputs(has_reference=has_reference, policy_distance=distance, length_factor=10)
        for distance in (0.0, 0.1, 1.0, 5.0)
    )
    without = (replace(each, advantages=torch.zeros_like(each.advantages)) for each in spread)
    return LossTraits(
        sequence_level=not _is_separable(policy_loss, x, single),
        learns_without_advantage=any(bool(_with_gradient(policy_loss, each)[1].any()) for each in without),
    )


class _CheckedFunction:
    """A custom function with its arguments bound. Its errors name the configuration key."""

    def __init__(self, kind: str, choice: CustomFunction):
        self._field, self._args = _field(kind, choice), choice.args
        self._function = load_function(choice.use, field=f"algorithm.{kind}")
        num_inputs = 2 if kind == "loss_weight" else 1
        try:
            signature = inspect.signature(self._function)
        except ValueError:  # some functions written in C have none
            return
        try:
            signature.bind(*[None] * num_inputs, **self._args)
        except TypeError as error:
            named = [p.name for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
            wrong = next((name for name in self._args if name not in named), "")
            raise self.error(f"{error}{suggest(wrong, sorted(named[num_inputs:]), 'Its arguments')}") from None

    def __call__(self, *inputs: Any) -> Any:
        try:
            return self._function(*inputs, **self._args)
        except torch.OutOfMemoryError:
            raise  # the engine retries with smaller micro-batches
        except Exception as error:
            raise self.error(f"raised {describe_error(error)} (at {error_location(error)})") from error

    def error(self, what: str) -> UserError:
        """Return an error that names the function."""
        return UserError(f"{self._field}: {what}")


def _field(kind: str, choice: CustomFunction) -> str:
    return f"algorithm.{kind}: {choice.use!r}"


def _kind(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _copied(x: AdvantageInputs) -> AdvantageInputs:
    values = {f.name: getattr(x, f.name) for f in fields(x)}
    copies: dict[str, Any] = {name: value.clone() for name, value in values.items() if value is not None}
    return replace(x, **copies)


def _real_numbers(value: Any) -> FloatArray | None:
    """Convert to a float64 array; None if that is not possible."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # rows of unequal length, a tensor with a gradient
        return None
    return array.astype(np.float64) if array.dtype.kind in "biuf" else None


def _advantage_inputs(rewards_PG: Tensor, lengths_PG: Tensor, num_rewards: int) -> AdvantageInputs:
    """Build inputs with these rewards, each split evenly into `num_rewards` parts."""
    tokens_PGL = torch.zeros(*lengths_PG.shape, int(lengths_PG.max()), dtype=torch.float64)
    tokens_PGL.scatter_(-1, (lengths_PG - 1).unsqueeze(-1), rewards_PG.nan_to_num(0.0).unsqueeze(-1))
    return AdvantageInputs(
        rewards=rewards_PG,
        reward_parts=(rewards_PG / num_rewards).unsqueeze(-1).repeat(1, 1, num_rewards),
        reward_weights=torch.ones(num_rewards, dtype=torch.float64),
        token_rewards=tokens_PGL,
        lengths=lengths_PG,
    )


def _loss_inputs(*, has_reference: bool, policy_distance: float = 1.0, length_factor: int = 1) -> LossInputs:
    """Build three completions with advantages of both signs and 0.

    Args:
        has_reference: whether there is a reference policy.
        policy_distance: distance between the policies: 0 is on-policy, 1 is up to 2 nats.
        length_factor: factor on the completions' lengths.
    """
    lengths, generator = length_factor * torch.tensor(_LENGTHS), torch.Generator().manual_seed(0)
    values = torch.rand(6, int(lengths.sum()), generator=generator)
    logprobs, *others = -2 * max(policy_distance, 1.0) * values[:4]
    old, sampling, reference = (logprobs.lerp(other, min(policy_distance, 1.0)) for other in others)
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=old,
        sampling_logprobs=sampling,
        reference_logprobs=reference if has_reference else None,
        entropy=values[4],
        advantages=torch.repeat_interleave(torch.tensor([1.0, 0.0, -0.5]), lengths),
        trajectory_ids=torch.repeat_interleave(torch.arange(len(lengths)), lengths),
    )


def _part(x: LossInputs, tokens: slice) -> LossInputs:
    """Select some of the tokens and renumber their completions from 0, as in a micro-batch."""
    parts: dict[str, Any] = {
        name: getattr(x, name)[tokens] for name in LossInputs.__slots__ if getattr(x, name) is not None
    }
    parts["trajectory_ids"] = parts["trajectory_ids"].unique(return_inverse=True)[1]
    return replace(x, **parts)


def _with_gradient(policy_loss: PolicyLoss, x: LossInputs) -> tuple[Tensor, Tensor]:
    """Return the losses [T], and the gradients [2, T] of their sum with respect to logprobs and entropy."""
    leaves = [t.clone().requires_grad_() for t in (x.logprobs, x.entropy)]
    losses = policy_loss(replace(x, logprobs=leaves[0], entropy=leaves[1])).per_token_loss
    if not losses.requires_grad:
        return losses, torch.zeros(2, len(losses))
    gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
    return losses.detach(), torch.stack([torch.zeros(len(losses)) if g is None else g for g in gradients])


def _is_separable(policy_loss: PolicyLoss, x: LossInputs, parts: list[slice]) -> bool:
    """Whether each part computed alone has the same losses and gradients as in the whole."""
    losses, gradient = _with_gradient(policy_loss, x)
    alone = [_with_gradient(policy_loss, _part(x, part)) for part in parts]
    return all(
        torch.allclose(one, losses[part], rtol=1e-4, atol=1e-6)
        and torch.allclose(one_gradient, gradient[:, part], rtol=1e-4, atol=1e-6)
        for (one, one_gradient), part in zip(alone, parts, strict=True)
    )
