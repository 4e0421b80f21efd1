"""TRL and Open-R1: its batch rules, version by version, and everything else that a launch refuses or ignores.

Read in the sources of TRL 0.15 to 1.16 and held to them: `tests/cohort_check/test_check_trl.py` compares every regime
with the real one's `GRPOConfig` (or, up to 0.17, with a table made of its trainer's check). W is the number of
processes.
"""

import math
from collections.abc import Container, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from cohort_check.findings import Finding, load_table
from cohort_check.launch import Launch, Setting, Settings
from cohort_check.rules import common
from cohort_check.rules.common import EVALUATION, BatchSizes, RunRules, Start, Version, parse_version, refused

Refusal = tuple[str, str | None]  # the framework's message, and the key that it is about if it is not the usual one
EVAL_BATCH = "per_device_eval_batch_size"
_PER_DEVICE = "per_device_train_batch_size"
_MESSAGES: dict[str, str] = load_table("rules/messages.yaml")["trl"]
_FIELDS: dict[str, str] = common.FRAMEWORKS["trl"]["sizes"]  # by TRL's and ms-swift's key: the field of TrlBatch


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
        """Return a copy of the batch with some of its sizes replaced."""
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
        yield _MESSAGES["both_set"], "generation_batch_size"
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
        yield _MESSAGES["too_few"].format(generations=batch.generations), None


