"""Turn scored groups into training sequences: advantages over groups, loss weights over the whole step.

P prompts, G generations, N = P x G completions, K rewards, L loss tokens of the longest completion. Tokens outside the
loss mask are ignored here.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from cohort.algorithms.build_algorithm import Algorithm
from cohort.algorithms.regularizers import Coefficients
from cohort.algorithms.statistics import AdvantageInputs
from cohort.errors import TrainingError
from cohort.processes.this_process import gc_paused
from cohort.records import (
    FloatArray,
    ForwardOnlyOutputs,
    IntArray,
    RolloutGroup,
    ScoredGroup,
    TokenSequence,
    TrainSequence,
    Trajectory,
    join_calls,
    starts_with,
)


def drop_zero_gradient(sequences: Sequence[TrainSequence], algorithm: Algorithm) -> list[TrainSequence]:
    """Drop sequences without a gradient; the step's gradient does not change.

    These are sequences with loss weight 0, and those with advantage 0 if the loss has no other term: all policy losses
    are proportional to the advantage. They still count in the denominators of the loss weights. If the loss is
    sequence-level, a trajectory is kept or dropped as a whole.
    """

    def unit(s: TrainSequence) -> int:
        return s.trajectory if algorithm.sequence_level else s.index

    kept = {
        unit(s)
        for s in sequences
        if _has_any(s.loss_weights) and (algorithm.learns_without_advantage or _has_any(s.advantages))
    }
    return [s for s in sequences if unit(s) in kept]


def _has_any(values: FloatArray) -> bool:
    """Whether any value is nonzero. Checks the first one before converting all of them to bool."""
    return bool(values[:1].any() or values.any())


@gc_paused()
def build_sequences(groups: Sequence[RolloutGroup | ScoredGroup]) -> list[TrainSequence]:
    """Build the training sequences of all trajectories, in order, with advantages and loss weights of 0.

    Broken trajectories have none.

    Raises:
        TrainingError: a model call sampled no tokens.
    """
    sequences: list[TrainSequence] = []
    num_trajectories = 0
    for g, group in enumerate(groups):
        if all(_is_completion(group.prompt.token_ids, trajectory) for trajectory in group.trajectories):
            sequences += _completions(group, group=g, trajectory=num_trajectories, index=len(sequences))
            num_trajectories += len(group.trajectories)
            continue
        trajectories = [_join_calls(trajectory) for trajectory in group.trajectories]
        prefix = _shared_prefix(group.prompt.token_ids, trajectories)
        for number, joined in enumerate(trajectories, start=num_trajectories):
            for tokens in joined:
                zeros = np.zeros(len(tokens.sampling_logprobs))
                sequences.append(
                    TrainSequence(
                        token_ids=tokens.token_ids,
                        loss_mask=tokens.loss_mask,
                        sampling_logprobs=tokens.sampling_logprobs,
                        advantages=zeros,
                        loss_weights=zeros,
                        shared_prefix_tokens=len(prefix) if _begins_with(tokens, prefix) else 0,
                        index=len(sequences),
                        group=g,
                        trajectory=number,
                    )
                )
        num_trajectories += len(trajectories)
    return sequences


def _is_completion(prompt_ids: IntArray, trajectory: Trajectory) -> bool:
    """Whether a trajectory is one trained call with exactly the prompt as context."""
    if trajectory.is_broken or len(trajectory.calls) != 1:
        return False
    (call,) = trajectory.calls
    is_prompt = call.context_ids is prompt_ids or np.array_equal(call.context_ids, prompt_ids)
    return is_prompt and call.trained and len(call.token_ids) > 0


def _completions(of: RolloutGroup | ScoredGroup, *, group: int, trajectory: int, index: int) -> Iterator[TrainSequence]:
    """Build the sequences of completions of one prompt, which are parts of a few arrays for all of them."""
    prompt_ids, calls = of.prompt.token_ids, [t.calls[0] for t in of.trajectories]
    num_shared, sizes = len(prompt_ids), [len(call.token_ids) for call in calls]
    token_ids = np.concatenate(
        [part for call in calls for part in (prompt_ids, call.token_ids)], dtype=np.int32, casting="same_kind"
    )
    mask, zeros = np.arange(num_shared + max(sizes)) >= num_shared, np.zeros(max(sizes))
    start = 0
    for n, (call, size) in enumerate(zip(calls, sizes, strict=True)):
        end = start + num_shared + size
        yield TrainSequence(
            token_ids=token_ids[start:end],
            loss_mask=mask[: end - start],
            sampling_logprobs=call.sampling_logprobs,
            advantages=zeros[:size],
            loss_weights=zeros[:size],
            shared_prefix_tokens=num_shared,
            index=index + n,
            group=group,
            trajectory=trajectory + n,
        )
        start = end


def _join_calls(trajectory: Trajectory) -> list[TokenSequence]:
    if trajectory.is_broken:
        return []
    if not all(len(call.token_ids) for call in trajectory.calls):
        raise TrainingError("rollout: a completion has no tokens; an empty one is an end-of-sequence token")
    return join_calls(trajectory.calls)


def _begins_with(sequence: TokenSequence, prefix: IntArray) -> bool:
    """Whether a sequence starts with `prefix` and trains none of it."""
    return starts_with(sequence.token_ids, prefix) and not sequence.loss_mask[: len(prefix)].any()


def _shared_prefix(prompt_ids: IntArray, trajectories: Sequence[Sequence[TokenSequence]]) -> IntArray:
    """Return the tokens that a group computes once: the prompt, or what the trajectories' first contexts begin with.

    Environments and agents write their first contexts themselves: the prompt of the row need not be a prefix of them.
    """
    contexts = [joined[0].token_ids[: int(np.argmax(joined[0].loss_mask))] for joined in trajectories if joined]
    common = contexts[0] if contexts else prompt_ids
    for context in contexts[1:]:
        length = min(len(common), len(context))
        common = common[: int(np.argmin(np.append(common[:length] == context[:length], False)))]
    has_prompt = any(_begins_with(sequence, prompt_ids) for joined in trajectories for sequence in joined)
    return prompt_ids if has_prompt and len(prompt_ids) >= len(common) else common


@gc_paused()
def assign_advantages(
    groups: Sequence[ScoredGroup],
    algorithm: Algorithm,
    sequences: Sequence[TrainSequence],
    outputs: ForwardOnlyOutputs,
    *,
    reward_weights: Mapping[str, float],
    coefficients: Coefficients,
) -> list[TrainSequence]:
    """Set advantages, loss weights and returns of a step's sequences.

    Args:
        groups: P scored groups of G completions each.
        algorithm: provides the advantage and the loss weight.
        sequences: `build_sequences(groups)`.
        outputs: forward-only outputs that the algorithm needs, for all sequences.
        reward_weights: weight of each reward, for advantages that treat rewards separately.
        coefficients: KL coefficient for KL in the reward.

    Returns:
        The sequences of P x G trajectories. Loss weights are 0 for trajectories that no reward scored, for truncated
        ones if the algorithm masks them, and for those without loss tokens.
    """
    penalties = {index: coefficients.kl * kl for index, kl in reward_kl_penalty(algorithm, outputs).items()}
    x = advantage_inputs(
        groups, sequences, outputs, reward_weights, penalties, with_tokens=algorithm.reads_token_rewards
    )
    lengths_N = x.lengths.flatten().numpy()
    included_N = ~x.rewards.flatten().isnan().numpy() & (lengths_N > 0)
    advantages_NL = _checked(algorithm.advantage(x), x).flatten(0, 1).numpy()
    returns_NL = None if algorithm.critic is None else algorithm.critic.returns(x).flatten(0, 1).numpy()
    if algorithm.mask_truncated:
        included_N &= np.array([t.end != "length" for group in groups for t in group.trajectories])
    weights_N = algorithm.loss_weight(lengths_N, included_N)
    if algorithm.top_entropy_quantile < 1:
        counted_NL = included_N[:, None] & (np.arange(advantages_NL.shape[1]) < lengths_N[:, None])
        entropies_NL = _padded(outputs.entropies, sequences, x.lengths.numpy()).reshape(advantages_NL.shape)
        advantages_NL = advantages_NL * high_entropy(entropies_NL, counted_NL, share=algorithm.top_entropy_quantile)
    weights_NL, zeros_NL = (np.broadcast_to(x_N1, advantages_NL.shape) for x_N1 in (weights_N[:, None], 0.0))
    no_returns = np.zeros(0)
    return [
        TrainSequence(
            token_ids=s.token_ids,
            loss_mask=s.loss_mask,
            sampling_logprobs=s.sampling_logprobs,
            advantages=(advantages_NL if included_N[s.trajectory] else zeros_NL)[place],
            loss_weights=weights_NL[place],
            returns=no_returns if returns_NL is None or not included_N[s.trajectory] else returns_NL[place],
            shared_prefix_tokens=s.shared_prefix_tokens,
            index=s.index,
            group=s.group,
            trajectory=s.trajectory,
        )
        for s, place in zip(sequences, _places(sequences), strict=True)
    ]


def reward_kl_penalty(algorithm: Algorithm, outputs: ForwardOnlyOutputs) -> dict[int, FloatArray]:
    """Return the KL penalty on rewards, before its coefficient, by sequence index; empty if there is none."""
    if algorithm.reward_kl is None:
        return {}
    return {
        index: algorithm.reward_kl(
            torch.from_numpy(logprobs), torch.from_numpy(outputs.reference_logprobs[index])
        ).numpy()
        for index, logprobs in outputs.logprobs.items()
    }


def mean_reference_kl(algorithm: Algorithm, outputs: ForwardOnlyOutputs) -> dict[str, float]:
    """Return the metric `kl` for KL in the reward: its mean over the step's tokens, before the coefficient."""
    of_tokens = [*reward_kl_penalty(algorithm, outputs).values()]
    return {"kl": float(np.concatenate(of_tokens).mean())} if of_tokens else {}


