"""ms-swift: its batch rules, and everything else in a launch that it refuses or ignores.

Taken from ms-swift 3.3 to 4.6. Up to 4.1 the batches are checked as TRL does. What settings refuse together is in
`ms-swift.yaml`.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from cohort_check.findings import Finding
from cohort_check.launch import Launch, Settings
from cohort_check.rules import common, trl
from cohort_check.rules.common import BatchSizes, RunRules, Start, Version, parse_version

UNSET = trl.TrlBatch(per_device=1, per_device_eval=1)  # its defaults where they are not those of TRL
_NEWEST = (4, 6)
# only their presence matters, or whether vLLM's parallelism has to fit
_NEED_NOT_BE_READ = frozenset(("val_dataset", "teacher_model", "teacher_model_server", "use_vllm", "vllm_mode"))


def swift_start(batch: trl.TrlBatch, world_size: int, version: Version = _NEWEST) -> Start:
    """What ms-swift does with `world_size` training processes. Up to 4.1 it checks batches as a version of TRL."""
    if version < (4, 2):
        return trl.trl_start(batch, world_size, (0, 16) if version < (3, 5) else (0, 24))
    steps = batch.steps_per_generation or batch.accumulation
    return trl.first_refusal(_refusals(batch, world_size, steps)) or trl.started(batch, world_size, steps)


def _refusals(batch: trl.TrlBatch, world_size: int, steps: int) -> Iterator[trl.Refusal]:
    """Every message of versions from 4.2 on, in their order. `steps` are those of a generation batch."""
    given, generations, micro_step = batch.generation_batch_size, batch.generations, batch.per_device * world_size
    if generations == 1 and not batch.has_teacher:
        yield "num_generations must be greater than 1 for GRPO", None
    if given is not None and batch.steps_per_generation is None and given % micro_step:
        yield f"generation_batch_size ({given}) must be divisible by the global batch size ({micro_step}).", None
    if given is not None and batch.steps_per_generation is not None and given != micro_step * steps:
        text = "must equal per_device_train_batch_size * world_size * steps_per_generation"
        yield f"generation_batch_size ({given}) {text} = {micro_step * steps}.", None
    size = given or micro_step * steps
    if size % generations:
        possible = common.divisors(*([given] if given else [batch.per_device, world_size, steps]))
        text = f"must be evenly divisible by num_generations ({generations}). Valid values: {possible}."
        yield f"generation_batch_size ({size}) {text}", None
    of_evaluation = batch.generations_eval or generations
    if batch.evaluates and generations > 1 and batch.per_device_eval * world_size % of_evaluation:
        text = f"The global eval batch size ({world_size} x {batch.per_device_eval}) must be evenly divisible by"
        possible = common.divisors(batch.per_device_eval, world_size, smallest=1)
        yield f"{text} num_generations_eval ({of_evaluation}). Valid values: {possible}.", trl.EVAL_BATCH
    yield from trl.engine_refusals(batch, world_size)


def swift_rules(launch: Launch, version: str | None = None) -> RunRules:
    """Apply the rules of a version of ms-swift to a launch."""
    name, reason = common.choose_version(launch, version)
    number, settings = common.nearest_version("ms-swift", parse_version(name)), Settings(launch)
    mode = sampling_mode(settings, launch, number)
    batch = _batch(settings, mode, number)
    # up to 3.7 as many steps as 16 completions need
    fills = number < (3, 8) and settings.whole("gradient_accumulation_steps", None) is None
    decides = frozenset(settings.used - _NEED_NOT_BE_READ)
    local = mode == "workers" or (mode == "server" and common.is_server_local(settings))
    findings = [
        *common.contradictions("ms-swift", settings, number),
        *_device_findings(settings, launch, number),
        *common.version_findings("ms-swift", name),
        *_key_findings(launch, number),
        *common.gpu_findings(launch, local_server=local or bool(settings.said("vllm_device"))),
    ]

    def start(world_size: int, changed: BatchSizes) -> Start:
        sized = batch.changed(changed)
        if fills:
            sized = replace(sized, accumulation=max(1, math.ceil(16 / sized.per_device / world_size)))
        return swift_start(sized, world_size, number)

    return RunRules(
        version=name,
        version_reason=reason,
        sizes={key: n for key, n in batch.sizes().items() if not (fills and key == "gradient_accumulation_steps")},
        decides=decides,
        start=start,
        sampling=common.SAMPLING.get(mode, f"by vLLM ({mode})"),
        findings=(*settings.findings, *findings),
        blocked=next((finding.says for finding in findings if finding.code == "CHK008"), None),
    )


def sampling_mode(settings: Settings, launch: Launch, version: Version) -> str:
    """How completions are sampled: none (by the training processes), colocate, server, or workers up to 3.4."""
    if not settings.flag("use_vllm") and not (version < (3, 5) and settings.flag("use_lmdeploy")):
        return "none"
    if version >= (3, 5):
        none = version >= (3, 11) and settings.readable("vllm_mode")
        return str(settings.text("vllm_mode", "none" if none else "colocate"))
    if settings.said("vllm_server_host"):
        return "server"
    gpus, workers = launch.training_gpus, settings.whole("num_infer_workers", 1)
    return "colocate" if workers == (len(gpus) if gpus else launch.processes_per_node) else "workers"


def _batch(settings: Settings, mode: str, version: Version) -> trl.TrlBatch:
    def given(*keys: str) -> bool:  # a value that could not be read is one
        return any(settings.said(key) or not settings.readable(key) for key in keys)

    strategy = settings.text("eval_strategy", settings.text("save_strategy", "steps"))
    ratio = settings.number("split_dataset_ratio", 0.01 if version < (3, 6) else 0.0)
    return trl.read_batch(
        settings,
        replace(UNSET, has_teacher=given("teacher_model", "teacher_model_server")),
        evaluates=(given("val_dataset") or ratio > 0) and strategy != "no",
        colocated=mode == "colocate",
    )


def _device_findings(settings: Settings, launch: Launch, version: Version) -> list[Finding]:
    """Visible GPUs that are not those of the processes, over which a process would spread its model (from 3.8 on)."""
    gpus, per_node = len(launch.training_gpus or ()), launch.processes_per_node or 0
    if version < (3, 8) or not 0 < per_node < gpus:
        return []
    counts, says = f"n_gpu: {gpus}, local_world_size: {per_node}", "is not compatible with `device_map`."
    if gpus % per_node:
        key, says = "CUDA_VISIBLE_DEVICES", counts
    elif settings.text("deepspeed"):
        key, says = "deepspeed", f"DeepSpeed {says} {counts}."
    elif settings.flag("use_vllm"):
        key, says = "use_vllm", f"GRPO with vLLM {says} Please set NPROC_PER_NODE equal to num_processes."
    else:
        return []
    text = f"{common.counted(per_node)} of {gpus} visible GPUs"
    return [Finding("CHK008", key, text, (f"NPROC_PER_NODE={gpus}",), says=says)]


def _key_findings(launch: Launch, version: Version) -> list[Finding]:
    """Arguments that this version does not know. argparse completes one that is the start of a single name."""
    newer = min((known for known in common.key_tables("ms-swift") if known[:2] >= version), default=_NEWEST)
    tables = (common.known_keys("ms-swift", each) for each in (newer, version))  # newer: of versions without a table
    known = {key: entry for table in tables for key, entry in table.items()}
    is_shell = launch.form == "shell"
    unknown: list[str] = []
    remaining: list[str] = []
    for key, said in launch.settings.items():
        values = [str(one) for one in said.value] if isinstance(said.value, list) else [str(said.value)]
        if key in known or (is_shell and sum(name.startswith(key) for name in known) == 1):
            remaining += values[1:] if is_shell and known.get(key, {}).get("type") == "str" else []
        elif key != "config" and "." not in key:
            unknown.append(key)
            remaining += [f"--{key}", *(values if said.value is not True else [])]
    ignores = "ignore_args_error" in launch.settings and str(launch.settings["ignore_args_error"].value) == "true"
    code, effect = ("CHK005", "drops it with a warning") if ignores else ("CHK006", "stops")
    says = f"remaining_argv: {remaining}"
    found = [] if unknown or not remaining else [Finding(code, None, "words that belong to no argument", says=says)]
    renamed = common.FRAMEWORKS["ms-swift"]["renamed"]
    for key in unknown:
        text, nearest = common.unknown_key("ms-swift", version, key, known, renamed.get(key, ""))
        found.append(Finding(code, key, f"{text}, and {effect}", nearest, says=says))
    return found
