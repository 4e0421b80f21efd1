"""A launch of TRL or Open-R1: its numbers, and everything besides the batch rules that goes wrong with it."""

from dataclasses import replace
from typing import Any

from cohort.check.findings import Finding
from cohort.check.launch import Launch, Settings
from cohort.check.lora import trl_lora
from cohort.check.quantization import trl_bits
from cohort.check.rules.gpus import counted, evaluated_sizes, gpu_findings, length_finding, server_size_finding
from cohort.check.rules.start import EVALUATION, Judged, Knobs, Start
from cohort.check.rules.trl import (
    BOTH_SET,
    DEFAULT_VERSION,
    NEWEST,
    OLDEST,
    TrlBatch,
    Version,
    eval_refusal,
    parse_version,
    trl_start,
)
from cohort.check.rules.trl_keys import key_findings

_OPEN_R1_PINS = "0.18.0"
_LOSSES: dict[str, Version] = {  # the first release whose trainer computes it
    "grpo": (0, 17),
    "bnpo": (0, 17),
    "dr_grpo": (0, 17),
    "dapo": (0, 22),
    "cispo": (0, 26),
    "sapo": (0, 26),
    "luspo": (0, 28),
    "vespo": (1, 0),
}
_HAS_LOSSES, _KNOWS_CISPO = _LOSSES["grpo"], _LOSSES["cispo"]
_SCRIPT_QUANTIZES = (0, 26)  # from which version on `trl grpo` hands load_in_4bit to the model
_CAN_SLEEP = (0, 24)
_FIELDS = {  # TRL's key: the field of TrlBatch that it is
    "per_device_train_batch_size": "per_device",
    "per_device_eval_batch_size": "per_device_eval",
    "gradient_accumulation_steps": "accumulation",
    "num_generations": "generations",
    "generation_batch_size": "generation_batch_size",
    "steps_per_generation": "steps_per_generation",
}


_PURELY_QUANTIZED = (
    "You cannot perform fine-tuning on purely quantized models. Please attach trainable adapters on top of the "
    "quantized model to correctly perform fine-tuning. Please see: https://huggingface.co/docs/transformers/peft "
    "for more details"
)
# keys that decide whether vLLM's parallelism has to fit, and nothing where it is 1
_ONLY_WITH_PARALLEL = frozenset(("use_vllm", "vllm_mode", "vllm_device"))


_SERVER_KEYS = ("vllm_server_host", "vllm_server_port", "vllm_server_base_url")
_COLOCATED_KEYS = (
    "vllm_gpu_memory_utilization",
    "vllm_tensor_parallel_size",
    "vllm_max_model_length",
    "vllm_enable_sleep_mode",
)


def judge_trl(launch: Launch, version: str | None = None) -> Judged:
    """Judges a launch by the rules of one version of TRL: the given one, the file's own, or the default."""
    told, reason = trl_version(launch, version)
    number = parse_version(told)
    settings = Settings(launch)
    batch = _batch(settings, number)
    decides = frozenset(settings.used - _ONLY_WITH_PARALLEL)
    findings = [
        *_version_findings(told, number),
        *key_findings(launch, number),
        *_contradictions(settings, batch, number),
        *_quantization(settings, launch, number),
    ]
    blocked = next((f.message for f in findings if f.code == "CHK008"), None)
    mode = _sampling_mode(settings, number)
    unknown = {finding.field for finding in findings if finding.code == "CHK005"}
    findings += [f for f in _without_effect(settings, mode, number) if f.field not in unknown]
    findings += _losses(settings, number)
    findings += _awake(settings, mode, number)
    if settings.readable(*decides - EVALUATION):
        findings += _steps(settings, batch, number, launch)
    if settings.readable(*decides):
        findings += _evaluation(settings, batch, number, launch)
    findings += _lengths(settings, mode, launch)
    host = str(settings.text("vllm_server_base_url") or settings.text("vllm_server_host", "0.0.0.0"))
    local = any(name in host for name in ("0.0.0.0", "localhost", "127.0.0.1"))
    takes_one = mode == "a GPU of its own"
    serves = mode == "server"
    findings += gpu_findings(
        launch, local_server=serves and local, remote_server=serves and not local, takes_one_for_vllm=takes_one
    )
    findings += server_size_finding(launch, "")
    knobs = {key: value for key, name in _FIELDS.items() if (value := getattr(batch, name)) is not None}
    if not batch.evaluates:
        del knobs["per_device_eval_batch_size"]

    def start(world_size: int, changed: Knobs) -> Start:
        fields: dict[str, Any] = {_FIELDS[key]: value for key, value in changed.items()}
        return trl_start(replace(batch, **fields), world_size, number)

    return Judged(
        version=told,
        version_reason=reason,
        knobs=knobs,
        decides=decides,
        start=start,
        sampling={
            "none": "by the training processes, with transformers",
            "colocate": "by vLLM inside the training processes",
            "server": "by a vLLM server, which needs GPUs of its own",
            "a GPU of its own": "by vLLM on the GPU after the training processes' own",
        }[mode],
        findings=(*settings.findings, *findings),
        blocked=blocked,
    )


