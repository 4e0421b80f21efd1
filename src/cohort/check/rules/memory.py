"""Whether the memory of the GPUs suffices, where the GPU and the model's shape are known.

Cohort's files are planned as `cohort plan` does. For TRL and Open-R1 what must be there is added up: weights,
gradients, AdamW's moments and float32 master weights in their sharding, what layers keep for padded rows, and logits
[B, C, V] in float32: three copies of them up to TRL 1.10; 1.16 makes them tile by tile. Where the file does not say how
the state is sharded, it is taken to be so completely. The numbers are estimates, so what needs up to a tenth too much
is not told.

B completions of a micro-batch, C completion tokens, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cohort.check.findings import Finding
from cohort.check.launch import Launch, Settings
from cohort.check.lora import trl_lora
from cohort.check.rules.cohort import nested
from cohort.check.rules.trl import Version
from cohort.config import config_from_dict
from cohort.config.adapter import AdapterConfig
from cohort.errors import UserError
from cohort.plan.activations import activation_bytes
from cohort.plan.adapter import adapter_shape
from cohort.plan.advice import advise
from cohort.plan.backward import head_bytes
from cohort.plan.hardware import Hardware
from cohort.plan.memory import CUDA_BYTES, NCCL_BYTES
from cohort.plan.predict import predict_run
from cohort.plan.shape import ModelShape, known_shape
from cohort.plan.work import Work

_MARGIN = 1.1  # estimates are good to a tenth
_LOGITS = 3  # copies: logits, their gradient, a temporary
_WIDEST_TRIED = 64  # processes
USUAL_PROCESSES = 8  # where the file does not say


def cohort_memory(launch: Launch, machines: Hardware) -> list[Finding]:
    """Of a configuration of Cohort, by its plan."""
    try:
        config = config_from_dict(nested(launch))
        shape = known_shape(config.model.path)
        plan = predict_run(config, shape, machines) if shape else None
    except UserError:
        return []  # told by other rules, or not known
    if plan is None or (plan.layout.problem is None and plan.memory.peak_bytes <= _MARGIN * machines.gpu_memory_bytes):
        return []
    text = plan.layout.problem or (
        f"{plan.memory.peak_bytes / 1e9:.1f} GB of each GPU in {plan.memory.peak_phase} by `cohort plan`, and they "
        f"have {machines.gpu_memory_bytes / 1e9:.1f} GB"
    )
    return [Finding("CHK019", "model.path", text, tuple(advice.told() for advice in advise(config, plan)[:4]))]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlMemory:
    """What of a TRL run decides its memory."""

    shape: ModelShape
    processes: int
    stage: int  # 0: nothing is sharded, 1: the optimizer, 2: gradients too, 3: weights too
    weight_bytes: int
    compute_bytes: int
    per_device: int  # B
    prompt_tokens: int
    completion_tokens: int  # C
    checkpointing: bool
    whole_logits: bool
    has_reference: bool
    adapter: AdapterConfig | None
    offloads_optimizer: bool
    vllm_share: float  # of the GPU, that is not given back while training

    def parts(self, gpu_bytes: int) -> dict[str, int]:
        """Bytes of one GPU at the peak of training, by part."""
        work, shape = self._work(), self.shape
        shards = [self.processes if self.stage >= stage else 1 for stage in (3, 2, 1)]
        trained, each = work.trained_parameters, work.trained_bytes
        parts = {
            "weights": self.weight_bytes * shape.num_parameters // shards[0],
            "gradients": each * trained // shards[1],
            "optimizer state": self.state_bytes(each) * trained // shards[2],
            "reference": self.weight_bytes * shape.num_parameters // shards[0] * self.has_reference,
            "activations": activation_bytes(work),
            "logits": self._logits(work),
            "vLLM": int(self.vllm_share * gpu_bytes),
            "framework": CUDA_BYTES + NCCL_BYTES * (self.processes > 1),
        }
        return {part: size for part, size in parts.items() if size}

    def state_bytes(self, trained_bytes: int) -> int:
        """Of one trained weight: two moments, of half-precision weights in shards also a float32 copy."""
        if self.offloads_optimizer:
            return 0
        return 12 if self.has_master_weights else 2 * trained_bytes

    @property
    def has_master_weights(self) -> bool:
        """DeepSpeed keeps them beside bfloat16 weights, and accelerate's FSDP makes the weights themselves float32."""
        return self.stage >= 1 and self.processes > 1 and self.weight_bytes == 2 and self.adapter is None

    def needs(self, gpu_bytes: int) -> int:
        """All parts."""
        return sum(self.parts(gpu_bytes).values())

    def _logits(self, work: Work) -> int:
        tokens = self.per_device * (self.completion_tokens + 1)
        if self.whole_logits:
            return _LOGITS * 4 * tokens * self.shape.vocabulary
        return head_bytes(work, backward=True)

    def _work(self) -> Work:
        return Work(
            shape=self.shape,
            processes=1 if self.stage < 3 else max(2, self.processes),  # autocast or not
            weight_bytes=self.weight_bytes,
            compute_bytes=self.compute_bytes,
            checkpointing=self.checkpointing,
            offload=False,
            gradients_in_forward=False,
            has_reference=self.has_reference,
            row_tokens=self.per_device * (self.prompt_tokens + self.completion_tokens),
            scored_tokens=self.per_device * self.completion_tokens,
            kept_prompt_tokens=0,
            sampled_sequences=0,
            sampled_tokens=0,
            vllm_bytes=0,
            adapter=adapter_shape(self.adapter, self.shape) if self.adapter else None,
        )