def high_entropy(entropies_NL: FloatArray, counted_NL: np.ndarray, *, share: float) -> np.ndarray:
    """Return the mask [N, L] of the step's highest-entropy tokens ("Beyond the 80/20 rule", arXiv:2506.01939).

    Args:
        entropies_NL: [N, L] in nats.
        counted_NL: [N, L] bool, tokens of included completions; others are never selected.
        share: fraction of the counted tokens: those at or above the quantile 1 - share, at least one.
    """
    if not counted_NL.any():
        return counted_NL
    return counted_NL & (entropies_NL >= np.quantile(entropies_NL[counted_NL], 1 - share))


def advantage_inputs(
    groups: Sequence[ScoredGroup],
    sequences: Sequence[TrainSequence],
    outputs: ForwardOnlyOutputs,
    reward_weights: Mapping[str, float],
    penalties: Mapping[int, FloatArray],
    *,
    with_tokens: bool = True,
) -> AdvantageInputs:
    """Collect the inputs of the advantage for P groups of G completions each.

    Args:
        groups: scored.
        sequences: sequences of all completions.
        outputs: forward-only outputs of the sequences, if the algorithm needs them.
        reward_weights: weight of each part of the reward.
        penalties: penalty on the reward of each token, by sequence index.
        with_tokens: whether the algorithm reads the rewards of tokens. They take more memory than all else.

    Raises:
        TrainingError: there are no groups, or they are not of one size.
    """
    sizes = sorted({len(group.trajectories) for group in groups})
    if len(sizes) != 1:
        what = f"groups of {' and '.join(map(str, sizes))} completions" if sizes else "no groups"
        raise TrainingError(f"rollout: a step of {what}; it must have groups of one size (rollout.num_generations)")
    rewards_PG = np.stack([group.rewards for group in groups])
    lengths_N = np.zeros(rewards_PG.size, dtype=np.int64)
    np.add.at(lengths_N, [s.trajectory for s in sequences], [s.num_loss_tokens for s in sequences])
    lengths_PG = lengths_N.reshape(rewards_PG.shape)
    scored_PG, trained_PG = ~np.isnan(rewards_PG), lengths_PG > 0
    with_steps = [
        (p, g, trajectory)
        for p, group in enumerate(groups)
        for g, trajectory in enumerate(group.trajectories)
        if trajectory.step_rewards and scored_PG[p, g] and trained_PG[p, g]
    ]
    is_at_one_token = not penalties and not with_steps
    tokens_PGL = None
    if with_tokens or not is_at_one_token:
        tokens_PGL = np.zeros((*lengths_PG.shape, max(1, lengths_PG.max())))
        last_PG = (*np.indices(lengths_PG.shape), lengths_PG - 1)
        tokens_PGL[last_PG] = np.where(scored_PG & trained_PG, rewards_PG, 0.0)
        for p, g, trajectory in with_steps:
            _move_step_rewards(tokens_PGL[p, g], trajectory, reward_weights)
        if penalties:
            tokens_PGL -= np.where(scored_PG[..., None], _padded(penalties, sequences, lengths_PG), 0.0)
    # without a trained token there is none to bear the reward, with which the group is still compared
    sums_PG = rewards_PG + 0.0 if tokens_PGL is None or is_at_one_token else tokens_PGL.sum(axis=-1)
    totals_PG = np.where(trained_PG, sums_PG, rewards_PG)
    parts = [np.stack([g.reward_parts[name] for g in groups]) for name in reward_weights]
    return AdvantageInputs(
        rewards=torch.from_numpy(np.where(scored_PG, totals_PG, np.nan)),
        reward_parts=torch.from_numpy(np.stack(parts, axis=-1) if parts else rewards_PG[..., None]),
        reward_weights=torch.tensor([*reward_weights.values()] or [1.0], dtype=torch.float64),
        token_rewards=None if tokens_PGL is None else torch.from_numpy(tokens_PGL),
        lengths=torch.from_numpy(lengths_PG),
        values=torch.from_numpy(_padded(outputs.values, sequences, lengths_PG)) if outputs.values else None,
    )


