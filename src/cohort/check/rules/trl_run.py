"""A launch of TRL or Open-R1: its batch, its keys, and everything else that TRL refuses or ignores."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cohort.check.findings import Finding
from cohort.check.launch import Launch, Setting, Settings
from cohort.check.lora import trl_lora
from cohort.check.quantization import trl_bits
from cohort.check.rules import common, keys
from cohort.check.rules.contradictions import contradictions
from cohort.check.rules.keys import Version, parse_version
from cohort.check.rules.start import EVALUATION, BatchSizes, RunRules, Start
from cohort.check.rules.trl import EVAL_BATCH, TrlBatch, refusals, trl_start
from cohort.check.rules.versions import choose_version, version_findings

_NEW_LOSSES = {(0, 17): "grpo bnpo dr_grpo", (0, 22): "dapo", (0, 26): "cispo sapo", (0, 28): "luspo", (1, 0): "vespo"}
_LOSSES: dict[str, Version] = {loss: first for first, losses in _NEW_LOSSES.items() for loss in losses.split()}
_SCRIPT_QUANTIZES = (0, 26)  # from which version on `trl grpo` hands load_in_4bit to the model
_FIELDS = {  # TRL's key: the field of TrlBatch that it is
    "per_device_train_batch_size": "per_device",
    EVAL_BATCH: "per_device_eval",
    "gradient_accumulation_steps": "accumulation",
    "num_generations": "generations",
    "num_generations_eval": "generations_eval",
    "generation_batch_size": "generation_batch_size",
    "steps_per_generation": "steps_per_generation",
}
_NEW_NAMES = {  # of keys whose help does not say it while they are there
    "evaluation_strategy": "eval_strategy",
    "max_length": "max_completion_length",
    "provider_type": "code_provider",
    "torch_dtype": "dtype",
    "use_liger_loss": "use_liger_kernel",
    "vllm_max_model_len": "vllm_max_model_length",
}
_OF_THE_COMMAND = keys.launcher_keys("trl") | {"accelerate_config", "config", "env"}  # of `trl grpo`
_PURELY_QUANTIZED = (
    "You cannot perform fine-tuning on purely quantized models. Please attach trainable adapters on top of the "
    "quantized model to correctly perform fine-tuning. Please see: https://huggingface.co/docs/transformers/peft "
    "for more details"
)
# keys that decide whether vLLM's parallelism has to fit, and nothing where it is 1
_ONLY_WITH_PARALLEL = frozenset(("use_vllm", "vllm_mode", "vllm_device"))
_SAMPLING = {
    "none": "by the training processes, with transformers",
    "colocate": "by vLLM inside the training processes",
    "server": "by a vLLM server, which needs GPUs of its own",
    "a GPU of its own": "by vLLM on the GPU after the training processes' own",
}
_SLEEPS = "vllm_enable_sleep_mode"
_SERVER_KEYS = ("vllm_server_host", "vllm_server_port", "vllm_server_base_url")
_COLOCATED_KEYS = ("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_max_model_length", _SLEEPS)


def trl_rules(launch: Launch, version: str | None = None) -> RunRules:
    """Apply the rules of one version of TRL: the given one, the file's own, or the default."""
    name, reason = choose_version(launch, version)
    number = parse_version(name)
    settings = Settings(launch)
    batch = _batch(settings, number)
    decides = frozenset(settings.used - _ONLY_WITH_PARALLEL)
    mode = sampling_mode(settings, number)
    findings = [
        *version_findings("trl", name),
        *_key_findings(launch, number),
        *contradictions("trl", settings, number),
        *_numbers(settings, number),
        *_quantization(settings, launch, number),
    ]
    blocked = next((f.says for f in findings if f.code == "CHK008"), None)
    unknown = {finding.field for finding in findings if finding.code == "CHK005"}
    findings += [f for f in _without_effect(settings, mode, number) if f.field not in unknown]
    findings += _losses(settings, number)
    if mode == "colocate" and _SLEEPS in keys.known_keys("trl", number):
        sleeps = settings.flag(_SLEEPS)
        findings += common.awake_findings(settings, _SLEEPS, f"{_SLEEPS}=true", sleeps=sleeps, share=0.3)
    if settings.readable(*decides - EVALUATION):
        findings += _steps(settings, batch, number, launch)
    if settings.readable(*decides) and not batch.evaluates:
        findings += _evaluation(batch, number, launch)
    findings += _lengths(settings, mode, launch)
    findings += _gpus(settings, mode, launch)
    sizes = {key: value for key, name in _FIELDS.items() if (value := getattr(batch, name)) is not None}
    if not batch.evaluates:
        sizes = {key: value for key, value in sizes.items() if key not in EVALUATION}

    def start(world_size: int, changed: BatchSizes) -> Start:
        fields: dict[str, Any] = {_FIELDS[key]: value for key, value in changed.items()}
        return trl_start(replace(batch, **fields), world_size, number)

    return RunRules(
        version=name,
        version_reason=reason,
        sizes=sizes,
        decides=decides,
        start=start,
        sampling=_SAMPLING[mode],
        findings=(*settings.findings, *findings),
        blocked=blocked,
    )


