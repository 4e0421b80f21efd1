"""TRL's batch rules, version by version: numbers in, its own verdict out.

Read in the sources of TRL 0.15 to 1.16 and held to them: `tests/check/test_check_trl.py` compares every regime with the
real one's `GRPOConfig` (or, up to 0.17, with a table made of its trainer's check). W is the number of processes.
"""

import math
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from typing import Any

from cohort.check.launch import Settings
from cohort.check.rules.keys import Version
from cohort.check.rules.start import EVALUATION, BatchSizes, Start, divisors, refused

Refusal = tuple[str, str | None]  # the framework's message, and the key that it is about if it is not the usual one
EVAL_BATCH = "per_device_eval_batch_size"
_BOTH_SET = "'generation_batch_size' and 'steps_per_generation' can not be both configured at the same time"
_FIELDS = {  # TRL's and ms-swift's key: the field of TrlBatch that it is
    "per_device_train_batch_size": "per_device",
    EVAL_BATCH: "per_device_eval",
    "gradient_accumulation_steps": "accumulation",
    "num_generations": "generations",
    "num_generations_eval": "generations_eval",
    "generation_batch_size": "generation_batch_size",
    "steps_per_generation": "steps_per_generation",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlBatch:
    """The numbers that TRL's rules and those of ms-swift look at. Batch sizes count completions. None: not said."""

    per_device: int = 8
    accumulation: int = 1
    generations: int = 8
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    evaluates: bool = False
    per_device_eval: int = 8
    generations_eval: int | None = None
    tensor_parallel: int = 1  # of vLLM inside the training processes
    has_teacher: bool = False  # of ms-swift, where it makes groups of one possible

    def sizes(self) -> BatchSizes:
        """The numbers by key, without those of evaluation if there is none."""
        said = {key: getattr(self, name) for key, name in _FIELDS.items() if self.evaluates or key not in EVALUATION}
        return {key: value for key, value in said.items() if value is not None}

    def changed(self, sizes: BatchSizes) -> "TrlBatch":
        """The batch with these numbers."""
        fields: dict[str, Any] = {_FIELDS[key]: value for key, value in sizes.items()}
        return replace(self, **fields)


def read_batch(
    settings: Settings, unset: TrlBatch, *, known: Container[str] = _FIELDS, evaluates: bool, colocated: bool
) -> TrlBatch:
    """Read the numbers of the batch; what is not set, or not one of the known keys, is that of `unset`."""
    numbers = {name: settings.whole(key, getattr(unset, name)) for key, name in _FIELDS.items() if key in known}
    parallel = settings.whole("vllm_tensor_parallel_size", 1) if colocated else 1
    return replace(unset, **numbers, evaluates=evaluates and settings.readable(*EVALUATION), tensor_parallel=parallel)


def trl_start(batch: TrlBatch, world_size: int, version: Version) -> Start:
    """What TRL of this version does with W = `world_size` processes."""
    return first_refusal(_refusals(batch, world_size, version)) or started(batch, world_size, _steps(batch, version))


def first_refusal(refusals: Iterator[Refusal]) -> Start | None:
    """The framework stops with its first message; None if it has none."""
    return next((refused(message, field=field) for message, field in refusals), None)


def started(batch: TrlBatch, world_size: int, steps: int) -> Start:
    """The batches of a run that starts. `steps`: micro-steps of a generation batch whose size is not said."""
    micro_step = batch.per_device * world_size
    size = batch.generation_batch_size or micro_step * steps
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


def _refusals(batch: TrlBatch, world_size: int, version: Version) -> Iterator[Refusal]:
    """Every message with which this version would refuse, in its order, and the key that each is about."""
    given = batch.generation_batch_size
    micro_step = batch.per_device * world_size
    if given is not None and batch.steps_per_generation is not None:
        yield _BOTH_SET, "generation_batch_size"
    # up to 0.19.0 operator precedence makes it `(given % per_device) * W`
    rest = given % (batch.per_device if version < (0, 19, 1) else micro_step) if given is not None else 0
    if rest:
        text = f"generation_batch_size ({given}) must be divisible by the global batch size ({micro_step})."
        yield text, "generation_batch_size"
    yield from _groups_to_0_19(batch, world_size, version) if version < (0, 20) else _groups(batch, world_size, version)
    if version >= (0, 18):
        name = "tensor_parallel_size" if version >= (0, 28) else "vllm_tensor_parallel_size"
        yield from engine_refusals(batch, world_size, name)


def engine_refusals(batch: TrlBatch, world_size: int, name: str = "vllm_tensor_parallel_size") -> Iterator[Refusal]:
    """Processes that vLLM inside of them cannot share, in the words of TRL and ms-swift."""
    if world_size % batch.tensor_parallel:
        text = f"{name} ({batch.tensor_parallel}) must divide world size ({world_size}) evenly."
        yield text, "vllm_tensor_parallel_size"


def _groups(batch: TrlBatch, world_size: int, version: Version) -> Iterator[Refusal]:
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


def _groups_to_0_19(batch: TrlBatch, world_size: int, version: Version) -> Iterator[Refusal]:
    """Whole groups of completions, up to 0.19, where the message lists the numbers that would do."""
    given, generations, train = batch.generation_batch_size, batch.generations, [world_size, batch.per_device]
    if version >= (0, 17):
        if generations < 2:
            yield _too_few(generations), None
        train.append(_steps(batch, version) if given is None else given // math.prod(train))
    names = ("effective train", "effective eval") if version >= (0, 17) else ("global train", "global eval")
    possible = divisors(*(train if given is None else [given]))
    if generations not in possible:
        yield _uneven(names[0], train, possible, generations, version), None
    evaluation = [world_size, batch.per_device_eval]
    possible = divisors(*evaluation)
    if batch.evaluates and generations not in possible:
        name = "global eval" if version >= (0, 18) else names[1]
        yield _uneven(name, evaluation, possible, generations, version), EVAL_BATCH


def _too_few(generations: int) -> str:
    return (
        f"GRPO requires at least 2 generations per prompt to calculate the advantages. You provided {generations}, "
        f"which is less than the minimum required."
    )


def _uneven(name: str, sizes: list[int], possible: list[int], generations: int, version: Version) -> str:
    given = name if version >= (0, 17) else name.removeprefix("global ")
    return (
        f"The {name} batch size ({' x '.join(map(str, sizes))}) must be evenly divisible by the number of generations "
        f"per prompt ({generations}). Given the current {given} batch size, the valid values for the number of "
        f"generations are: {possible}."
    )