def trl_version(launch: Launch, version: str | None) -> tuple[str, str]:
    """The version whose rules hold, and why."""
    if version is not None:
        return version, "--trl-version"
    if launch.version is not None:
        return str(launch.version.value), f"{launch.version.where} of the file"
    if launch.framework == "open-r1":
        return _OPEN_R1_PINS, "what Open-R1 pins"
    return DEFAULT_VERSION, "the default; --trl-version chooses another one"


def _version_findings(told: str, version: Version) -> list[Finding]:
    nearest = OLDEST if version < OLDEST else NEWEST if version[:2] > NEWEST else None
    if nearest is None:
        return []
    name = ".".join(map(str, nearest))
    message = f"the rules of TRL {told} are not known here; those of {name}, the nearest that are, were taken"
    return [Finding("CHK020", None, message, (f"--trl-version {name}",))]


def _batch(settings: Settings, version: Version) -> TrlBatch:
    """The numbers of the batch. Keys that this version does not know do not count."""
    later = version >= (0, 18)
    strategy = settings.text("eval_strategy", settings.text("evaluation_strategy", "no"))
    colocated = _sampling_mode(settings, version) == "colocate"
    return TrlBatch(
        per_device=settings.whole("per_device_train_batch_size", 8),
        accumulation=settings.whole("gradient_accumulation_steps", 1),
        generations=settings.whole("num_generations", 8),
        generation_batch_size=settings.whole("generation_batch_size", None) if later else None,
        steps_per_generation=settings.whole("steps_per_generation", None) if later else None,
        evaluates=strategy != "no" and settings.readable(*EVALUATION),
        per_device_eval=settings.whole("per_device_eval_batch_size", 8),
        generations_eval=settings.whole("num_generations_eval", None) if version >= (0, 26) else None,
        tensor_parallel=settings.whole("vllm_tensor_parallel_size", 1) if later and colocated else 1,
        auto_find_batch_size=settings.flag("auto_find_batch_size"),
    )


def _sampling_mode(settings: Settings, version: Version) -> str:
    if not settings.flag("use_vllm"):
        return "none"
    if version < (0, 16):
        return "a GPU of its own" if settings.text("vllm_device", "auto") == "auto" else "server"
    if version < (0, 18):
        return "server"
    mode = str(settings.text("vllm_mode", "colocate" if version >= (1, 0) else "server"))
    return mode if mode in ("colocate", "server") else "server"


