"""A launch of ms-swift: its numbers, and everything besides the batch rules that goes wrong with it."""

from dataclasses import replace
from typing import Any

from cohort.check.findings import Finding
from cohort.check.launch import Launch, Settings
from cohort.check.readers.swift import MEGATRON
from cohort.check.rules.gpus import counted, evaluated_sizes, gpu_findings, length_finding, server_size_finding
from cohort.check.rules.start import EVALUATION, Judged, Knobs, Start
from cohort.check.rules.swift import (
    DEFAULT_VERSION,
    MegatronBatch,
    SwiftBatch,
    eval_refusal,
    megatron_start,
    swift_start,
)
from cohort.check.rules.swift_keys import swift_key_findings

_FIELDS = {
    "per_device_train_batch_size": "per_device",
    "per_device_eval_batch_size": "per_device_eval",
    "gradient_accumulation_steps": "accumulation",
    "num_generations": "generations",
    "generation_batch_size": "generation_batch_size",
    "steps_per_generation": "steps_per_generation",
}
_MEGATRON_FIELDS = {
    "global_batch_size": "global_batch_size",
    "micro_batch_size": "micro_batch_size",
    "num_generations": "generations",
    "generation_batch_size": "generation_batch_size",
    "steps_per_generation": "steps_per_generation",
}


# of these it matters only whether they are there, or whether vLLM's parallelism has to fit
_NEED_NOT_BE_READ = frozenset(
    ("val_dataset", "teacher_model", "teacher_model_server", "use_vllm", "vllm_mode", MEGATRON)
)


def judge_swift(launch: Launch) -> Judged:
    """Judges a launch by the rules of ms-swift 4.6."""
    settings = Settings(launch)
    on_megatron = settings.flag(MEGATRON)
    mode = str(settings.text("vllm_mode", "none")) if settings.flag("use_vllm") or on_megatron else "none"
    batch: SwiftBatch | MegatronBatch = _megatron_batch(settings) if on_megatron else _batch(settings, mode)
    decides = frozenset(settings.used - _NEED_NOT_BE_READ)
    fields = _MEGATRON_FIELDS if on_megatron else _FIELDS
    findings = _megatron_findings(settings, launch) if on_megatron else _contradictions(settings)
    blocked = next((f.message for f in findings if f.code == "CHK008"), None)
    findings += [
        *swift_key_findings(launch),
        *_without_effect(settings, mode),
        *_losses(settings),
        *_lengths(settings, mode, launch),
    ]
    if isinstance(batch, SwiftBatch) and settings.readable(*decides):
        findings += _evaluation(batch, launch)
    hosts = str(settings.said("vllm_server_base_url") or settings.said("vllm_server_host") or "127.0.0.1")
    local = any(name in hosts for name in ("127.0.0.1", "localhost", "0.0.0.0"))
    findings += gpu_findings(
        launch, local_server=mode == "server" and local, remote_server=mode == "server" and not local
    )
    findings += server_size_finding(launch, "vllm_")

    knobs = {key: value for key, name in fields.items() if (value := getattr(batch, name)) is not None}
    if isinstance(batch, SwiftBatch) and not batch.evaluates:
        del knobs["per_device_eval_batch_size"]

    def start(world_size: int, changed: Knobs) -> Start:
        changes: dict[str, Any] = {fields[key]: value for key, value in changed.items()}
        if isinstance(batch, MegatronBatch):
            return megatron_start(replace(batch, **changes), world_size)
        return swift_start(replace(batch, **changes), world_size)

    return Judged(
        version=DEFAULT_VERSION,
        version_reason="the version whose rules are known",
        knobs=knobs,
        decides=decides,
        start=start,
        sampling={
            "colocate": "by vLLM inside the training processes",
            "server": "by `swift rollout`, which needs GPUs of its own",
            "none": "by the training processes, with transformers" if not on_megatron else "by vLLM",
        }.get(mode, f"by vLLM, vllm_mode {mode}"),
        findings=(*settings.findings, *findings),
        blocked=blocked,
    )


