"""What one training process of another trainer needs of its GPU's memory, by part and by phase, added up.

State: weights, gradients, AdamW's moments and master weights in their sharding. Activations are `cohort plan`'s, of
rows of full length. Logits [T, V] are whole, in so many copies, or made tile by tile. Where the sampling engine shares
the GPU, it holds its share while training, or sleeps and has it while sampling, beside what of the state stays there.

B sequences of a micro-batch, T tokens of it that have logits, V vocabulary, W processes.
"""

import math
from dataclasses import dataclass
from typing import Literal

from cohort.check.launch import Sharding
from cohort.config.adapter import AdapterConfig
from cohort.plan.activation_memory import activation_bytes
from cohort.plan.adapter_shape import adapter_shape
from cohort.plan.backward import head_bytes
from cohort.plan.memory import CUDA_BYTES, NCCL_BYTES, SLEEPING_VLLM_BYTES
from cohort.plan.shape import ModelShape
from cohort.plan.workload import Workload

Phase = Literal["training", "sampling"]
_BITS_OF_SCALES = {4: 0.127, 8: 0.0}  # of one weight: bitsandbytes' nf4 with its scales quantized too; rows' scales
_GATHERED_LAYERS = 2  # at a time: the one that is computed, and the next


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A sampling engine on the GPUs that train."""

    share: float  # of the GPU's memory
    sleeps: bool  # while training
    weights_leave: bool = False  # to the host while it samples
    optimizer_leaves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMemory:
    """What of a run decides its memory."""

    shape: ModelShape
    processes: int  # W
    shards: int  # processes that share what is sharded; W but for hybrid sharding
    sharding: Sharding
    weight_bytes: int
    compute_bytes: int
    sequences: int  # B
    prompt_tokens: int
    completion_tokens: int
    checkpointing: bool
    logit_copies: int  # 0: tile by tile
    logit_bytes: int  # of one
    scores_prompts: bool = False  # logits of prompts too
    token_budget: int | None = None  # of a micro-batch, where that and not a number of sequences bounds it
    sequence_parallel: int = 1
    has_reference: bool = False  # on the GPU
    adapter: AdapterConfig | None = None
    quantized_bits: int | None = None  # of linear layers, by bitsandbytes
    moment_bytes: int | None = None  # of one weight; None: AdamW's, in the dtype of what is trained
    masters: bool = True  # whether half-precision weights in shards have float32 masters
    engine: Engine | None = None

    def phases(self, gpu_bytes: int) -> dict[Phase, dict[str, int]]:
        """Bytes of one GPU by phase and part."""
        workload, shape, on = self._workload(), self.shape, self.sharding
        trained, each = workload.trained_parameters, workload.trained_bytes
        stored = self._stored_bytes()
        framework = CUDA_BYTES + NCCL_BYTES * (self.processes > 1)
        state = {
            "weights": 0 if on.offloads_weights else stored // self._shards(3),
            "gradients": 0 if on.offloads_optimizer and on.stage >= 2 else each * trained // self._shards(2),
            "optimizer state": 0 if on.offloads_optimizer else self._state_bytes(each) * trained // self._shards(1),
            "reference": 0 if on.offloads_weights else stored // self._shards(3) * self.has_reference,
        }
        engine = self.engine
        held = 0 if engine is None else SLEEPING_VLLM_BYTES if engine.sleeps else int(engine.share * gpu_bytes)
        gathers = on.stage == 3 and self.shards > 1
        layers = min(_GATHERED_LAYERS, shape.layers) * shape.layer_parameters
        phases: dict[Phase, dict[str, int]] = {
            "training": {
                **state,
                "activations": activation_bytes(workload),
                "logits": self._logits(workload),
                "gathered weights": self.compute_bytes * (shape.non_layer_parameters + layers) * gathers,
                "a layer's weights": self._dequantized_bytes(),
                "vLLM": held,
                "framework": framework,
            }
        }
        if engine is not None and engine.sleeps:
            leave = {"weights": engine.weights_leave, "optimizer state": engine.optimizer_leaves, "gradients": True}
            stays = {part: size * (not leave.get(part, False)) for part, size in state.items()}
            phases["sampling"] = {**stays, "vLLM": int(engine.share * gpu_bytes), "framework": framework}
        return {phase: {part: size for part, size in parts.items() if size} for phase, parts in phases.items()}

    def peak(self, gpu_bytes: int) -> tuple[Phase, int]:
        """The phase that needs the most, and how much."""
        totals = {phase: sum(parts.values()) for phase, parts in self.phases(gpu_bytes).items()}
        phase = max(totals, key=lambda name: totals[name])
        return phase, totals[phase]

    @property
    def has_master_weights(self) -> bool:
        """DeepSpeed keeps them beside bfloat16 weights, and accelerate's FSDP makes the weights themselves float32."""
        shared = self.sharding.stage >= 1 and self.shards > 1
        return self.masters and shared and self.weight_bytes == 2 and self.adapter is None

    def _shards(self, stage: int) -> int:
        return self.shards if self.sharding.stage >= stage else 1

    def _state_bytes(self, trained_bytes: int) -> int:
        """Of one trained weight: moments, of half-precision weights in shards float32 ones and a float32 copy."""
        masters = 4 * self.has_master_weights
        moments = 2 * (masters or trained_bytes) if self.moment_bytes is None else self.moment_bytes
        return masters + moments

    def _stored_bytes(self) -> int:
        """Of all weights; linear layers but the head are what bitsandbytes quantizes."""
        bits = self.quantized_bits
        if bits is None:
            return self.weight_bytes * self.shape.num_parameters
        linear = self.shape.layers * sum(map(math.prod, self.shape.linear_layers.values()))
        rest = self.weight_bytes * (self.shape.num_parameters - linear)
        return int(linear * (bits + _BITS_OF_SCALES.get(bits, 0.0)) / 8) + rest

    def _dequantized_bytes(self) -> int:
        """Of the largest linear layer, for its product."""
        if self.quantized_bits is None:
            return 0
        return self.compute_bytes * max(map(math.prod, self.shape.linear_layers.values()))

    @property
    def packed_tokens(self) -> int:
        """Of a micro-batch on one GPU."""
        sequence = self.prompt_tokens + self.completion_tokens
        if self.token_budget is not None:
            return max(self.token_budget, -(-sequence // self.sequence_parallel))
        return self.sequences * sequence // self.sequence_parallel

    @property
    def _loss_tokens(self) -> int:
        if self.scores_prompts or self.token_budget is not None:
            return self.packed_tokens
        return self.sequences * self.completion_tokens

    def _logits(self, workload: Workload) -> int:
        if not self.logit_copies:
            return head_bytes(workload, backward=True)
        first = 0 if self.scores_prompts else self.sequences  # the prompt's last token
        return self.logit_copies * self.logit_bytes * (self._loss_tokens + first) * self.shape.vocabulary

    def _workload(self) -> Workload:
        return Workload(
            shape=self.shape,
            processes=1 if self.sharding.stage < 3 else max(2, self.processes),  # autocast or not
            weight_bytes=self.weight_bytes,
            compute_bytes=self.compute_bytes,
            checkpointing=self.checkpointing,
            offload=False,
            gradients_in_forward=False,
            has_reference=self.has_reference,
            packed_tokens=self.packed_tokens,
            loss_tokens=self._loss_tokens,
            shared_prefix_tokens=0,
            sampled_sequences=0,
            sampled_tokens=0,
            awake_vllm_bytes=0,
            adapter=adapter_shape(self.adapter, self.shape) if self.adapter else None,
        )