def _contradictions(settings: Settings, batch: TrlBatch, version: Version) -> list[Finding]:
    """Keys that stop the run together."""

    def found(key: str, message: str, *nearest: str) -> Finding:
        return Finding("CHK008", key, message, nearest)

    results: list[Finding] = []
    if batch.generation_batch_size is not None and batch.steps_per_generation is not None:
        results.append(
            found("generation_batch_size", BOTH_SET, "without generation_batch_size", "without steps_per_generation")
        )
    liger = settings.flag("use_liger_loss" if version < (0, 28) else "use_liger_kernel")
    if settings.number("delta", None) is not None and liger and (0, 18) <= version < (1, 10):
        name = "loss" if version < (0, 26) else "kernel"
        message = f"Liger {name} does not support two-sided GRPO loss yet."
        results.append(found("delta", message, "without delta", f"use_liger_{name}=false"))
    if version >= (0, 28) and settings.text("log_completions_hub_repo") and not settings.flag("log_completions"):
        message = (
            "log_completions_hub_repo is set, but log_completions is False. Enable log_completions to upload "
            "completions to the Hub, or unset log_completions_hub_repo."
        )
        results.append(found("log_completions_hub_repo", message, "log_completions=true"))
    low = settings.number("vllm_importance_sampling_clip_min", None)
    high = settings.number("vllm_importance_sampling_clip_max", 3.0)
    if version >= (1, 10) and low is not None and low >= high:
        name = "vllm_importance_sampling_clip"
        message = f"{name}_min ({low}) must be less than {name}_max ({high})."
        results.append(found(f"{name}_min", message))
    mode: Any = settings.text("vllm_importance_sampling_mode", "sequence_mask")
    corrected = settings.flag("use_vllm") and settings.flag("vllm_importance_sampling_correction", True)
    token_modes = ("token_truncate", "token_mask")
    if version >= (1, 0) and settings.text("loss_type") == "vespo" and corrected and mode not in token_modes:
        message = (
            "VESPO loss requires `vllm_importance_sampling_mode` to be either 'token_truncate' or 'token_mask'. "
            f"Got: {mode}."
        )
        results.append(
            found(
                "vllm_importance_sampling_mode",
                message,
                *(f"vllm_importance_sampling_mode={name}" for name in token_modes),
            )
        )
    return results


def _without_effect(settings: Settings, mode: str, version: Version) -> list[Finding]:
    """Keys of vLLM that this way of sampling does not look at."""
    if version < (0, 18):
        return []
    reasons = {
        "none": ("use_vllm is false", (*_SERVER_KEYS, *_COLOCATED_KEYS)),
        "server": ("a server samples, which has options of its own", _COLOCATED_KEYS),
        "colocate": ("vLLM samples inside the training processes and no server is asked", _SERVER_KEYS),
    }
    reason, keys = reasons[mode]
    return [Finding("CHK005", key, f"{key} has no effect: {reason}") for key in keys if settings.said(key) is not None]


def _loss(settings: Settings, version: Version) -> str:
    return str(settings.text("loss_type", "dapo" if version >= (0, 22) else "bnpo"))


def _losses(settings: Settings, version: Version) -> list[Finding]:
    """What makes a loss another one than was meant."""
    loss = _loss(settings, version)
    findings: list[Finding] = []
    if version < _HAS_LOSSES:
        return []  # loss_type has no effect, which is told as that
    known = tuple(name for name, first in _LOSSES.items() if version >= first)
    if loss not in known:
        message = f'loss_type: {loss!r}: fails in the first step, after generation: "Unknown loss type: {loss}"'
        if loss in _LOSSES:
            message += f"; TRL has it from {'.'.join(map(str, _LOSSES[loss]))} on"
        findings.append(Finding("CHK010", "loss_type", message, known))
    cap = settings.number("epsilon_high", None)
    cap = cap if cap is not None else settings.number("epsilon", 0.2)
    if loss == "cispo" and version >= _KNOWS_CISPO and cap <= 1 and settings.readable("epsilon_high", "epsilon"):
        key = "epsilon_high" if "epsilon_high" in settings else "epsilon"
        message = (
            f"with loss_type cispo, {key} {cap:g} caps the importance weight itself: on-policy weights of 1 become "
            f"{cap:g}, and the gradient is {cap:g} times what it should be"
        )
        findings.append(Finding("CHK015", "epsilon_high", message, ("epsilon_high=5.0",)))
    return findings


def _quantization(settings: Settings, launch: Launch, version: Version) -> list[Finding]:
    """Quantized weights that nothing trains, or that nobody hands to the model."""
    bits = trl_bits(settings)
    if bits is None or not settings.readable("peft_config"):
        return []
    key = f"load_in_{bits}bit"
    if launch.framework == "trl" and launch.form != "python" and version < _SCRIPT_QUANTIZES:
        message = f"{key} has no effect: `trl grpo` hands it to the model from TRL 0.26 on"
        return [Finding("CHK005", key, message, ("--trl-version 0.26",))]
    if trl_lora(settings) is not None:
        return []
    nearest = "peft_config=LoraConfig()" if launch.form == "python" else "use_peft=true"
    return [Finding("CHK008", key, _PURELY_QUANTIZED, (nearest, f"{key}=false"))]


