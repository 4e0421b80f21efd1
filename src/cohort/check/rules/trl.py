"""TRL's batch rules, version by version: numbers in, its own verdict out.

Read in the sources of TRL 0.15 to 1.16 and held to them: `tests/check/test_check_trl.py` compares every regime with the
real one's `GRPOConfig` (or, up to 0.17, with a table made of its trainer's check). W is the number of processes.
"""

import math
from dataclasses import dataclass, replace

from cohort.check.rules.start import Start, divisors, refused

Version = tuple[int, ...]
DEFAULT_VERSION = "1.16"
OLDEST, NEWEST = (0, 15), (1, 16)  # whose rules are known

BOTH_SET = "'generation_batch_size' and 'steps_per_generation' can not be both configured at the same time"
_AUTO_FIND = (
    "auto_find_batch_size is not supported by GRPO, because the generation batch must contain full prompt groups of "
    "num_generations completions, and reducing the batch size on out-of-memory breaks this invariant. Set "
    "auto_find_batch_size=False and lower per_device_train_batch_size instead."
)


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
    auto_find_batch_size: bool = False


def parse_version(text: str) -> Version:
    """`0.18.0` as (0, 18, 0); what is not a number (`1.2.dev0`) ends it."""
    parts: list[int] = []
    for part in text.split("."):
        if not part.isdecimal():
            break
        parts.append(int(part))
    return tuple(parts)


def trl_start(batch: TrlBatch, world_size: int, version: Version) -> Start:
    """What TRL of this version does with W = `world_size` processes."""
    start = _start(batch, world_size, version)
    if start.starts or not batch.evaluates or not _start(replace(batch, evaluates=False), world_size, version).starts:
        return start
    return replace(start, field="per_device_eval_batch_size")


def _start(batch: TrlBatch, world_size: int, version: Version) -> Start:
    if version < (0, 17):
        return _to_0_16(batch, world_size)
    if version < (0, 18):
        return _in_0_17(batch, world_size)
    start = _to_0_19(batch, world_size) if version < (0, 20) else _from_0_20(batch, world_size, version)
    if start.starts and world_size % batch.tensor_parallel:
        # the name of the argument in the message, before and after the class for vLLM
        name = "tensor_parallel_size" if version >= (0, 28) else "vllm_tensor_parallel_size"
        return refused(
            f"{name} ({batch.tensor_parallel}) must divide world size ({world_size}) evenly.",
            field="vllm_tensor_parallel_size",
        )
    return start


def _accepted(batch: TrlBatch, world_size: int, generation_batch_size: int, steps_per_generation: int) -> Start:
    return Start(
        starts=True,
        generation_batch_size=generation_batch_size,
        steps_per_generation=steps_per_generation,
        global_batch_size=batch.per_device * world_size * batch.accumulation,
        prompts=generation_batch_size // batch.generations,
    )


def _too_few(batch: TrlBatch) -> str:
    return (
        f"GRPO requires at least 2 generations per prompt to calculate the advantages. You provided "
        f"{batch.generations}, which is less than the minimum required."
    )


def _uneven(
    name: str, given: str, sizes: tuple[int, ...], generations: int, *, product_of: tuple[int, ...] | None = None
) -> str | None:
    """What TRL up to 0.19 says where the product of `sizes` holds no whole groups; None where it does.

    `product_of`: the factors that count, where they are not those that the message shows.
    """
    possible = divisors(*(product_of or sizes))
    if generations in possible:
        return None
    product = " x ".join(map(str, sizes))
    return (
        f"The {name} batch size ({product}) must be evenly divisible by the number of generations per "
        f"prompt ({generations}). Given the current {given} batch size, the valid values for the number of generations "
        f"are: {possible}."
    )