def trl_memory(launch: Launch, version: Version, processes: int, machines: Hardware) -> list[Finding]:
    """Of a TRL or Open-R1 run with so many processes."""
    try:
        needed = _trl(Settings(launch), launch, version, processes)
        if needed is None or needed.needs(machines.gpu_memory_bytes) <= _MARGIN * machines.gpu_memory_bytes:
            return []
    except UserError:
        return []  # targets of an adapter that this model does not have
    parts = needed.parts(machines.gpu_memory_bytes)
    listed = ", ".join(f"{size / 1e9:.1f} {part}" for part, size in parts.items())
    text = (
        f"about {sum(parts.values()) / 1e9:.1f} GB of each GPU in training with {processes} processes ({listed}), and "
        f"they have {machines.gpu_memory_bytes / 1e9:.1f} GB"
    )
    if needed.has_master_weights and not needed.offloads_optimizer:
        text += "; assumed: float32 master weights and moments, 12 bytes a weight, as DeepSpeed and FSDP keep for bf16"
    return [Finding("CHK019", "per_device_train_batch_size", text, tuple(_nearest(needed, machines)))]


def _nearest(needed: TrlMemory, machines: Hardware) -> Iterator[str]:
    """Single changes that make it fit by the same sum; the smallest of each kind."""
    sizes = [n for n in (1, 2, 4, 8, 16, 32) if n < needed.per_device]
    tried: list[tuple[str, list[TrlMemory]]] = [
        ("per_device_train_batch_size={0.per_device}", [replace(needed, per_device=n) for n in reversed(sizes)]),
        ("gradient_checkpointing=true", [replace(needed, checkpointing=True)] * (not needed.checkpointing)),
        ("use_liger_kernel=true", [replace(needed, whole_logits=False)] * needed.whole_logits),
        ("ZeRO-3 or FSDP", [replace(needed, stage=3)] * (needed.stage < 3)),
        (
            "GPUs={0.processes}",
            [replace(needed, processes=n) for n in range(needed.processes + 1, _WIDEST_TRIED + 1)] * (needed.stage > 0),
        ),
        ("use_peft=true", [replace(needed, adapter=AdapterConfig())] * (needed.adapter is None)),
    ]
    for words, ways in tried:
        way = next((w for w in ways if w.needs(machines.gpu_memory_bytes) <= machines.gpu_memory_bytes), None)
        if way is not None:
            yield words.format(way)


def _trl(settings: Settings, launch: Launch, version: Version, processes: int) -> TrlMemory | None:
    """None where the model is not known, or it is quantized."""
    named = settings.text("model_name_or_path", settings.said("trainer.model"))
    shape = known_shape(named) if isinstance(named, str) else None
    if shape is None or settings.flag("load_in_4bit") or settings.flag("load_in_8bit"):
        return None
    extra = settings.said("model_init_kwargs")
    extra = extra if isinstance(extra, dict) else {}
    said = settings.text("dtype", settings.text("torch_dtype", extra.get("dtype", extra.get("torch_dtype"))))
    half = str(said).removeprefix("torch.") in ("bfloat16", "float16", "auto")
    liger = settings.flag("use_liger_loss") or settings.flag("use_liger_kernel")
    colocated = settings.flag("use_vllm") and settings.text("vllm_mode", "colocate" if version >= (1, 0) else "server")
    keeps_vllm = colocated == "colocate" and not settings.flag("vllm_enable_sleep_mode")
    return TrlMemory(
        shape=shape,
        processes=processes,
        stage=3 if launch.sharded_stage is None or settings.text("fsdp") else launch.sharded_stage,
        weight_bytes=2 if half else 4,
        compute_bytes=2 if half or settings.flag("bf16", version >= (0, 22)) or settings.flag("fp16") else 4,
        per_device=settings.whole("per_device_train_batch_size", 8),
        prompt_tokens=settings.whole("max_prompt_length", 512 if version < (0, 28) else 1, maximum=10**9),
        completion_tokens=settings.whole("max_completion_length", 512 if version >= (1, 10) else 256, maximum=10**9),
        checkpointing=settings.flag("gradient_checkpointing", version >= (0, 22)),
        whole_logits=not liger and version < (1, 16),
        has_reference=settings.number("beta", 0.0 if version >= (0, 19) else 0.04) != 0 and not _adapter(settings),
        adapter=_adapter(settings),
        offloads_optimizer=launch.offloads_optimizer,
        vllm_share=settings.number("vllm_gpu_memory_utilization", 0.3) if keeps_vllm else 0.0,
    )


def _adapter(settings: Settings) -> AdapterConfig | None:
    """LoRA of TRL's scripts. Its dropout is left out: rows are padded there in any case."""
    read = trl_lora(settings)
    return AdapterConfig(rank=read[0]["rank"], targets=read[0]["targets"]) if read else None
