"""ms-swift: its batch rules, and everything else in a launch that it refuses or ignores.

Taken from ms-swift 3.3 to 4.6. Up to 4.1 the batches are checked as TRL does. What settings refuse together is in
`ms-swift.yaml`.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, cast

from cohort.check.findings import Finding
from cohort.check.launch import Launch, Settings
from cohort.check.rules import common, trl
from cohort.check.rules.common import counted
from cohort.check.rules.contradictions import contradictions
from cohort.check.rules.keys import Version, key_history, key_tables, known_keys, nearest_keys, parse_version
from cohort.check.rules.start import EVALUATION, BatchSizes, RunRules, Start, divisors, refused
from cohort.check.rules.versions import choose_version, nearest_version, version_findings

_NEWEST = (4, 6)
_TRL = (0, 24)  # whose rules of batches hold from 3.5 to 4.1
_FIELDS = {  # ms-swift's key: the field of SwiftBatch
    "per_device_train_batch_size": "per_device",
    "per_device_eval_batch_size": "per_device_eval",
    "gradient_accumulation_steps": "accumulation",
    "num_generations": "generations",
    "generation_batch_size": "generation_batch_size",
    "steps_per_generation": "steps_per_generation",
}
# only their presence matters, or whether vLLM's parallelism has to fit
_NEED_NOT_BE_READ = frozenset(("val_dataset", "teacher_model", "teacher_model_server", "use_vllm", "vllm_mode"))
_RENAMED = {"train_type": "tuner_type"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SwiftBatch(trl.TrlBatch):
    """The numbers of a run. Batch sizes count completions. None: not set."""

    per_device: int = 1
    per_device_eval: int = 1
    has_teacher: bool = False


def swift_start(batch: SwiftBatch, world_size: int, version: Version = _NEWEST) -> Start:
    """What ms-swift does with `world_size` training processes."""
    if version < (4, 2):
        return trl.trl_start(batch, world_size, (0, 16) if version < (3, 5) else _TRL)
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


def eval_refusal(batch: SwiftBatch, world_size: int, version: Version = _NEWEST) -> str | None:
    """ms-swift's refusal of this evaluation batch, given an evaluation set; None if it accepts it."""
    if version < (4, 2):
        refusals = trl.refusals(replace(batch, evaluates=True), world_size, _TRL)
        return next((message for message, key in refusals if key == trl.EVAL_BATCH), None)
    generations = batch.generations_eval or batch.generations
    size = batch.per_device_eval * world_size
    if size % generations == 0:
        return None
    possible = divisors(batch.per_device_eval, world_size, smallest=1)
    return (
        f"The global eval batch size ({world_size} x {batch.per_device_eval}) must be evenly divisible by "
        f"num_generations_eval ({generations}). Valid values: {possible}."
    )


def swift_rules(launch: Launch, version: str | None = None) -> RunRules:
    """Apply the rules of a version of ms-swift to a launch."""
    name, reason = choose_version(launch, version)
    number, settings = nearest_version("ms-swift", parse_version(name)), Settings(launch)
    mode = sampling_mode(settings, launch, number)
    batch = _batch(settings, mode, number)
    # up to 3.7 as many steps as 16 completions need
    fills = number < (3, 8) and settings.whole("gradient_accumulation_steps", None) is None
    decides = frozenset(settings.used - _NEED_NOT_BE_READ)
    findings = [*contradictions("ms-swift", settings, number), *_device_findings(settings, launch, mode, number)]
    blocked = next((finding.says for finding in findings if finding.code == "CHK008"), None)
    findings += version_findings("ms-swift", name)
    if settings.readable(*decides) and not batch.evaluates and batch.generations > 1:
        findings += common.evaluation_findings(
            launch,
            lambda world_size: eval_refusal(batch, world_size, number),
            per_device=batch.per_device_eval,
            generations=batch.generations_eval or batch.generations,
            text="there is no evaluation set; ms-swift would refuse one",
        )
    findings += [*_key_findings(launch, number), *_sampling_findings(settings, mode, launch)]
    unused = {"per_device_eval_batch_size": not batch.evaluates, "gradient_accumulation_steps": fills}
    given = {key: getattr(batch, field) for key, field in _FIELDS.items() if not unused.get(key)}

    def start(world_size: int, changed: BatchSizes) -> Start:
        sized = replace(batch, **{_FIELDS[key]: cast(Any, value) for key, value in changed.items()})
        if fills:
            sized = replace(sized, accumulation=max(1, math.ceil(16 / sized.per_device / world_size)))
        return swift_start(sized, world_size, number)

    return RunRules(
        version=name,
        version_reason=reason,
        sizes={key: value for key, value in given.items() if value is not None},
        decides=decides,
        start=start,
        sampling={
            "colocate": "by vLLM inside the training processes",
            "server": "by a `swift rollout` server, which needs GPUs of its own",
            "none": "by the training processes, with transformers",
        }.get(mode, f"by vLLM ({mode})"),
        findings=(*settings.findings, *findings),
        blocked=blocked,
    )


