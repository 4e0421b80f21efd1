"""Read what decides the memory of a run of TRL, Open-R1, ms-swift or verl, with the framework's own defaults.

Names of keys are in `check/memory.toml`. Values that a file does not set are listed as assumptions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cohort.check.launch import Launch, Settings, Sharding
from cohort.check.lora import NAMES, swift_lora, trl_lora, verl_lora
from cohort.check.quantization import swift_bits, trl_bits
from cohort.check.rules.keys import Version, known_keys
from cohort.check.rules.memory_parts import Engine, RunMemory
from cohort.config.adapter import AdapterConfig
from cohort.plan.shape import try_read_shape

USUAL_PROCESSES = 8  # if the file does not say
_USUAL_PROMPT = 512
_LIGER_BY_KERNEL = (0, 25)  # TRL from which on `use_liger_kernel` is of the loss
_AUTOGRAD_COPIES = 3  # of logits: themselves, their gradient, a temporary
_ENTROPY_COPIES = 2  # more, where entropy has a gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The memory of a run, with the assumptions and possible fixes."""

    run: RunMemory
    key: str  # that a finding is about
    assumes: tuple[str, ...]
    fixes: Mapping[str, str]  # the framework's own words for each kind of change


class UncheckedError(Exception):
    """The memory of a run cannot be estimated; the message says why."""


class _Facts:
    """What a launch says, by the names of `memory.toml`, with the assumptions so far."""

    def __init__(self, launch: Launch, framework: str, version: Version) -> None:
        self.launch, self.version = launch, version
        self.settings = Settings(launch)
        self.names: Mapping[str, str] = NAMES[framework]["keys"]
        self.fixes: dict[str, str] = dict(NAMES[framework]["fixes"])
        self.usual: Mapping[str, Any] = NAMES[framework].get("usual", {})
        self.known = known_keys(framework, version)
        self.assumes: list[str] = []
        if launch.processes is None:
            self.assumes.append(f"{USUAL_PROCESSES} processes, as the file does not say")
        self.processes = max(1, int(launch.processes.value)) if launch.processes else USUAL_PROCESSES

    def default(self, name: str) -> Any:
        key = self.names.get(name, "")
        return self.usual.get(name, self.known[key]["default"] if key in self.known else None)

    def number(self, name: str) -> Any:
        return self.settings.number(self.names.get(name, ""), self.default(name))

    def text(self, name: str) -> str:
        return str(self.settings.text(self.names.get(name, ""), self.default(name)))

    def flag(self, name: str) -> bool:
        """Of a key that is true or false, or a level that is not 0."""
        return self.text(name).lower() not in ("false", "no", "none", "0")

    def engine(self) -> Engine | None:
        """Return the engine on the training GPUs, if there is one; verl always has one."""
        if "use_vllm" in self.names and not (self.flag("use_vllm") and self.text("vllm_mode") == "colocate"):
            return None
        names = ("sleeps", "weights_leave", "optimizer_leaves")
        return Engine(share=self.number("share"), **{name: self.flag(name) for name in names})


def estimate_memory(launch: Launch, version: Version) -> Estimate:
    """Estimate the memory of a run of a version of its framework.

    Raises:
        UncheckedError: the model's shape is not known, or something of the run is not counted here.
    """
    framework = "trl" if launch.framework == "open-r1" else launch.framework
    facts = _Facts(launch, framework, version)
    parts: Mapping[str, Callable[[_Facts], dict[str, Any]]] = {"trl": _trl, "ms-swift": _swift, "verl": _verl}
    own = parts[framework](facts)
    named = own.pop("model", facts.settings.said(facts.names["model"]))
    shape = try_read_shape(named) if isinstance(named, str) else None
    if shape is None:
        raise UncheckedError(f"the shape of model {named if named else '(not set)'} is not known")
    if own.get("quantized_bits") is not None and shape.experts > 1:
        raise UncheckedError("quantized experts are not counted here")
    adapter = own["adapter"]  # dropout is left out: rows are padded there in any case
    optimizer = str(facts.settings.text("optim", "adamw"))
    if (prompt := facts.number("prompt")) is None:
        facts.assumes.append(f"prompts of {_USUAL_PROMPT} tokens, as the file does not bound them")
    common = {
        "shards": facts.processes,
        "sequences": facts.number("sequences"),
        "prompt_tokens": prompt or _USUAL_PROMPT,
        "completion_tokens": facts.number("completion"),
        "checkpointing": facts.flag("checkpointing"),
        "logit_copies": 0 if facts.flag("fused") else _AUTOGRAD_COPIES,
        "logit_bytes": own["compute_bytes"] if own["sharding"].by == "deepspeed" else 4,  # autocast's are float32
        "sequence_parallel": facts.number("sequence_parallel") or 1,
        "has_reference": bool(facts.number("beta")) and adapter is None,
        "moment_bytes": 2 if "8bit" in optimizer else 0 if optimizer in ("adafactor", "sgd") else None,  # None: AdamW
    }
    lora = AdapterConfig(rank=adapter[0]["rank"], targets=adapter[0]["targets"]) if adapter else None
    run = RunMemory(
        **{**common, **own, "shape": shape, "processes": facts.processes, "adapter": lora, "engine": facts.engine()}
    )
    key = facts.names["budget" if run.token_budget is not None else "sequences"]
    of_state = []
    if run.has_master_weights and not run.sharding.offloads_optimizer:
        each = 12 if run.moment_bytes is None else 4 + run.moment_bytes
        of_state = [f"float32 master weights and moments, {each} bytes a weight, as DeepSpeed and FSDP keep for bf16"]
    assumes = (*of_state, *facts.assumes, "prompts and completions of full length")
    return Estimate(run=run, key=key, assumes=assumes, fixes=facts.fixes)


