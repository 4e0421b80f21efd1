"""TRL's batch rules, version by version: numbers in, its own verdict out.

Read in the sources of TRL 0.15 to 1.16 and held to them: `tests/check/test_check_trl.py` compares every regime with the
real one's `GRPOConfig` (or, up to 0.17, with a table made of its trainer's check). W is the number of processes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from cohort.check.rules.keys import Version
from cohort.check.rules.start import Start, divisors

BOTH_SET = "'generation_batch_size' and 'steps_per_generation' can not be both configured at the same time"
EVAL_BATCH = "per_device_eval_batch_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlBatch:
    """The numbers that TRL's rules look at. Batch sizes count completions. None: not said."""

    per_device: int = 8
    accumulation: int = 1
    generations: int = 8
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    evaluates: bool = False
    per_device_eval: int = 8
    generations_eval: int | None = None
    tensor_parallel: int = 1  # of vLLM inside the training processes


def trl_start(batch: TrlBatch, world_size: int, version: Version) -> Start:
    """What TRL of this version does with W = `world_size` processes."""
    message, field = next(refusals(batch, world_size, version), (None, None))
    if message is not None:
        return Start(starts=False, message=message, field=field)
    micro_step = batch.per_device * world_size
    size = batch.generation_batch_size or micro_step * _steps(batch, version)
    return Start(
        starts=True,
        generation_batch_size=size,
        steps_per_generation=size // micro_step,
        global_batch_size=micro_step * batch.accumulation,
        prompts=size // batch.generations,
    )


def _steps(batch: TrlBatch, version: Version) -> int:
    """Micro-steps of one generation batch; up to 0.16 each one samples anew, whatever the accumulation."""
    return batch.steps_per_generation or (1 if version < (0, 17) else batch.accumulation)


def refusals(batch: TrlBatch, world_size: int, version: Version) -> Iterator[tuple[str, str | None]]:
    """Every message with which this version would refuse, in its order, and the key that each is about."""
    given = batch.generation_batch_size
    micro_step = batch.per_device * world_size
    if given is not None and batch.steps_per_generation is not None:
        yield BOTH_SET, "generation_batch_size"
    # up to 0.19.0 operator precedence makes it `(given % per_device) * W`
    rest = given % (batch.per_device if version < (0, 19, 1) else micro_step) if given is not None else 0
    if rest:
        text = f"generation_batch_size ({given}) must be divisible by the global batch size ({micro_step})."
        yield text, "generation_batch_size"
    yield from _groups_to_0_19(batch, world_size, version) if version < (0, 20) else _groups(batch, world_size, version)
    if version >= (0, 18) and world_size % batch.tensor_parallel:
        name = "tensor_parallel_size" if version >= (0, 28) else "vllm_tensor_parallel_size"
        text = f"{name} ({batch.tensor_parallel}) must divide world size ({world_size}) evenly."
        yield text, "vllm_tensor_parallel_size"


def _groups(batch: TrlBatch, world_size: int, version: Version) -> Iterator[tuple[str, str | None]]:
    """Whole groups of completions, from 0.20 on; 0.20 and 0.21 do not look at evaluation."""
    size = batch.generation_batch_size or batch.per_device * world_size * _steps(batch, version)
    generations, rule = batch.generations, f"num_generations ({batch.generations})."
    if version >= (0, 26, 2):
        generations = batch.generations_eval or batch.generations
        rule = f"the number of generations used for evaluation ({generations})."
    if batch.evaluates and version >= (0, 22) and batch.per_device_eval * world_size % generations:
        text = f"The global eval batch size ({batch.per_device_eval} * {world_size}) must be divisible by {rule}"
        yield text, EVAL_BATCH
    if size % batch.generations:
        yield f"generation_batch_size ({size}) must be divisible by num_generations ({batch.generations}).", None
    if batch.generations < 2:
        yield _too_few(batch.generations), None


def _groups_to_0_19(batch: TrlBatch, world_size: int, version: Version) -> Iterator[tuple[str, str | None]]:
    """Whole groups of completions, up to 0.19, where the message lists the numbers that would do."""
    shown: tuple[int, ...] = (world_size, batch.per_device)
    if version >= (0, 17):
        if batch.generations < 2:
            yield _too_few(batch.generations), None
        given = batch.generation_batch_size
        steps = _steps(batch, version) if given is None else given // (batch.per_device * world_size)
        shown = (*shown, steps)
    train, evaluation = ("effective train", "effective eval") if version >= (0, 17) else ("global train", "global eval")
    evaluation = "global eval" if version >= (0, 18) else evaluation
    texts = (
        _uneven(train, shown, batch.generations, version, counted=batch.generation_batch_size),
        _uneven(evaluation, (world_size, batch.per_device_eval), batch.generations, version),
    )
    if texts[0]:
        yield texts[0], None
    if texts[1] and batch.evaluates:
        yield texts[1], EVAL_BATCH


def _too_few(generations: int) -> str:
    return (
        f"GRPO requires at least 2 generations per prompt to calculate the advantages. You provided {generations}, "
        f"which is less than the minimum required."
    )


def _uneven(
    name: str, sizes: tuple[int, ...], generations: int, version: Version, *, counted: int | None = None
) -> str | None:
    """The message where the product of `sizes` (or `counted` in its place) holds no whole groups."""
    possible = divisors(*(sizes if counted is None else (counted,)))
    if generations in possible:
        return None
    given = name if version >= (0, 17) else name.removeprefix("global ")
    return (
        f"The {name} batch size ({' x '.join(map(str, sizes))}) must be evenly divisible by the number of generations "
        f"per prompt ({generations}). Given the current {given} batch size, the valid values for the number of "
        f"generations are: {possible}."
    )
