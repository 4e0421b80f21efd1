"""The memory of a run of TRL, Open-R1, ms-swift or verl, from what its file says and the framework's own defaults.

Defaults are those of TRL 0.15 to 1.16, ms-swift 4.6.0 and verl 0.9.1. What a file does not say is an assumption, and is
told as one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cohort.check.launch import Launch, Settings, Sharding
from cohort.check.lora import SWIFT, VERL, read_lora, trl_lora
from cohort.check.quantization import swift_bits, trl_bits
from cohort.check.readers.swift import MEGATRON
from cohort.check.rules.memory_parts import Engine, RunMemory
from cohort.check.rules.trl import Version
from cohort.config.adapter import AdapterConfig
from cohort.plan.shape import ModelShape, try_read_shape

USUAL_PROCESSES = 8  # where the file does not say
_USUAL_PROMPT = 512
_LIGER_BY_KERNEL = (0, 25)  # TRL from which on `use_liger_kernel` is of the loss
_AUTOGRAD_COPIES = 3  # of logits: themselves, their gradient, a temporary
_ENTROPY_COPIES = 2  # more, where entropy has a gradient
_VERL_SHARDED = "actor_rollout_ref.actor.fsdp_config"

_SWIFT_WORDS = {
    "sequences": "per_device_train_batch_size={}",
    "checkpointing": "gradient_checkpointing=true",
    "fused": "use_liger_kernel=true",
    "sharded": "deepspeed=zero3",
    "all_on_host": "deepspeed=zero3_offload",
    "adapter": "tuner_type=lora",
    "quantized": "quant_method=bnb and quant_bits=4",
    "sleeps": "sleep_level=1",
    "leave": "offload_model=true and offload_optimizer=true",
    "share": "vllm_gpu_memory_utilization={}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A run's memory, and how to talk about it."""

    run: RunMemory
    key: str  # that a finding is about
    assumes: tuple[str, ...]
    words: Mapping[str, str] = field(default_factory=dict)  # the framework's own for each kind of change


class NotJudgedError(Exception):
    """Why nothing is said about the memory of a run."""


@dataclass(slots=True)
class _Facts:
    """What all frameworks have in common, with the assumptions so far."""

    launch: Launch
    settings: Settings
    assumes: list[str] = field(default_factory=list)

    def shape(self, named: Any, *, quantized: bool = False) -> ModelShape:
        """Raises: NotJudgedError: it is not known, or cannot be counted."""
        shape = try_read_shape(named) if isinstance(named, str) else None
        if shape is None:
            raise NotJudgedError(f"the shape of model {named if named else '(not said)'} is not known")
        if quantized and shape.experts > 1:
            raise NotJudgedError("quantized experts are not counted here")
        return shape

    def processes(self) -> int:
        if self.launch.processes is not None:
            return max(1, int(self.launch.processes.value))
        self.assumes.append(f"{USUAL_PROCESSES} processes, as the file does not say")
        return USUAL_PROCESSES

    def prompt(self, key: str) -> int:
        if key not in self.settings:
            self.assumes.append(f"prompts of {_USUAL_PROMPT} tokens, as the file does not bound them")
        return int(self.settings.whole(key, _USUAL_PROMPT, maximum=10**9))

    def sharding(self, processes: int, *, quantized: bool) -> Sharding:
        if self.launch.sharding is not None:
            return self.launch.sharding
        if quantized and processes > 1:
            self.assumes.append("the whole quantized model in every process, as the file does not say otherwise")
            return Sharding(0, "ddp")
        if processes > 1:
            self.assumes.append("ZeRO-3, as the file does not say how processes share weights and optimizer state")
        return Sharding(3, "deepspeed") if processes > 1 else Sharding(0, "ddp")

    def told(self, run: RunMemory) -> tuple[str, ...]:
        """All assumptions, the most important first."""
        of_state = []
        if run.has_master_weights and not run.sharding.offloads_optimizer:
            each = 12 if run.moment_bytes is None else 4 + run.moment_bytes
            of_state = [
                f"float32 master weights and moments, {each} bytes a weight, as DeepSpeed and FSDP keep for bf16"
            ]
        return (*of_state, *self.assumes, "prompts and completions of full length")