def trl_default(key: str, version: Version) -> Any:
    """The default of a key of this version; None if it has none, or is not there."""
    return keys.known_keys("trl", version).get(key, {}).get("default")


def sampling_mode(settings: Settings, version: Version) -> str:
    """Where completions are sampled: none (of vLLM's), colocate, server, or a GPU of its own (before 0.16)."""
    if not settings.flag("use_vllm"):
        return "none"
    if version < (0, 16):
        return "a GPU of its own" if settings.text("vllm_device", "auto") == "auto" else "server"
    mode = settings.text("vllm_mode", trl_default("vllm_mode", version)) if version >= (0, 18) else "server"
    return "colocate" if mode == "colocate" else "server"


def _batch(settings: Settings, version: Version) -> TrlBatch:
    """The numbers of the batch. Keys that this version does not know do not count."""
    known = keys.known_keys("trl", version)
    strategy = settings.text("eval_strategy", settings.text("evaluation_strategy", "no"))
    parallel = sampling_mode(settings, version) == "colocate" and "vllm_tensor_parallel_size" in known
    unset = TrlBatch()
    numbers = {name: settings.whole(key, getattr(unset, name)) for key, name in _FIELDS.items() if key in known}
    return TrlBatch(
        **numbers,
        evaluates=strategy != "no" and settings.readable(*EVALUATION),
        tensor_parallel=settings.whole("vllm_tensor_parallel_size", 1) if parallel else 1,
    )


def _key_findings(launch: Launch, version: Version) -> Iterator[Finding]:
    """What is to say about each key of a recipe, of `GRPOConfig(...)` or of a command line."""
    known = dict(keys.known_keys("trl", version))
    known |= keys.known_keys("open-r1", version) if launch.framework == "open-r1" else {}
    for key, said in launch.settings.items():
        if key.startswith("trainer.") or said.added:  # of GRPOTrainer(...), or of the script's own classes
            continue
        deprecated = known.get(key, {}).get("deprecated")
        if key not in known and key not in _OF_THE_COMMAND:
            yield _unknown(key, said, launch, known, version)
        elif isinstance(deprecated, str):
            yield Finding("CHK007", key, f"{key} is called {deprecated} now, and the old name will go", (deprecated,))
        elif deprecated and key.startswith("vllm_") and said.value is not None:
            yield Finding("CHK005", key, f"{key} does nothing in this version: it is an option of `trl vllm-serve`")
    for entry in launch.todo:  # arguments of GRPOTrainer(...) that it does not have
        key = str(entry.value).partition("=")[0]
        if known.get(key, {}).get("of") in ("GRPOConfig", "TrainingArguments"):
            says = f"GRPOTrainer.__init__() got an unexpected keyword argument '{key}'"
            yield Finding("CHK006", key, f"{key} belongs into GRPOConfig(...)", (), entry.where, says)


def _unknown(key: str, said: Setting, launch: Launch, known: keys.Keys, version: Version) -> Finding:
    entries = [table[key] for table in keys.key_tables("trl").values() if key in table]
    deprecated = (entry["deprecated"] for entry in entries if isinstance(entry.get("deprecated"), str))
    new = next(deprecated, _NEW_NAMES.get(key))
    nearest = (str(new),) if new in known else keys.nearest_keys(key, known)
    history = keys.key_history("trl", key)
    why = f"TRL {'.'.join(map(str, version))} does not know {key}{f', which was there {history}' if history else ''}"
    in_recipe = launch.form == "yaml" or said.where.partition(":")[0].endswith((".yaml", ".yml"))
    if any(entry["of"] == "TrainingArguments" for entry in entries):
        fate = "is dropped silently" if in_recipe else "stops the run"
        return Finding("CHK005", key, f"{why}; with a version of transformers that lacks it, it {fate}", nearest)
    if not in_recipe:
        says = f"GRPOConfig.__init__() got an unexpected keyword argument '{key}'"
        if launch.form == "shell" or said.where == "--launch":
            says = f"Some specified arguments are not used by the HfArgumentParser: ['--{key}', ...]"
        return Finding("CHK006", key, why, nearest, says=says)
    if new in known:
        return Finding("CHK007", key, f"{why}; it is called {new}, and the old name is dropped silently", nearest)
    return Finding("CHK005", key, f"{why}, and drops it silently", nearest)


def _numbers(settings: Settings, version: Version) -> Iterator[Finding]:
    """Numbers that stop the run together."""
    rewards = settings.said("reward_funcs") or settings.said("trainer.reward_funcs")
    weights = settings.said("reward_weights")
    text = "these settings do not go together"
    if isinstance(rewards, list) and isinstance(weights, list) and len(rewards) != len(weights):
        says = f"Number of reward weights ({len(weights)}) must match number of reward functions ({len(rewards)})"
        yield Finding("CHK008", "reward_weights", text, ("without reward_weights",), says=says)
    clip = "vllm_importance_sampling_clip"
    low, high = settings.number(f"{clip}_min", None), settings.number(f"{clip}_max", 3.0)
    if version >= (1, 6) and low is not None and low >= high:
        says = f"{clip}_min ({low}) must be less than {clip}_max ({high})."
        yield Finding("CHK008", f"{clip}_min", text, (f"without {clip}_min",), says=says)