def _awake(settings: Settings, mode: str, version: Version) -> list[Finding]:
    """vLLM inside the training processes that does not sleep meanwhile."""
    if mode != "colocate" or version < _CAN_SLEEP or settings.flag("vllm_enable_sleep_mode"):
        return []
    share = settings.number("vllm_gpu_memory_utilization", 0.3)
    message = f"vLLM holds {share:.0%} of every GPU while training: vllm_enable_sleep_mode is false"
    return [Finding("CHK018", "vllm_enable_sleep_mode", message, ("vllm_enable_sleep_mode=true",))]


def _steps(settings: Settings, batch: TrlBatch, version: Version, launch: Launch) -> list[Finding]:
    """Steps per generation that scale the loss wrongly, or are none at all."""
    findings: list[Finding] = []
    loss = _loss(settings, version)
    processes = launch.processes.value if launch.processes else 1
    start = trl_start(replace(batch, evaluates=False), max(int(processes), 1), version)
    steps = start.steps_per_generation
    if start.starts and steps == 0:
        message = (
            f"generation_batch_size {batch.generation_batch_size} passes TRL {'.'.join(map(str, version))}'s check "
            f"and is less than one micro-step of {processes} processes x {batch.per_device}: steps_per_generation is 0"
        )
        right = (f"generation_batch_size={batch.per_device * processes}",)
        findings.append(Finding("CHK017", "generation_batch_size", message, right))
    elif (
        loss in ("dapo", "cispo", "vespo") and (0, 22) <= version < (1, 16) and steps not in (None, batch.accumulation)
    ):
        message = (
            f"{loss} with steps_per_generation {steps} and gradient_accumulation_steps {batch.accumulation}: TRL "
            f"{'.'.join(map(str, version))} divides by the tokens of the whole generation batch, so the gradient is "
            f"about {batch.accumulation / (steps or 1):g} times what it should be (right again in 1.16)"
        )
        equal = (f"steps_per_generation={batch.accumulation}", f"gradient_accumulation_steps={steps}")
        findings.append(Finding("CHK016", "steps_per_generation", message, equal))
    return findings


def _evaluation(settings: Settings, batch: TrlBatch, version: Version, launch: Launch) -> list[Finding]:
    """An evaluation batch that is refused as soon as evaluation is on."""
    if batch.evaluates:
        return []
    on = replace(batch, evaluates=True)

    def refusal(processes: int) -> str | None:
        if version >= (0, 20):
            return eval_refusal(on, processes, version)
        with_eval, without = (trl_start(tried, processes, version) for tried in (on, batch))
        return with_eval.message if without.starts and not with_eval.starts else None

    told = [size for size in evaluated_sizes(launch) if refusal(size) is not None]
    if not told:
        return []
    world_size, message = told[0], refusal(told[0])
    generations = (batch.generations_eval if version >= (0, 27) else None) or batch.generations
    sizes = [n for n in range(1, 4 * generations + 1) if n * world_size % generations == 0]
    nearest = sorted(sizes, key=lambda n: abs(n - batch.per_device_eval))[:2]
    return [
        Finding(
            "CHK009",
            "per_device_eval_batch_size",
            f"evaluation is off; with it and {counted(world_size)} TRL would refuse: {message}",
            tuple(f"per_device_eval_batch_size={n}" for n in nearest),
        )
    ]


def _lengths(settings: Settings, mode: str, launch: Launch) -> list[Finding]:
    """Prompt and completion against vLLM's context."""
    if mode == "none" or not settings.readable("max_prompt_length", "max_completion_length"):
        return []
    prompt = settings.whole("max_prompt_length", None, maximum=10**9)
    completion = settings.whole("max_completion_length", 256, maximum=10**9)
    key = "vllm_max_model_length" if "vllm_max_model_length" in settings else "vllm_max_model_len"
    context = settings.whole(key, None, maximum=10**9)
    if mode == "server":
        said = launch.server.get("max_model_len")
        key, context = "the server's --max_model_len", int(said.value) if said and str(said.value).isdecimal() else None
    return length_finding(
        prompt,
        completion,
        context,
        prompt_key="max_prompt_length",
        completion_key="max_completion_length",
        context_key=key,
    )