def _batch(settings: Settings, mode: str) -> SwiftBatch:
    def given(*keys: str) -> bool:  # a value that could not be read is one
        return any(settings.said(key) or not settings.readable(key) for key in keys)

    strategy = settings.text("eval_strategy", settings.text("save_strategy", "steps"))
    has_eval_set = given("val_dataset") or settings.number("split_dataset_ratio", 0.0) > 0
    return SwiftBatch(
        per_device=settings.whole("per_device_train_batch_size", 1),
        accumulation=settings.whole("gradient_accumulation_steps", 1),
        generations=settings.whole("num_generations", 8),
        generation_batch_size=settings.whole("generation_batch_size", None),
        steps_per_generation=settings.whole("steps_per_generation", None),
        evaluates=has_eval_set and strategy != "no" and settings.readable(*EVALUATION),
        per_device_eval=settings.whole("per_device_eval_batch_size", 1),
        generations_eval=settings.whole("num_generations_eval", None),
        tensor_parallel=settings.whole("vllm_tensor_parallel_size", 1) if mode == "colocate" else 1,
        has_teacher=given("teacher_model", "teacher_model_server"),
    )


def _megatron_batch(settings: Settings) -> MegatronBatch:
    sizes = [settings.whole(f"{name}_parallel_size", 1) for name in ("tensor_model", "pipeline_model", "context")]
    return MegatronBatch(
        micro_batch_size=settings.whole("micro_batch_size", 1),
        global_batch_size=settings.whole("global_batch_size", 16),
        generations=settings.whole("num_generations", 8),
        generation_batch_size=settings.whole("generation_batch_size", None),
        steps_per_generation=settings.whole("steps_per_generation", None),
        model_parallel=sizes[0] * sizes[1] * sizes[2],
    )


def _contradictions(settings: Settings) -> list[Finding]:
    """Keys that stop the run together, in ms-swift's words."""
    found: list[Finding] = []
    uses_vllm, mode = settings.flag("use_vllm"), settings.text("vllm_mode")
    if mode is not None and not uses_vllm:
        message = "vllm_mode is not supported when use_vllm is false"
        found.append(Finding("CHK008", "vllm_mode", message, ("use_vllm=true", "without vllm_mode")))
    if uses_vllm and mode is None:
        message = "vllm_mode is required when use_vllm is true"
        found.append(Finding("CHK008", "vllm_mode", message, ("vllm_mode=colocate", "vllm_mode=server")))
    if settings.flag("async_generate") and mode != "server":
        message = "async generate require vllm_mode == server, "
        found.append(Finding("CHK008", "async_generate", message, ("vllm_mode=server", "async_generate=false")))
    names = ("vllm_server_host", "vllm_server_base_url")
    if uses_vllm and mode == "server" and not any(settings.said(name) for name in names):
        message = "vllm_mode server without vllm_server_host or vllm_server_base_url: an assertion stops it"
        found.append(Finding("CHK008", "vllm_server_host", message, ("vllm_server_host=127.0.0.1",)))
    return found


def _megatron_findings(settings: Settings, launch: Launch) -> list[Finding]:
    """What Megatron refuses, and what it lets pass."""
    found: list[Finding] = []
    if settings.whole("num_generations", 8) == 1:
        message = (
            "num_generations 1 is accepted on Megatron: every advantage is 0, and with beta 0 nothing at all is learned"
        )
        found.append(Finding("CHK014", "num_generations", message, ("num_generations=2", "num_generations=8")))
    refusals = (
        ("async_generate", settings.flag("async_generate"), "async_generate is"),
        ("sync_ref_model", settings.flag("sync_ref_model"), "sync_ref_model is"),
        ("num_iterations", settings.whole("num_iterations", 1) > 1, "num_iterations > 1 is"),
    )
    for key, wrong, subject in refusals:
        if wrong:
            found.append(Finding("CHK008", key, f"{subject} not supported for Megatron GRPO right now"))
    groups = settings.said("colocate_groups")
    for group in groups if isinstance(groups, list) else ():
        roles = [str(role) for role in group] if isinstance(group, list) else []
        gpus = {role: _gpus_of(role, settings, launch) for role in roles}
        if len(set(gpus.values())) > 1:
            message = (
                f"Colocated roles must request the same number of gpus, but got {gpus}. Set an equal `gpus` for all "
                f"roles in {sorted(gpus)}."
            )
            found.append(Finding("CHK008", "colocate_groups", message))
    return found