def _move_step_rewards(tokens_L: FloatArray, trajectory: Trajectory, reward_weights: Mapping[str, float]) -> None:
    """Move the step rewards, which the last token has in its reward, to the last token of their turns. In place."""
    rewards = np.array(trajectory.step_rewards) * sum(reward_weights[name] for name in trajectory.rewards)
    ends = np.cumsum([len(call.token_ids) for call in trajectory.trained_calls]) - 1
    tokens_L[ends] += rewards
    tokens_L[ends[-1]] -= rewards.sum()


def _places(sequences: Sequence[TrainSequence]) -> list[tuple[int, slice]]:
    """Return where in [N, L] the loss tokens of each sequence are: a trajectory's sequences follow each other."""
    filled: dict[int, int] = {}
    places = []
    for s in sequences:
        start = filled.get(s.trajectory, 0)
        filled[s.trajectory] = start + s.num_loss_tokens
        places.append((s.trajectory, slice(start, filled[s.trajectory])))
    return places


def _padded(values: Mapping[int, FloatArray], sequences: Sequence[TrainSequence], lengths_PG: IntArray) -> FloatArray:
    """Values of sequences, by index, as [P, G, L] with zeros beyond each completion."""
    padded_NL = np.zeros((lengths_PG.size, max(1, lengths_PG.max())))
    for s, place in zip(sequences, _places(sequences), strict=True):
        padded_NL[place] = values[s.index]
    return padded_NL.reshape(*lengths_PG.shape, -1)


def _checked(advantages: Tensor, x: AdvantageInputs) -> Tensor:
    """Expand advantages [P, G] or [P, G, L] to [P, G, L].

    Raises:
        TrainingError: that of a scored completion is NaN or infinite.
    """
    is_per_token = advantages.dim() == 3
    if not advantages[x.token_mask if is_per_token else ~x.rewards.isnan()].isfinite().all():
        raise TrainingError("algorithm.advantage: the advantage of a scored completion is NaN or infinite")
    return (advantages if is_per_token else advantages.unsqueeze(-1)).double().expand(x.token_shape)