def _without_effect(settings: Settings, mode: str, version: Version) -> list[Finding]:
    """Keys of vLLM that this way of sampling does not look at."""
    if version < (0, 18):
        return []
    reason, keys = {
        "none": ("use_vllm is false", (*_SERVER_KEYS, *_COLOCATED_KEYS)),
        "server": ("a server samples, which has options of its own", _COLOCATED_KEYS),
        "colocate": ("vLLM samples inside the training processes and no server is asked", _SERVER_KEYS),
    }[mode]
    return [Finding("CHK005", key, f"{key} has no effect: {reason}") for key in keys if settings.said(key) is not None]


def _losses(settings: Settings, version: Version) -> list[Finding]:
    """Settings that change a loss unintentionally. Before 0.17 loss_type has no effect and has a finding of its own."""
    default = trl_default("loss_type", version)
    loss = settings.text("loss_type", default)
    known = tuple(name for name, first in _LOSSES.items() if version >= first)
    if default is None:
        return []
    if loss not in known:
        message = "loss_type: fails in the first step, after generation"
        message += f"; TRL has it from {'.'.join(map(str, _LOSSES[loss]))} on" if loss in _LOSSES else ""
        return [Finding("CHK010", "loss_type", message, known, says=f"Unknown loss type: {loss}")]
    return common.cispo_findings(settings) if loss == "cispo" else []


def _quantization(settings: Settings, launch: Launch, version: Version) -> list[Finding]:
    """Quantized weights that nothing trains, or that nobody hands to the model."""
    bits = trl_bits(settings)
    if bits is None or not settings.readable("peft_config"):
        return []
    key = f"load_in_{bits}bit"
    if launch.framework == "trl" and launch.form != "python" and version < _SCRIPT_QUANTIZES:
        message = f"{key} has no effect: `trl grpo` hands it to the model from TRL 0.26 on"
        return [Finding("CHK005", key, message, ("--framework-version 0.26",))]
    if trl_lora(settings) is not None:
        return []
    nearest = "peft_config=LoraConfig()" if launch.form == "python" else "use_peft=true"
    text = "a quantized model trains only with an adapter"
    return [Finding("CHK008", key, text, (nearest, f"{key}=false"), says=_PURELY_QUANTIZED)]


def _steps(settings: Settings, batch: TrlBatch, version: Version, launch: Launch) -> list[Finding]:
    """Steps per generation that are 0 or scale the loss wrongly."""
    loss = settings.text("loss_type", trl_default("loss_type", version))
    processes = max(int(launch.processes.value), 1) if launch.processes else 1
    steps = trl_start(replace(batch, evaluates=False), processes, version).steps_per_generation
    name = ".".join(map(str, version))
    if steps == 0:
        message = (
            f"generation_batch_size {batch.generation_batch_size} passes TRL {name}'s check and is less than one "
            f"micro-step of {processes} processes x {batch.per_device}: steps_per_generation is 0"
        )
        right = (f"generation_batch_size={batch.per_device * processes}",)
        return [Finding("CHK017", "generation_batch_size", message, right)]
    scaled = loss in ("dapo", "cispo", "vespo") and (0, 22) <= version < (1, 16)
    if not scaled or steps is None or steps == batch.accumulation:
        return []
    message = (
        f"{loss} with steps_per_generation {steps} and gradient_accumulation_steps {batch.accumulation}: TRL {name} "
        f"divides by the tokens of the whole generation batch, so the gradient is about "
        f"{batch.accumulation / steps:g} times what it should be (right again in 1.16)"
    )
    equal = (f"steps_per_generation={batch.accumulation}", f"gradient_accumulation_steps={steps}")
    return [Finding("CHK016", "steps_per_generation", message, equal)]


def _evaluation(batch: TrlBatch, version: Version, launch: Launch) -> list[Finding]:
    """An evaluation batch that is refused as soon as evaluation is on."""
    on = replace(batch, evaluates=True)

    def refusal(processes: int) -> str | None:
        return next((text for text, field in refusals(on, processes, version) if field == EVAL_BATCH), None)

    generations = batch.generations_eval or batch.generations
    text = "evaluation is off; TRL would refuse it"
    per_device = batch.per_device_eval
    return common.evaluation_findings(launch, refusal, per_device=per_device, generations=generations, text=text)


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
    keys = {"prompt_key": "max_prompt_length", "completion_key": "max_completion_length", "context_key": key}
    return common.length_finding(prompt, completion, context, **keys)


def _gpus(settings: Settings, mode: str, launch: Launch) -> list[Finding]:
    """GPUs used twice or not at all, and the server's own."""
    local = common.is_local(settings.text("vllm_server_base_url") or settings.text("vllm_server_host", "0.0.0.0"))
    found = common.gpu_findings(
        launch,
        local_server=mode == "server" and local,
        remote_server=mode == "server" and not local,
        takes_one_for_vllm=mode == "a GPU of its own",
    )
    return found + common.server_size_finding(launch, "")