def _to_0_16(batch: TrlBatch, world_size: int) -> Start:
    """Every micro-step samples anew, so accumulation does not help."""
    message = _uneven("global train", "train", (world_size, batch.per_device), batch.generations)
    if message is None and batch.evaluates:
        message = _uneven("global eval", "eval", (world_size, batch.per_device_eval), batch.generations)
    if message:
        return refused(message)
    return _accepted(batch, world_size, batch.per_device * world_size, 1)


def _in_0_17(batch: TrlBatch, world_size: int) -> Start:
    if batch.generations < 2:
        return refused(_too_few(batch))
    sizes = (world_size, batch.per_device, batch.accumulation)
    message = _uneven("effective train", "effective train", sizes, batch.generations)
    if message is None and batch.evaluates:
        sizes_of_eval = (world_size, batch.per_device_eval)
        message = _uneven("effective eval", "effective eval", sizes_of_eval, batch.generations)
    if message:
        return refused(message)
    return _accepted(batch, world_size, world_size * batch.per_device * batch.accumulation, batch.accumulation)


def _to_0_19(batch: TrlBatch, world_size: int) -> Start:
    """0.18 and 0.19, whose check computes `(size % per_device) * W`: it accepts sizes that W does not divide."""
    if batch.generation_batch_size is not None and batch.steps_per_generation is not None:
        return refused(BOTH_SET)
    micro_step = batch.per_device * world_size
    steps = batch.steps_per_generation if batch.steps_per_generation is not None else batch.accumulation
    factors: tuple[int, ...] = (batch.per_device, world_size, steps)
    if batch.generation_batch_size is not None:
        factors = (batch.generation_batch_size,)
    size = math.prod(factors)
    if size % batch.per_device * world_size != 0:
        return refused(f"generation_batch_size ({size}) must be divisible by the global batch size ({micro_step}).")
    steps = size // micro_step
    if batch.generations < 2:
        return refused(_too_few(batch))
    sizes = (world_size, batch.per_device, steps)
    message = _uneven("effective train", "effective train", sizes, batch.generations, product_of=factors)
    if message is None and batch.evaluates:
        message = _uneven("global eval", "global eval", (world_size, batch.per_device_eval), batch.generations)
    if message:
        return refused(message)
    return _accepted(batch, world_size, size, steps)


def _from_0_20(batch: TrlBatch, world_size: int, version: Version) -> Start:
    if batch.auto_find_batch_size and version >= (1, 10):
        return refused(_AUTO_FIND)
    micro_step = batch.per_device * world_size
    if batch.generation_batch_size is not None and batch.steps_per_generation is not None:
        return refused(BOTH_SET)
    if batch.generation_batch_size is not None:
        size = batch.generation_batch_size
        if size % micro_step != 0:
            return refused(f"generation_batch_size ({size}) must be divisible by the global batch size ({micro_step}).")
        steps = size // micro_step
    else:
        steps = batch.steps_per_generation if batch.steps_per_generation is not None else batch.accumulation
        size = micro_step * steps
    eval_message = eval_refusal(batch, world_size, version) if batch.evaluates else None
    if eval_message:
        return refused(eval_message, field="per_device_eval_batch_size")
    if size % batch.generations != 0:
        return refused(f"generation_batch_size ({size}) must be divisible by num_generations ({batch.generations}).")
    if batch.generations < 2:
        return refused(_too_few(batch))
    return _accepted(batch, world_size, size, steps)


def eval_refusal(batch: TrlBatch, world_size: int, version: Version) -> str | None:
    """What TRL from 0.22 on says to this evaluation batch once evaluation is on; None: it accepts it."""
    if version < (0, 22):
        return None  # 0.20 and 0.21 do not look
    size = f"The global eval batch size ({batch.per_device_eval} * {world_size}) must be divisible by"
    if version < (0, 27):
        generations, rule = batch.generations, f"num_generations ({batch.generations})."
    else:
        generations = batch.generations_eval or batch.generations
        rule = f"the number of generations used for evaluation ({generations})."
    return f"{size} {rule}" if batch.per_device_eval * world_size % generations else None