def _groups_to_0_19(batch: TrlBatch, world_size: int, version: Version) -> Iterator[Refusal]:
    """Whole groups of completions, up to 0.19, where the message lists the numbers that would do."""
    given, generations, train = batch.generation_batch_size, batch.generations, [world_size, batch.per_device]
    if version >= (0, 17):
        if generations < 2:
            yield _MESSAGES["too_few"].format(generations=generations), None
        train.append(_steps(batch, version) if given is None else given // math.prod(train))
    names = ("effective train", "effective eval") if version >= (0, 17) else ("global train", "global eval")
    possible = common.divisors(*(train if given is None else [given]))
    if generations not in possible:
        yield _uneven(names[0], train, possible, generations, version), None
    evaluation = [world_size, batch.per_device_eval]
    possible = common.divisors(*evaluation)
    if batch.evaluates and generations not in possible:
        name = "global eval" if version >= (0, 18) else names[1]
        yield _uneven(name, evaluation, possible, generations, version), EVAL_BATCH


def _uneven(name: str, sizes: list[int], possible: list[int], generations: int, version: Version) -> str:
    given = name if version >= (0, 17) else name.removeprefix("global ")
    product = " x ".join(map(str, sizes))
    numbers = {"sizes": product, "generations": generations, "possible": possible}
    return _MESSAGES["uneven"].format(name=name, given=given, **numbers)


_OF_THE_COMMAND = {*load_table("keys/trl.json")["launcher"], "accelerate_config", "config", "env"}  # of `trl grpo`
# keys that decide whether vLLM's parallelism has to fit, and nothing where it is 1
_ONLY_WITH_PARALLEL = frozenset(("use_vllm", "vllm_mode", "vllm_device"))


def trl_rules(launch: Launch, version: str | None = None) -> RunRules:
    """Apply the rules of one version of TRL: the given one, the file's own, or the default."""
    name, reason = common.choose_version(launch, version)
    number, settings = parse_version(name), Settings(launch)
    known, mode = common.known_keys(common.keys_of(launch.framework), number), sampling_mode(settings, number)
    defaults = {name: known[key]["default"] for key, name in _FIELDS.items() if key in known}
    batch = read_batch(
        settings,
        TrlBatch(**defaults),
        known=known,
        evaluates={settings.text(name, "no") for name in ("eval_strategy", "evaluation_strategy")} != {"no"},
        colocated=mode == "colocate" and "vllm_tensor_parallel_size" in known,
    )
    decides = frozenset(settings.used - _ONLY_WITH_PARALLEL)
    local = mode == "server" and common.is_server_local(settings)
    findings = [
        *common.version_findings("trl", name),
        *_key_findings(launch, number),
        *common.contradictions("trl", settings, number),
        *_weights(settings),
        *_quantization(settings, launch, number),
        *common.gpu_findings(launch, local_server=local, takes_one_for_vllm=mode == "a GPU of its own"),
    ]

    def of_unsloth(batch: TrlBatch, processes: int) -> TrlBatch:
        return _raised(batch, processes, known) if launch.framework == "unsloth" else batch

    if settings.readable(*decides - EVALUATION):
        processes = max(int(launch.processes.value), 1) if launch.processes else 1
        new = of_unsloth(batch, processes).per_device
        text = f"{_PER_DEVICE}: {batch.per_device} as written, which Unsloth raises to num_generations {new}"
        findings += [Finding("CHK005", _PER_DEVICE, text)] if new != batch.per_device else []
        loss = settings.text("loss_type", known.get("loss_type", {}).get("default"))
        findings += _steps_findings(loss, batch, processes, number)
    return RunRules(
        version=name,
        version_reason=reason,
        sizes=batch.sizes(),
        decides=decides,
        start=lambda processes, sizes: trl_start(of_unsloth(batch.changed(sizes), processes), processes, number),
        sampling=common.SAMPLING[mode],
        findings=(*settings.findings, *findings),
        blocked=next((finding.says for finding in findings if finding.code == "CHK008"), None),
    )


def _raised(batch: TrlBatch, processes: int, known: common.Keys) -> TrlBatch:
    """Return the batch size to which Unsloth raises one that does not hold whole groups."""
    if batch.steps_per_generation or batch.generation_batch_size:
        return batch
    size = batch.per_device * (batch.accumulation * processes if "steps_per_generation" in known else 1)
    return replace(batch, per_device=batch.generations) if size % batch.generations else batch


def sampling_mode(settings: Settings, version: Version) -> str:
    """Where completions are sampled: none (of vLLM's), colocate, server, or a GPU of its own (before 0.16)."""
    if not settings.flag("use_vllm"):
        return "none"
    if settings.framework == "unsloth":
        return "colocate"
    if version < (0, 16):
        return "a GPU of its own" if settings.text("vllm_device", "auto") == "auto" else "server"
    keys = common.known_keys("trl", version)
    mode = settings.text("vllm_mode", keys["vllm_mode"]["default"]) if version >= (0, 18) else "server"
    return "colocate" if mode == "colocate" else "server"


def _key_findings(launch: Launch, version: Version) -> Iterator[Finding]:
    """What is to say about each key of a recipe, of `GRPOConfig(...)` or of a command line."""
    known = dict(common.known_keys(common.keys_of(launch.framework), version))
    known |= common.known_keys("open-r1", version) if launch.framework == "open-r1" else {}
    unread = (entry for entry in launch.unread if launch.form == "python" and entry.key.isidentifier())
    computed = [(entry.key, Setting(None, entry.where, entry.added)) for entry in unread]
    for key, said in [*launch.settings.items(), *computed]:
        of_trainer = key.startswith("trainer.") or (said.value is None and key in common.OF_THE_TRAINER)
        if of_trainer or said.added:  # by the script's own classes
            continue
        deprecated = known.get(key, {}).get("deprecated")
        short = launch.form == "shell" and sum(name.startswith(key) for name in known) == 1  # which argparse completes
        if key not in known and key not in _OF_THE_COMMAND and not short:
            yield _unknown(key, said, launch, known, version)
        elif isinstance(deprecated, str):
            yield Finding("CHK007", key, f"{key} is called {deprecated} now, and the old name will go", (deprecated,))
        elif deprecated and key.startswith("vllm_") and said.value is not None:
            yield Finding("CHK005", key, f"{key} does nothing in this version: it is an option of `trl vllm-serve`")
    own = any(str(entry.value).startswith("trainer:") for entry in launch.todo)  # one that may have other arguments
    for entry in () if own else launch.todo:  # arguments of GRPOTrainer(...) that it does not have
        key = str(entry.value).partition("=")[0]
        says = f"GRPOTrainer.__init__() got an unexpected keyword argument '{key}'"
        since = common.FRAMEWORKS["trl"]["trainer"].get(key, "0")
        if known.get(key, {}).get("of") in ("GRPOConfig", "TrainingArguments"):
            yield Finding("CHK006", key, f"{key} belongs into GRPOConfig(...)", (), entry.where, says)
        elif version < parse_version(since):
            yield Finding("CHK006", key, f"GRPOTrainer has {key} from TRL {since} on", (), entry.where, says)


def _unknown(key: str, said: Setting, launch: Launch, known: common.Keys, version: Version) -> Finding:
    entries = [table[key] for table in common.key_tables("trl").values() if key in table]
    deprecated = (entry["deprecated"] for entry in entries if isinstance(entry.get("deprecated"), str))
    new = next(deprecated, common.FRAMEWORKS["trl"]["renamed"].get(key, ""))
    text, nearest = common.unknown_key("trl", version, key, known, new)
    in_recipe = launch.form == "yaml" or said.where.partition(":")[0].endswith((".yaml", ".yml"))
    if key == "evaluation_strategy" or any(entry["of"] == "TrainingArguments" for entry in entries):
        fate = "is dropped silently" if in_recipe else "stops the run"
        return Finding("CHK005", key, f"{text}; with a version of transformers that lacks it, it {fate}", nearest)
    if not in_recipe:
        says = f"GRPOConfig.__init__() got an unexpected keyword argument '{key}'"
        if launch.form == "shell" or said.where == "--launch":
            says = f"Some specified arguments are not used by the HfArgumentParser: ['--{key}', ...]"
        return Finding("CHK006", key, text, nearest, says=says)
    return Finding("CHK007" if new in known else "CHK005", key, f"{text}, and drops it silently", nearest)


def _weights(settings: Settings) -> Iterator[Finding]:
    """Another number of weights than of reward functions."""
    rewards = settings.said("reward_funcs") or settings.said("trainer.reward_funcs")
    weights = settings.said("reward_weights")
    if isinstance(rewards, list) and isinstance(weights, list) and len(rewards) != len(weights):
        says = f"Number of reward weights ({len(weights)}) must match number of reward functions ({len(rewards)})"
        text = "each reward function needs one weight"
        yield Finding("CHK008", "reward_weights", text, ("without reward_weights",), says=says)


def _quantization(settings: Settings, launch: Launch, version: Version) -> list[Finding]:
    """Quantized weights that nothing trains."""
    flags = ("load_in_4bit", "load_in_8bit")
    key = next((name for name in flags if settings.flag(name) or settings.flag(f"trainer.{name}")), None)
    # TRL's script hands it to the model from 0.26 on, and Unsloth loads a saved adapter by the name of its folder
    of_script = launch.framework == "trl" and launch.form != "python"
    has_adapter = settings.said("trainer.peft_config") or settings.flag("use_peft") or launch.framework == "unsloth"
    if key is None or has_adapter or (of_script and version < (0, 26)) or not settings.readable("peft_config"):
        return []
    nearest = "peft_config=LoraConfig()" if launch.form == "python" else "use_peft=true"
    text = "a quantized model trains only with an adapter"
    return [Finding("CHK008", key, text, (nearest, f"{key}=false"), says=_MESSAGES["purely_quantized"])]


def _steps_findings(loss: str | None, batch: TrlBatch, processes: int, version: Version) -> list[Finding]:
    """Find `steps_per_generation` that is 0 or scales the loss wrongly."""
    steps = trl_start(replace(batch, evaluates=False), processes, version).steps_per_generation
    name = ".".join(map(str, version))
    if steps == 0:
        message = _MESSAGES["no_steps"].format(version=name, processes=processes, **asdict(batch))
        right = (f"generation_batch_size={batch.per_device * processes}",)
        return [Finding("CHK017", "generation_batch_size", message, right)]
    scaled = loss in ("dapo", "cispo", "vespo") and (0, 22) <= version < (1, 16)
    if not scaled or steps is None or steps == batch.accumulation:
        return []
    numbers = {"steps": steps, "times": batch.accumulation / steps, "accumulation": batch.accumulation}
    message = _MESSAGES["scaled"].format(loss=loss, version=name, **numbers)
    equal = (f"steps_per_generation={batch.accumulation}", f"gradient_accumulation_steps={steps}")
    return [Finding("CHK016", "steps_per_generation", message, equal)]