def _gpus_of(role: str, settings: Settings, launch: Launch) -> int:
    if role == "train":
        return int(launch.processes.value) if launch.processes else 0
    return int(settings.whole(f"{role}.gpus", 0, minimum=0))


def _without_effect(settings: Settings, mode: str) -> list[Finding]:
    """Keys that this way of sampling ignores, and memory that it does not give back."""
    found: list[Finding] = []
    sleeps = settings.whole("sleep_level", 0, minimum=0) > 0
    if mode == "server":
        if sleeps:
            message = "sleep_level becomes 0 without a word where a server samples"
            found.append(Finding("CHK005", "sleep_level", message, ("without sleep_level",)))
        if settings.said("vllm_max_model_len") is not None:
            message = "vllm_max_model_len is ignored where a server samples; give it to `swift rollout`"
            found.append(Finding("CHK005", "vllm_max_model_len", message))
    if mode == "colocate":
        for key in ("vllm_server_host", "vllm_server_base_url"):
            if settings.said(key):
                message = f"{key} has no effect with vllm_mode colocate: no server is asked"
                found.append(Finding("CHK005", key, message, ("vllm_mode=server",)))
        if not sleeps:
            share = settings.number("vllm_gpu_memory_utilization", 0.9)
            message = f"vLLM holds {share:.0%} of every GPU while training: sleep_level is 0"
            found.append(Finding("CHK018", "sleep_level", message, ("sleep_level=1",)))
    return found


def _losses(settings: Settings) -> list[Finding]:
    cap = settings.number("epsilon_high", None)
    cap = cap if cap is not None else settings.number("epsilon", 0.2)
    readable = settings.readable("epsilon_high", "epsilon")
    if settings.text("loss_type", "grpo") != "cispo" or cap > 1 or not readable:
        return []
    message = (
        f"with loss_type cispo, epsilon_high {cap:g} caps the importance weight itself: on-policy weights of 1 become "
        f"{cap:g}, and the gradient is {cap:g} times what it should be"
    )
    return [Finding("CHK015", "epsilon_high", message, ("epsilon_high=5.0",))]


def _evaluation(batch: SwiftBatch, launch: Launch) -> list[Finding]:
    told = [size for size in evaluated_sizes(launch) if eval_refusal(batch, size) is not None]
    if batch.evaluates or batch.generations < 2 or not told:
        return []
    world_size, message = told[0], eval_refusal(batch, told[0])
    generations = batch.generations_eval or batch.generations
    sizes = [n for n in range(1, 4 * generations + 1) if n * world_size % generations == 0]
    nearest = sorted(sizes, key=lambda n: abs(n - batch.per_device_eval))[:2]
    return [
        Finding(
            "CHK009",
            "per_device_eval_batch_size",
            f"there is no evaluation set; with one and {counted(world_size)} ms-swift would refuse: {message}",
            tuple(f"per_device_eval_batch_size={n}" for n in nearest),
        )
    ]


def _lengths(settings: Settings, mode: str, launch: Launch) -> list[Finding]:
    """`max_length` bounds the prompt in ms-swift."""
    key, context = "vllm_max_model_len", settings.whole("vllm_max_model_len", None, maximum=10**9)
    if mode == "server":
        said = launch.server.get("vllm_max_model_len")
        key = "swift rollout's vllm_max_model_len"
        context = int(said.value) if said and str(said.value).isdecimal() else None
    if mode == "none" or not settings.readable("max_length", "max_completion_length"):
        return []
    return length_finding(
        settings.whole("max_length", None, maximum=10**9),
        settings.whole("max_completion_length", 512, maximum=10**9),
        context,
        prompt_key="max_length",
        completion_key="max_completion_length",
        context_key=key,
    )