def trl_estimate(launch: Launch, version: Version) -> Estimate:
    """Of TRL or Open-R1.

    Raises:
        NotJudgedError: the model is not known.
    """
    settings = Settings(launch)
    facts = _Facts(launch, settings)
    bits = trl_bits(settings)
    shape = facts.shape(settings.text("model_name_or_path", settings.said("trainer.model")), quantized=bits is not None)
    processes = facts.processes()
    sharding = facts.sharding(processes, quantized=bits is not None)
    extra = settings.said("model_init_kwargs")
    extra = extra if isinstance(extra, dict) else {}
    said = settings.text("dtype", settings.text("torch_dtype", extra.get("dtype", extra.get("torch_dtype"))))
    half = str(said or settings.said("trainer.dtype")).removeprefix("torch.") in ("bfloat16", "float16", "auto")
    compute = 2 if half or settings.flag("bf16", version >= (0, 22)) or settings.flag("fp16") else 4
    by_kernel = version >= _LIGER_BY_KERNEL  # before, that key is of the model's layers alone
    liger = settings.flag("use_liger_kernel") and by_kernel
    liger = liger or (settings.flag("use_liger_loss") and version < (0, 28))
    read = trl_lora(settings)
    mode = settings.text("vllm_mode", "colocate" if version >= (1, 0) else "server")
    engine = None
    if settings.flag("use_vllm") and mode == "colocate" and version >= (0, 18):
        share = settings.number("vllm_gpu_memory_utilization", 0.3)
        engine = Engine(share=share, sleeps=settings.flag("vllm_enable_sleep_mode"))
    run = RunMemory(
        shape=shape,
        processes=processes,
        shards=processes,
        sharding=sharding,
        weight_bytes=2 if half else 4,
        compute_bytes=compute,
        sequences=settings.whole("per_device_train_batch_size", 8),
        prompt_tokens=facts.prompt("max_prompt_length"),
        completion_tokens=settings.whole("max_completion_length", 512 if version >= (1, 10) else 256, maximum=10**9),
        checkpointing=settings.flag("gradient_checkpointing", version >= (0, 22)),
        logit_copies=0 if liger or version >= (1, 16) else _AUTOGRAD_COPIES,
        logit_bytes=compute if sharding.by == "deepspeed" else 4,  # accelerate's autocast hands out float32
        has_reference=settings.number("beta", 0.0 if version >= (0, 19) else 0.04) != 0 and read is None,
        adapter=_adapter(read),
        quantized_bits=bits,
        moment_bytes=_moments(settings),
        engine=engine,
    )
    words = {
        "sequences": "per_device_train_batch_size={}",
        "checkpointing": "gradient_checkpointing=true",
        "fused": f"use_liger_{'kernel' if by_kernel else 'loss'}=true",
        "sharded": "ZeRO-3 or FSDP",
        "optimizer_on_host": "ZeRO-3 with offload_optimizer_device: cpu",
        "adapter": "peft_config=LoraConfig()" if launch.form == "python" else "use_peft=true",
        **({"quantized": "load_in_4bit=true"} if version >= (0, 26) else {}),
        **({"sleeps": "vllm_enable_sleep_mode=true"} if version >= (0, 24) else {}),
        "share": "vllm_gpu_memory_utilization={}",
    }
    return Estimate(run=run, key="per_device_train_batch_size", assumes=facts.told(run), words=words)