def sampling_mode(settings: Settings, launch: Launch, version: Version) -> str:
    """How completions are sampled: none (by the training processes), colocate, server, or workers up to 3.4."""
    if not settings.flag("use_vllm") and not (version < (3, 5) and settings.flag("use_lmdeploy")):
        return "none"
    if version >= (3, 5):
        return str(settings.text("vllm_mode", "none" if version >= (3, 11) else "colocate"))
    if settings.said("vllm_server_host"):
        return "server"
    gpus, workers = launch.training_gpus, settings.whole("num_infer_workers", 1)
    return "colocate" if workers == (len(gpus) if gpus else launch.processes_per_node) else "workers"


def _batch(settings: Settings, mode: str, version: Version) -> SwiftBatch:
    def given(*keys: str) -> bool:  # a value that could not be read is one
        return any(settings.said(key) or not settings.readable(key) for key in keys)

    strategy = settings.text("eval_strategy", settings.text("save_strategy", "steps"))
    ratio = settings.number("split_dataset_ratio", 0.01 if version < (3, 6) else 0.0)
    numbers: dict[str, Any] = {name: settings.whole(key, getattr(SwiftBatch(), name)) for key, name in _FIELDS.items()}
    return SwiftBatch(
        **numbers,
        evaluates=(given("val_dataset") or ratio > 0) and strategy != "no" and settings.readable(*EVALUATION),
        generations_eval=settings.whole("num_generations_eval", None),
        tensor_parallel=settings.whole("vllm_tensor_parallel_size", 1) if mode == "colocate" else 1,
        has_teacher=given("teacher_model", "teacher_model_server"),
    )


def _device_findings(settings: Settings, launch: Launch, mode: str, version: Version) -> list[Finding]:
    """Visible GPUs that are not those of the processes, over which a process would spread its model."""
    gpus, per_node = len(launch.training_gpus or ()), launch.processes_per_node or 0
    workers = settings.whole("num_infer_workers", 1)
    lacks_workers = mode == "workers" and gpus != per_node + workers
    if not gpus or not per_node or not (lacks_workers if version < (3, 8) else per_node < gpus):
        return []
    counts = f"n_gpu: {gpus}, local_world_size: {per_node}"
    says = "is not compatible with `device_map`."
    refusals = {
        "CUDA_VISIBLE_DEVICES": (gpus % per_node > 0, counts),
        "deepspeed": (settings.text("deepspeed"), f"DeepSpeed {says} {counts}."),
        "use_vllm": (
            settings.flag("use_vllm"),
            f"GRPO with vLLM {says} Please set NPROC_PER_NODE equal to num_processes.",
        ),
    }
    if version < (3, 8):
        says = f"Async mode requires total GPUs({gpus}) = training GPUs({per_node}) + inference workers({workers}). "
        refusals = {"num_infer_workers": (True, f"{says}Please adjust your GPU allocation.")}
    text, nearest = f"{counted(per_node)} of {gpus} visible GPUs", (f"NPROC_PER_NODE={gpus}",)
    refused_keys = [key for key, (refuses, _) in refusals.items() if refuses and settings.readable(key)]
    return [Finding("CHK008", key, text, nearest, says=refusals[key][1]) for key in refused_keys[:1]]


def _key_findings(launch: Launch, version: Version) -> list[Finding]:
    """Arguments that this version does not know. argparse completes one that is the start of a single name."""
    newer = min((known for known in key_tables("ms-swift") if known[:2] >= version), default=_NEWEST)
    known = {**known_keys("ms-swift", newer), **known_keys("ms-swift", version)}  # of versions without a table of keys
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
    for key in unknown:
        new, there = _RENAMED.get(key, ""), key_history("ms-swift", key)
        why = f", which is called {new} from 4.0 on" if new in known else f", which it has {there}" if there else ""
        text = f"ms-swift {'.'.join(map(str, version))} does not know {key}{why}, and {effect}"
        nearest = (new,) if new in known else nearest_keys(key, known)
        found.append(Finding(code, key, text, nearest, says=says))
    return found


def _sampling_findings(settings: Settings, mode: str, launch: Launch) -> list[Finding]:
    """GPUs of training and sampling, vLLM that keeps its memory, lengths, and CISPO's bound."""
    host = settings.said("vllm_server_base_url") or settings.said("vllm_server_host") or "127.0.0.1"
    local = common.is_local(host) and settings.readable("vllm_server_base_url", "vllm_server_host")
    local = mode == "workers" or (mode == "server" and local)
    found = common.gpu_findings(launch, local_server=local, remote_server=not local)
    found += common.server_size_finding(launch, "vllm_")
    if settings.text("loss_type") == "cispo":
        found += common.cispo_findings(settings)
    if mode == "colocate":
        level = settings.whole("sleep_level", 0, minimum=0)
        found += common.awake_findings(settings, "sleep_level", "sleep_level=1", sleeps=level > 0, share=0.9)
    key, context = "vllm_max_model_len", settings.whole("vllm_max_model_len", None, maximum=10**9)
    if mode == "server":
        said = launch.server.get(key)
        key = f"swift rollout's {key}"
        context = int(said.value) if said and str(said.value).isdecimal() else None
    if mode != "none" and settings.readable("max_length", "max_completion_length"):
        prompt = settings.whole("max_length", None, maximum=10**9)
        completion = settings.whole("max_completion_length", 512, maximum=10**9)
        keys = {"prompt_key": "max_length", "completion_key": "max_completion_length", "context_key": key}
        found += common.length_finding(prompt, completion, context, **keys)
    return found
