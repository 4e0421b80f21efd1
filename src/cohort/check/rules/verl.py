"""verl's batch rules: numbers in, its own verdict out. Read in verl 0.9.

A batch is `train_batch_size` prompts with n completions each; a mini-batch is one optimizer step.
"""

from dataclasses import dataclass, replace
from typing import Any

from cohort.check.rules.start import Start, refused

DEFAULT_VERSION = "0.9"
_USUAL_MICRO_BATCHES = (8, 4, 2, 1)
_ACTOR_NEEDS_ONE = (
    "[actor] Please set at least one of 'actor.ppo_micro_batch_size' or 'actor.ppo_micro_batch_size_per_gpu' if "
    "use_dynamic_bsz is not enabled."
)
_ACTOR_HAS_BOTH = (
    "[actor] You have set both 'actor.ppo_micro_batch_size' AND 'actor.ppo_micro_batch_size_per_gpu'. Please remove "
    "'actor.ppo_micro_batch_size' because only '*_ppo_micro_batch_size_per_gpu' is supported (the former is "
    "deprecated)."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlBatch:
    """The numbers that verl's rules look at. None: not said."""

    train_batch_size: int = 1024  # prompts
    generations: int = 1
    mini_batch_size: int = 256  # prompts
    micro_batch_size: int | None = None  # deprecated: over all GPUs
    micro_batch_size_per_gpu: int | None = None
    rollout_micro: tuple[int | None, int | None] = (None, None)  # log_prob_micro_batch_size, .._per_gpu
    reference_micro: tuple[int | None, int | None] = (None, None)
    dynamic: bool = False  # use_dynamic_bsz
    uses_reference: bool = False
    sequence_parallel: int = 1  # Ulysses
    model_parallel: int | None = None  # Megatron's tensor x pipeline; None: another engine
    context_parallel: int = 1
    rollout_tensor_parallel: int = 2  # of the sampling engine
    rollout_other_parallel: int = 1  # its data x pipeline parallel


def verl_start(batch: VerlBatch, num_gpus: int) -> Start:
    """What verl does with so many GPUs on all nodes together."""
    message = _validated(batch, num_gpus) or _workers(batch, num_gpus)
    if message:
        return refused(message)
    return Start(
        starts=True,
        generation_batch_size=batch.train_batch_size * batch.generations,
        steps_per_generation=batch.train_batch_size // batch.mini_batch_size,
        global_batch_size=batch.mini_batch_size * batch.generations,
        prompts=batch.train_batch_size,
    )


def missing_sizes(batch: VerlBatch, num_gpus: int) -> tuple[str, ...]:
    """The micro-batches of logprobs that nobody has set, as large as the actor's, where that makes it start."""
    whole, size = batch.micro_batch_size, batch.micro_batch_size_per_gpu
    size = size or (max(1, whole // num_gpus) if whole else None)
    if size is None:
        return _missing_all(batch, num_gpus)
    wanted = {"rollout": batch.rollout_micro, **({"ref": batch.reference_micro} if batch.uses_reference else {})}
    missing = [name for name, micro in wanted.items() if micro == (None, None)]
    fields = {"rollout": "rollout_micro", "ref": "reference_micro"}
    if not missing:
        return ()
    given: dict[str, Any] = {fields[name]: (None, size) for name in missing}
    if not verl_start(replace(batch, **given), num_gpus).starts:
        return ()
    keys = (f"actor_rollout_ref.{name}.log_prob_micro_batch_size_per_gpu={size}" for name in missing)
    return (" and ".join(keys),)


def _missing_all(batch: VerlBatch, num_gpus: int) -> tuple[str, ...]:
    """The actor's micro-batch too: the largest that it starts with."""
    for size in _USUAL_MICRO_BATCHES:
        given = replace(batch, micro_batch_size_per_gpu=size)
        key = f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={size}"
        if verl_start(given, num_gpus).starts:
            return (key,)
        others = missing_sizes(given, num_gpus)
        if others:
            return (f"{key} and {others[0]}",)
    return ()


def _validated(batch: VerlBatch, num_gpus: int) -> str | None:
    """The first complaint of verl's own validation, before anything is started."""
    if batch.dynamic:
        return None
    smallest = num_gpus
    if batch.model_parallel is not None:
        parallel = batch.model_parallel * batch.context_parallel
        if num_gpus % parallel != 0:
            return (
                f"n_gpus ({num_gpus}) must be divisible by model_parallel_size ({batch.model_parallel}) times "
                f"context_parallel_size ({batch.context_parallel})"
            )
        smallest = num_gpus // parallel * (batch.micro_batch_size_per_gpu or 1)
    completions = batch.train_batch_size * batch.generations
    if completions % smallest != 0:
        return f"real_train_batch_size ({completions}) must be divisible by minimal possible batch size ({smallest})"
    if batch.micro_batch_size is not None and batch.micro_batch_size_per_gpu is not None:
        return _ACTOR_HAS_BOTH
    if batch.micro_batch_size is None and batch.micro_batch_size_per_gpu is None:
        return _ACTOR_NEEDS_ONE
    if batch.train_batch_size < batch.mini_batch_size:
        return (
            f"train_batch_size ({batch.train_batch_size}) must be >= actor.ppo_mini_batch_size "
            f"({batch.mini_batch_size})"
        )
    return _micro_batches(batch, num_gpus)


def _micro_batches(batch: VerlBatch, num_gpus: int) -> str | None:
    micro, mini = batch.micro_batch_size, batch.mini_batch_size
    if micro is not None:
        if mini % micro != 0:
            return f"ppo_mini_batch_size ({mini}) must be divisible by ppo_micro_batch_size ({micro})"
        if micro * batch.sequence_parallel < num_gpus:
            return (
                f"ppo_micro_batch_size ({micro}) * ulysses_sequence_parallel_size ({batch.sequence_parallel}) must be "
                f">= n_gpus ({num_gpus})"
            )
    parts = [("ref", batch.reference_micro)] if batch.uses_reference else []
    for name, (whole, per_gpu) in [*parts, ("rollout", batch.rollout_micro)]:
        section, key = f"actor_rollout_ref.{name}", "log_prob_micro_batch_size"
        if whole is None and per_gpu is None:
            return f"[{section}] Please set at least one of '{section}.{key}' or '{section}.{key}_per_gpu'."
        if whole is not None and per_gpu is not None:
            return (
                f"[{section}] You have set both '{section}.{key}' AND '{section}.{key}_per_gpu'. Please remove "
                f"'{section}.{key}' because only '*_{key}_per_gpu' is supported (the former is deprecated)."
            )
    return None


def _workers(batch: VerlBatch, num_gpus: int) -> str | None:
    """What the workers assert after they have started."""
    engine = batch.rollout_tensor_parallel * batch.rollout_other_parallel
    if num_gpus % engine != 0:
        return f"rollout world_size: {num_gpus} is not divisible by infer_world_size: {engine}"
    if batch.model_parallel is None:
        ranks = num_gpus // batch.sequence_parallel
    else:
        ranks = num_gpus // (batch.model_parallel * batch.context_parallel)
    mini_batch_size = batch.mini_batch_size * batch.generations
    if ranks == 0 or mini_batch_size % ranks != 0:
        return f"Got {mini_batch_size=} and self.engine.get_data_parallel_size()={ranks}"
    return None