def swift_estimate(launch: Launch) -> Estimate:
    """Of ms-swift on transformers.

    Raises:
        NotJudgedError: on Megatron, or the model or the tuner is not known.
    """
    settings = Settings(launch)
    facts = _Facts(launch, settings)
    tuner = settings.text("tuner_type", settings.text("train_type", "lora"))
    if MEGATRON in settings:
        raise NotJudgedError("Megatron's own ways of sharding are not counted here")
    if tuner not in ("lora", "full"):
        raise NotJudgedError(f"tuner {tuner} is not counted here")
    bits = swift_bits(settings)
    if bits is None and settings.text("quant_method") is not None:
        raise NotJudgedError(f"quant_method {settings.text('quant_method')} is not counted here")
    shape = facts.shape(settings.said("model"), quantized=bits is not None)
    processes = facts.processes()
    if processes == 1 and len(launch.training_gpus or ()) > 1:
        raise NotJudgedError("one process with several GPUs spreads the model over them by device_map")
    # without deepspeed or fsdp there is no sharing at all
    sharding = launch.sharding or Sharding(0, "ddp")
    dtype = settings.text("torch_dtype")
    if dtype is None:
        facts.assumes.append("bfloat16 weights, as most models are saved (torch_dtype is not said)")
    if tuner == "lora" and "tuner_type" not in settings and "train_type" not in settings:
        facts.assumes.append("LoRA, ms-swift's default")
    engine = None
    if settings.flag("use_vllm") and settings.text("vllm_mode") == "colocate":
        engine = Engine(
            share=settings.number("vllm_gpu_memory_utilization", 0.9),
            sleeps=settings.whole("sleep_level", 0, minimum=0) > 0,
            weights_leave=settings.flag("offload_model"),
            optimizer_leaves=settings.flag("offload_optimizer"),
        )
    adapter = _adapter(read_lora(settings, SWIFT)) if tuner == "lora" else None
    run = RunMemory(
        shape=shape,
        processes=processes,
        shards=processes,
        sharding=sharding,
        weight_bytes=4 if dtype == "float32" else 2,
        compute_bytes=2,  # float32 weights compute in float16 there
        sequences=settings.whole("per_device_train_batch_size", 1),
        prompt_tokens=facts.prompt("max_length"),
        completion_tokens=settings.whole("max_completion_length", 512, maximum=10**9),
        checkpointing=settings.flag("gradient_checkpointing", True) or sharding.by == "fsdp",
        logit_copies=0 if settings.flag("use_liger_kernel") else _AUTOGRAD_COPIES,
        logit_bytes=2 if sharding.by == "deepspeed" else 4,
        sequence_parallel=settings.whole("sequence_parallel_size", 1),
        has_reference=settings.number("beta", 0.04) != 0 and adapter is None,
        adapter=adapter,
        quantized_bits=bits,
        moment_bytes=_moments(settings),
        engine=engine,
    )
    return Estimate(run=run, key="per_device_train_batch_size", assumes=facts.told(run), words=_SWIFT_WORDS)


