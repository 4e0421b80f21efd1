"""ms-swift's batch rules: numbers in, its own verdict out. Read in ms-swift 4.6.

On transformers it follows TRL's batches with rules and words of its own; on Megatron it counts data-parallel ranks.
"""

from dataclasses import dataclass

from cohort.check.rules.start import Start, divisors, refused

DEFAULT_VERSION = "4.6"


@dataclass(frozen=True, slots=True, kw_only=True)
class SwiftBatch:
    """The numbers of a run on transformers. Sizes count completions. None: not said."""

    per_device: int = 1
    accumulation: int = 1
    generations: int = 8
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    evaluates: bool = False
    per_device_eval: int = 1
    generations_eval: int | None = None
    tensor_parallel: int = 1  # of vLLM inside the training processes
    has_teacher: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronBatch:
    """The numbers of a run on Megatron."""

    micro_batch_size: int = 1
    global_batch_size: int = 16
    generations: int = 8
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    model_parallel: int = 1  # tensor x pipeline x context parallel


def swift_start(batch: SwiftBatch, world_size: int) -> Start:
    """What ms-swift does with W = `world_size` training processes."""
    if batch.generations == 1 and not batch.has_teacher:
        return refused("num_generations must be greater than 1 for GRPO")
    micro_step = batch.per_device * world_size
    size, steps = batch.generation_batch_size, batch.steps_per_generation
    factors = [size] if size is not None else []
    if size is None:
        steps = batch.accumulation if steps is None else steps
        size, factors = micro_step * steps, [batch.per_device, world_size, steps]
    elif steps is None:
        if size % micro_step != 0:
            return refused(f"generation_batch_size ({size}) must be divisible by the global batch size ({micro_step}).")
        steps = size // micro_step
    elif size != micro_step * steps:
        return refused(
            f"generation_batch_size ({size}) must equal per_device_train_batch_size * world_size * "
            f"steps_per_generation = {micro_step * steps}."
        )
    if batch.generations > 1:
        if size % batch.generations != 0:
            return refused(
                f"generation_batch_size ({size}) must be evenly divisible by num_generations ({batch.generations}). "
                f"Valid values: {divisors(*factors)}."
            )
        message = eval_refusal(batch, world_size) if batch.evaluates else None
        if message:
            return refused(message, field="per_device_eval_batch_size")
    if world_size % batch.tensor_parallel:
        return refused(
            f"vllm_tensor_parallel_size ({batch.tensor_parallel}) must divide world size ({world_size}) evenly.",
            field="vllm_tensor_parallel_size",
        )
    return Start(
        starts=True,
        generation_batch_size=size,
        steps_per_generation=steps,
        global_batch_size=micro_step * batch.accumulation,
        prompts=size // batch.generations,
    )


def eval_refusal(batch: SwiftBatch, world_size: int) -> str | None:
    """What ms-swift says to this evaluation batch once there is an evaluation set; None: it accepts it."""
    generations = batch.generations_eval or batch.generations
    size = batch.per_device_eval * world_size
    if size % generations == 0:
        return None
    possible = divisors(batch.per_device_eval, world_size, smallest=1)
    return (
        f"The global eval batch size ({world_size} x {batch.per_device_eval}) must be evenly divisible by "
        f"num_generations_eval ({generations}). Valid values: {possible}."
    )


def megatron_start(batch: MegatronBatch, world_size: int) -> Start:
    """What ms-swift on Megatron does with W = `world_size` GPUs that train."""
    size, steps = batch.generation_batch_size, batch.steps_per_generation
    if size is not None and steps is not None:
        expected = batch.global_batch_size * steps
        if size != expected:
            return refused(
                f"generation_batch_size ({size}) must equal global_batch_size ({batch.global_batch_size}) * "
                f"steps_per_generation ({steps}) = {expected}."
            )
    elif size is not None:
        if size % batch.global_batch_size != 0:
            return refused(
                f"generation_batch_size ({size}) must be divisible by global_batch_size ({batch.global_batch_size})"
            )
        steps = size // batch.global_batch_size
    else:
        steps = 1 if steps is None else steps
        size = batch.global_batch_size * steps
    if batch.generations > 1 and size % batch.generations != 0:
        return refused(f"generation_batch_size ({size}) must be divisible by num_generations ({batch.generations}).")
    message = _spread(batch, size, world_size)
    if message:
        return refused(message)
    return Start(
        starts=True,
        generation_batch_size=size,
        steps_per_generation=steps,
        global_batch_size=batch.global_batch_size,
        prompts=size // batch.generations,
    )


def _spread(batch: MegatronBatch, size: int, world_size: int) -> str | None:
    """Why the prompts of a generation batch do not spread over the data-parallel ranks; None: they do."""
    ranks = world_size // batch.model_parallel
    if world_size % batch.model_parallel:
        return (
            f"world size ({world_size}) is not divisible by tensor x pipeline x context parallel "
            f"({batch.model_parallel})"
        )
    prompts = size // batch.generations
    if prompts % ranks != 0:
        return (
            f"num_rollout_prompt ({prompts}) = generation_batch_size ({size}) // num_generations ({batch.generations}) "
            f"must be divisible by dp_size ({ranks})."
        )
    per_rank = prompts // ranks
    if per_rank < 1:
        return (
            f"per_device_num_rollout_prompt ({per_rank}) must be >= 1, please adjust "
            f"generation_batch_size/steps_per_generation/num_generations."
        )
    if per_rank % batch.micro_batch_size != 0:
        return (
            f"Per-device rollout prompt count ({per_rank}) = (generation_batch_size ({size}) // num_generations "
            f"({batch.generations})) // dp_size ({ranks}) must be divisible by micro_batch_size "
            f"({batch.micro_batch_size})."
        )
    if size // world_size < 1:
        return f"per_device_generation_batch_size ({size // world_size}) must be >= 1."
    return None