def _trl(facts: _Facts) -> dict[str, Any]:
    """Read a run of TRL or Open-R1."""
    settings, version = facts.settings, facts.version
    bits = trl_bits(settings)
    sharding = facts.launch.sharding or Sharding(0, "ddp")
    if facts.launch.sharding is None and facts.processes > 1 and bits is not None:
        facts.assumes.append("the whole quantized model in every process, as the file does not say otherwise")
    elif facts.launch.sharding is None and facts.processes > 1:
        facts.assumes.append("ZeRO-3, as the file does not say how processes share weights and optimizer state")
        sharding = Sharding(3, "deepspeed")
    extra = settings.said("model_init_kwargs")
    extra = extra if isinstance(extra, dict) else {}
    said = settings.text("dtype", settings.text("torch_dtype", extra.get("dtype", extra.get("torch_dtype"))))
    half = str(said or settings.said("trainer.dtype")).removeprefix("torch.") in ("bfloat16", "float16", "auto")
    computes_half = half or settings.flag("bf16", version >= (0, 22)) or settings.flag("fp16")
    fused = facts.flag("fused") and version >= _LIGER_BY_KERNEL  # before, that key is of the model's layers alone
    fused = fused or (settings.flag("use_liger_loss") and version < (0, 28)) or version >= (1, 16)
    if version < _LIGER_BY_KERNEL:
        facts.fixes["fused"] = "use_liger_loss=true"
    if facts.launch.form == "python":
        facts.fixes["adapter"] = "peft_config=LoraConfig()"
    for kind, since in (("quantized", (0, 26)), ("sleeps", (0, 24))):
        if version < since:
            del facts.fixes[kind]
    return {
        "model": settings.text("model_name_or_path", settings.said("trainer.model")),
        "adapter": trl_lora(settings),
        "quantized_bits": bits,
        "sharding": sharding,
        "weight_bytes": 2 if half else 4,
        "compute_bytes": 2 if computes_half else 4,
        "logit_copies": 0 if fused else _AUTOGRAD_COPIES,
    }


def _swift(facts: _Facts) -> dict[str, Any]:
    """Read a run of ms-swift on transformers. Without deepspeed or fsdp nothing is sharded."""
    settings = facts.settings
    tuner = settings.text("tuner_type", settings.text("train_type"))
    if tuner not in ("lora", "full", None):
        raise UncheckedError(f"tuner {tuner} is not counted here")
    bits = swift_bits(settings)
    if bits is None and settings.text("quant_method") is not None:
        raise UncheckedError(f"quant_method {settings.text('quant_method')} is not counted here")
    if facts.processes == 1 and len(facts.launch.training_gpus or ()) > 1:
        raise UncheckedError("one process with several GPUs spreads the model over them by device_map")
    if settings.text("torch_dtype") is None:
        facts.assumes.append("bfloat16 weights, as most models are saved (torch_dtype is not set)")
    if tuner is None:
        facts.assumes.append("LoRA, ms-swift's default")
    sharding = facts.launch.sharding or Sharding(0, "ddp")
    return {
        "adapter": swift_lora(settings),
        "quantized_bits": bits,
        "sharding": sharding,
        "weight_bytes": 4 if settings.text("torch_dtype") == "float32" else 2,
        "compute_bytes": 2,  # float32 weights compute in float16 there
        "checkpointing": facts.flag("checkpointing") or sharding.by == "fsdp",
    }


def _verl(facts: _Facts) -> dict[str, Any]:
    """Read a run of verl with FSDP, whose reference is always in host memory."""
    strategy = facts.text("strategy")
    if strategy not in ("fsdp", "fsdp2"):
        raise UncheckedError(f"strategy {strategy} is not counted here")
    on_host = strategy == "fsdp2" and facts.flag("on_host")
    hybrid = facts.number("fsdp_size")
    sequences = facts.number("sequences") or max(
        1, (facts.number("all_sequences") or facts.processes) // facts.processes
    )
    if facts.settings.text("algorithm.adv_estimator", "gae") == "gae":
        facts.assumes.append("no critic, which GAE has besides")
    copies = 1 + _ENTROPY_COPIES * (facts.number("entropy") != 0)  # flash-attn's gradient takes the logits' place
    return {
        "adapter": verl_lora(facts.settings),
        "shards": hybrid if 0 < hybrid < facts.processes else facts.processes,
        "sharding": Sharding(3, "fsdp", offloads_optimizer=on_host, offloads_weights=on_host),
        "weight_bytes": 4 if facts.text("dtype") in ("fp32", "float32") else 2,
        "compute_bytes": 2,
        "sequences": sequences,
        "logit_copies": 0 if facts.flag("fused") else copies,
        "logit_bytes": 2,
        "scores_prompts": True,
        "token_budget": facts.number("budget") if facts.flag("dynamic") else None,
        "masters": False,
    }