def verl_estimate(launch: Launch) -> Estimate:
    """Of verl with FSDP, whose reference is always in the host's memory.

    Raises:
        NotJudgedError: another strategy, or the model is not known.
    """
    settings = Settings(launch)
    facts = _Facts(launch, settings)
    actor, rollout, model = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
    strategy = settings.text(f"{actor}.strategy", "fsdp")
    if strategy not in ("fsdp", "fsdp2") or any(".megatron." in key for key in launch.settings):
        strategy = "megatron" if strategy in ("fsdp", "fsdp2") else strategy  # chosen by --config-name
        raise NotJudgedError(f"strategy {strategy} is not counted here")
    shape = facts.shape(settings.said(f"{model}.path"))
    processes = facts.processes()
    on_host = strategy == "fsdp2" and settings.flag(f"{_VERL_SHARDED}.offload_policy")
    hybrid = settings.whole(f"{_VERL_SHARDED}.fsdp_size", -1, minimum=-1)
    dynamic = settings.flag(f"{actor}.use_dynamic_bsz")
    sequences = settings.whole(f"{actor}.ppo_micro_batch_size_per_gpu", None)
    if sequences is None:
        sequences = max(1, settings.whole(f"{actor}.ppo_micro_batch_size", processes) // processes)
    if settings.text("algorithm.adv_estimator", "gae") == "gae":
        facts.assumes.append("no critic, which GAE has besides")
    rank = settings.whole(VERL.rank, 0, minimum=0)
    entropy = settings.number(f"{actor}.entropy_coeff", 0) != 0
    fused = settings.flag(f"{model}.use_fused_kernels")
    run = RunMemory(
        shape=shape,
        processes=processes,
        shards=hybrid if 0 < hybrid < processes else processes,
        sharding=Sharding(3, "fsdp", offloads_optimizer=on_host, offloads_weights=on_host),
        weight_bytes=4 if settings.text(f"{_VERL_SHARDED}.model_dtype", "fp32") in ("fp32", "float32") else 2,
        compute_bytes=2,
        sequences=sequences,
        prompt_tokens=settings.whole("data.max_prompt_length", 512, maximum=10**9),
        completion_tokens=settings.whole("data.max_response_length", 512, maximum=10**9),
        checkpointing=settings.flag(f"{model}.enable_gradient_checkpointing", True),
        logit_copies=0 if fused else 1 + _ENTROPY_COPIES * entropy,  # flash-attn's gradient takes the logits' place
        logit_bytes=2,
        scores_prompts=True,
        token_budget=settings.whole(f"{actor}.ppo_max_token_len_per_gpu", 16_384, maximum=10**9) if dynamic else None,
        sequence_parallel=settings.whole(f"{actor}.ulysses_sequence_parallel_size", 1),
        adapter=_adapter(read_lora(settings, VERL)) if rank else None,
        masters=False,
        engine=Engine(
            share=settings.number(f"{rollout}.gpu_memory_utilization", 0.5),
            sleeps=settings.flag(f"{rollout}.free_cache_engine", True),
            weights_leave=settings.flag(f"{_VERL_SHARDED}.param_offload"),
            optimizer_leaves=settings.flag(f"{_VERL_SHARDED}.optimizer_offload"),
        ),
    )
    key = f"{actor}.{'ppo_max_token_len_per_gpu' if dynamic else 'ppo_micro_batch_size_per_gpu'}"
    return Estimate(run=run, key=key, assumes=facts.told(run), words=_verl_words(key, dynamic=dynamic))


def _verl_words(key: str, *, dynamic: bool) -> Mapping[str, str]:
    """Of verl; `key` bounds a micro-batch."""
    actor, rollout, model = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
    return {
        "budget" if dynamic else "sequences": key + "={}",
        "checkpointing": f"{model}.enable_gradient_checkpointing=True",
        "fused": f"{model}.use_fused_kernels=True",
        "all_on_host": f"{actor}.strategy=fsdp2 and {_VERL_SHARDED}.offload_policy=True",
        "adapter": f"{VERL.rank}=16",
        "sleeps": f"{rollout}.free_cache_engine=True",
        "leave": f"{_VERL_SHARDED}.param_offload=True and {_VERL_SHARDED}.optimizer_offload=True",
        "share": f"{rollout}.gpu_memory_utilization=" + "{}",
    }


def _adapter(read: tuple[dict[str, Any], list[str]] | None) -> AdapterConfig | None:
    """LoRA of these trainers. Dropout is left out: rows are padded there in any case."""
    return AdapterConfig(rank=read[0]["rank"], targets=read[0]["targets"]) if read else None


def _moments(settings: Settings) -> int | None:
    """Bytes of the optimizer's moments of one weight, by transformers' name for it; None: AdamW's two."""
    name = str(settings.text("optim", "adamw"))
    if "8bit" in name:
        return 2
    return 0 if name in ("adafactor", "sgd") else None
