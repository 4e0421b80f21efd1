"""What one training process of another trainer needs of its GPU's memory, by part and by phase, added up.

State: weights, gradients, AdamW's moments and master weights in their sharding. Activations are `cohort plan`'s, of
rows of full length. Logits [T, V] are whole, in so many copies, or made tile by tile. Where the sampling engine shares
the GPU, it holds its share while training, or sleeps and has it while sampling, beside what of the state stays there.

B sequences of a micro-batch, T tokens of it that have logits, V vocabulary, W processes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cohort.check.launch import Sharding
from cohort.config.adapter import AdapterConfig
from cohort.plan.activation_memory import activation_bytes
from cohort.plan.adapter_shape import adapter_shape
from cohort.plan.backward import head_bytes
from cohort.plan.memory import CUDA_BYTES, NCCL_BYTES, SLEEPING_VLLM_BYTES
from cohort.plan.shape import ModelShape
from cohort.plan.workload import Workload

_BITS_OF_SCALES = {4: 0.127, 8: 0.0}  # of one weight: bitsandbytes' nf4 with its scales quantized too; rows' scales
_NOT_THERE: Mapping[str, Any] = {  # what only Cohort has
    **dict.fromkeys(("offload", "gradients_in_forward"), False),
    **dict.fromkeys(("shared_prefix_tokens", "sampled_sequences", "sampled_tokens", "awake_vllm_bytes"), 0),
}
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

    def phases(self, gpu_bytes: int) -> dict[str, dict[str, int]]:
        """Bytes of one GPU by phase (training, sampling) and part."""
        workload, shape, on, engine = self._workload(), self.shape, self.sharding, self.engine
        trained, each = workload.trained_parameters, workload.trained_bytes
        shards = {stage: self.shards if on.stage >= stage else 1 for stage in (1, 2, 3)}
        stored = self._stored_bytes() // shards[3] * (not on.offloads_weights)
        state = {
            "weights": stored,
            "gradients": each * trained // shards[2] * (not on.offloads_optimizer or on.stage < 2),
            "optimizer state": self._state_bytes(each) * trained // shards[1] * (not on.offloads_optimizer),
            "reference": stored * self.has_reference,
        }
        sampling = int(engine.share * gpu_bytes) if engine else 0
        sleeps = engine is not None and engine.sleeps
        framework = CUDA_BYTES + NCCL_BYTES * (self.processes > 1)
        gathered = shape.non_layer_parameters + min(_GATHERED_LAYERS, shape.layers) * shape.layer_parameters
        largest = max(map(math.prod, shape.linear_layers.values()))
        training = {
            **state,
            "activations": activation_bytes(workload),
            "logits": self._logits(workload),
            "gathered weights": self.compute_bytes * gathered * (on.stage == 3 and self.shards > 1),
            "a layer's weights": self.compute_bytes * largest * (self.quantized_bits is not None),  # for its product
            "vLLM": SLEEPING_VLLM_BYTES if sleeps else sampling,
            "framework": framework,
        }
        phases = {"training": training}
        if engine is not None and sleeps:
            leave = {"weights": engine.weights_leave, "optimizer state": engine.optimizer_leaves, "gradients": True}
            stays = {part: size * (not leave.get(part, False)) for part, size in state.items()}
            phases["sampling"] = {**stays, "vLLM": sampling, "framework": framework}
        return {phase: {part: size for part, size in parts.items() if size} for phase, parts in phases.items()}

    def peak(self, gpu_bytes: int) -> tuple[str, int]:
        """The phase that needs the most, and how much."""
        totals = {phase: sum(parts.values()) for phase, parts in self.phases(gpu_bytes).items()}
        phase = max(totals, key=lambda name: totals[name])
        return phase, totals[phase]

    @property
    def has_master_weights(self) -> bool:
        """DeepSpeed keeps them beside bfloat16 weights, and accelerate's FSDP makes the weights themselves float32."""
        shared = self.sharding.stage >= 1 and self.shards > 1
        return self.masters and shared and self.weight_bytes == 2 and self.adapter is None

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

    @property
    def _tokens(self) -> tuple[int, int]:
        """Of a micro-batch on one GPU: all, and those that the loss is of."""
        sequence = self.prompt_tokens + self.completion_tokens
        if self.token_budget is not None:
            return (max(self.token_budget, -(-sequence // self.sequence_parallel)),) * 2
        packed = self.sequences * sequence // self.sequence_parallel
        return packed, packed if self.scores_prompts else self.sequences * self.completion_tokens

    def _logits(self, workload: Workload) -> int:
        if not self.logit_copies:
            return head_bytes(workload, backward=True)
        first = 0 if self.scores_prompts else self.sequences  # the prompt's last token
        return self.logit_copies * self.logit_bytes * (self._tokens[1] + first) * self.shape.vocabulary

    def _workload(self) -> Workload:
        return Workload(
            shape=self.shape,
            processes=1 if self.sharding.stage < 3 else max(2, self.processes),  # autocast or not
            weight_bytes=self.weight_bytes,
            compute_bytes=self.compute_bytes,
            checkpointing=self.checkpointing,
            has_reference=self.has_reference,
            packed_tokens=self._tokens[0],
            loss_tokens=self._tokens[1],
            adapter=adapter_shape(self.adapter, self.shape) if self.adapter else None,
            **_NOT_THERE,
        )
