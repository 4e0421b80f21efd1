"""How long the phases of a step take on given GPUs, and what they need of their memory, by a simple model.

A step has P prompts of G generations each, and all of them are taken to have the longest length:

- training: 6 operations per weight and token, at 40 % of the GPU's peak; 4 where an adapter is trained in the place of
  the weights, whose own gradients are not computed then. 2 more for each forward pass besides: layers that are computed
  again, a reference, estimates before training, a critic's values. A group's prompt counts once.
- sampling: whole groups go to servers in turn. A server makes one token for each of its completions in flight at a
  time, which takes as long as reading the weights once, at 60 % of the memory's bandwidth, or as computing with them, 2
  operations per weight and completion at 40 % of the peak, whichever is longer. Prompts are computed once per group.

The shares are assumptions, that of computing the same as in docs/scaling.md; peaks and bandwidths are the makers'
(`cohort.plan.flops`). Where they were measured (`cohort.plan.calibration`), 60 % and 80 % of that are taken. A step
takes the sum of the two phases, since they wait for each other; with `rollout.max_staleness` above 0 they overlap, and
it takes the longer one.

Memory: weights, gradients and the optimizer's state, of a critic too, spread over the training GPUs, may take 80 % of
theirs, or what vLLM leaves of shared ones; the servers' weights have to leave 20 % of a GPU for keys and values.
"""

import math
from dataclasses import dataclass

from cohort.config import Config, VllmRolloutConfig
from cohort.plan.adapter import ADAPTER_BYTES
from cohort.plan.calibration import Calibration
from cohort.plan.defaults import compute_dtype, memory_share, serving_dtype
from cohort.plan.flops import memory_bandwidth, peak_flops
from cohort.plan.optimizer import state_bytes

_SHARE_OF_PEAK = 0.4
_SHARE_OF_BANDWIDTH = 0.6
_SHARE_OF_MEASURED = 0.6  # of what a product alone has reached
_SHARE_OF_MEASURED_BANDWIDTH = 0.8
_TRAINING_STATE_SHARE = 0.8  # the rest: activations, a gathered layer, CUDA itself
_KV_SHARE = 0.2
_USUAL_WEIGHT = (4096, 4096)
_DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
USUAL_GPU = "NVIDIA H100 80GB HBM3"  # stands in for one that is not known here


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a split has to fit, and how fast it is."""

    gpu_name: str  # of one GPU, as the driver tells it; all of a machine's are taken to be alike
    gpu_memory_bytes: int
    num_parameters: int
    active_parameters: int  # that one token is multiplied with: fewer with experts
    adapter_parameters: int = 0  # of `model.adapter`, where that is counted already
    critic: tuple[int, int] | None = (
        None  # its parameters, and those that a token is multiplied with; None: the policy's
    )
    on_gpu: bool = True
    measured: Calibration | None = None  # of one GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """How long the phases of a step are predicted to take, in seconds."""

    training_s: float
    sampling_s: float
    overlap: bool

    @property
    def step_s(self) -> float:
        """Of both together."""
        return max(self.training_s, self.sampling_s) if self.overlap else self.training_s + self.sampling_s

    def told(self) -> str:
        """The phases in words."""
        how = "at the same time" if self.overlap else "in turn"
        return (
            f"{self.training_s:.3g} s of training and {self.sampling_s:.3g} s of sampling a step, {how}: "
            f"{self.step_s:.3g} s"
        )


def predict(config: Config, sizes: Sizes, *, num_training: int, num_sampling: int) -> StepTimes:
    """The times of a step by the model at the top of this file.

    Args:
        config: gives the step's shape and the dtypes.
        sizes: of GPUs and model.
        num_training: GPUs that train.
        num_sampling: GPUs that sample, in servers of `rollout.tensor_parallel`.
    """
    rollout, train = config.rollout, config.train
    assert isinstance(rollout, VllmRolloutConfig)
    group_tokens = rollout.max_prompt_tokens + rollout.num_generations * rollout.max_completion_tokens
    training_flops = sum(training_operations(config, sizes).values()) * train.prompts_per_step * group_tokens
    speed = computing_rate(sizes, compute_dtype(config.model, on_gpu=sizes.on_gpu)).used
    training_s = training_flops / (num_training * speed)

    dtype, per_server = serving_dtype(config, on_gpu=sizes.on_gpu), rollout.tensor_parallel
    speed = per_server * computing_rate(sizes, dtype).used
    prompts = math.ceil(train.prompts_per_step / (num_sampling // per_server))  # of the server with the most
    completions = prompts * rollout.num_generations
    in_flight = min(rollout.max_num_seqs, completions)
    reading_s = _DTYPE_BYTES[dtype] * sizes.num_parameters / (per_server * reading_rate(sizes).used)
    token_s = max(reading_s, 2.0 * sizes.active_parameters * in_flight / speed)
    decoding_s = completions / in_flight * rollout.max_completion_tokens * token_s
    prefill_s = 2.0 * sizes.active_parameters * prompts * rollout.max_prompt_tokens / speed
    return StepTimes(training_s=training_s, sampling_s=prefill_s + decoding_s, overlap=rollout.max_staleness > 0)


def training_operations(config: Config, sizes: Sizes) -> dict[str, float]:
    """Per token of a step, by what they are for."""
    algorithm, policy, updates = config.algorithm, sizes.active_parameters, config.train.updates_per_rollout
    adapter = config.model.adapter is not None
    again = bool(config.model.gradient_checkpointing)
    parts = {
        f"{4 if adapter else 6} operations per weight and token": updates
        * (4.0 * policy + 6.0 * sizes.adapter_parameters if adapter else 6.0 * policy)
    }
    if again:
        parts["layers computed twice"] = 2.0 * policy * updates
    if algorithm.beta > 0:
        parts["the reference"] = 2.0 * policy
    if algorithm.kl_in == "reward" or algorithm.top_entropy_quantile < 1:
        parts["the policy before training"] = 2.0 * policy
    if config.train.router_aux_loss_coef > 0:
        parts["what routers choose"] = 2.0 * policy * updates
    if algorithm.needs_critic:
        _, active = sizes.critic or (sizes.num_parameters, policy)
        per_update = config.critic.updates if config.critic else 1
        parts["the critic"] = active * (2.0 + updates * per_update * (6.0 + 2.0 * again))
    return parts


def why_it_does_not_fit(
    config: Config, rollout: VllmRolloutConfig, sizes: Sizes, num_training: int, *, shared: bool = False
) -> str | None:
    """What a GPU has too little memory for; None where all of it fits.

    Args:
        config: gives the dtypes.
        rollout: its `rollout` section.
        sizes: of GPUs and model.
        num_training: GPUs that train.
        shared: whether servers sleep on the same GPUs meanwhile.
    """
    memory, utilization = sizes.gpu_memory_bytes, memory_share(rollout, shared=shared)
    room = 1 - utilization if shared else _TRAINING_STATE_SHARE
    state, weights = _state_bytes(config, sizes, num_training), server_bytes(config, rollout, sizes)
    if state > room * memory:
        return (
            f"training on {num_training} GPU{'s' * (num_training > 1)} takes {state / 1e9:.3g} GB of each for weights, "
            f"gradients and optimizer, and {room * memory / 1e9:.3g} GB are there for them"
        )
    if weights > (utilization - _KV_SHARE) * memory:
        return (
            f"the weights take {weights / 1e9:.3g} GB of each GPU of a server of rollout.tensor_parallel: "
            f"{rollout.tensor_parallel}, and {max(0.0, utilization - _KV_SHARE) * memory / 1e9:.3g} GB are there for "
            f"them"
        )
    return None


def _state_bytes(config: Config, sizes: Sizes, num_training: int) -> float:
    """Of one GPU of `num_training`: weights, gradients, optimizer, and a reference's weights; a critic's too."""
    size = _DTYPE_BYTES[config.model.dtype]
    # what the state of one number takes: of a weight like those of which models are almost entirely made
    kept = size + state_bytes(config.optim, _USUAL_WEIGHT, size, by_muon=True) / math.prod(_USUAL_WEIGHT)
    state = (size + size * config.keeps_reference + kept) * sizes.num_parameters / num_training
    if config.model.adapter is not None:  # the reference is the model without it
        state = (size * sizes.num_parameters + 4 * ADAPTER_BYTES * sizes.adapter_parameters) / num_training
    if config.algorithm.needs_critic:  # of gradients, the larger ones
        number, _ = sizes.critic or (sizes.num_parameters, 0)
        state += (size * (1 + (config.model.adapter is not None)) + kept - size) * number / num_training
    dtype = compute_dtype(config.model, on_gpu=True)
    has_casts = num_training == 1 and dtype != config.model.dtype  # autocast keeps them for backward
    return state + has_casts * _DTYPE_BYTES[dtype] * sizes.num_parameters


def server_bytes(config: Config, rollout: VllmRolloutConfig, sizes: Sizes) -> float:
    """The weights on one GPU of a server."""
    return _DTYPE_BYTES[serving_dtype(config, on_gpu=True)] * sizes.num_parameters / rollout.tensor_parallel


@dataclass(frozen=True, slots=True)
class Rate:
    """A speed of one GPU, and the share of it that is taken to be reached."""

    best: float  # per second
    share: float
    is_measured: bool

    @property
    def used(self) -> float:
        """What is reckoned with."""
        return self.best * self.share


def computing_rate(sizes: Sizes, dtype: str) -> Rate:
    """Operations of matrix products in `dtype`; of a GPU that is not known, those of the usual one."""
    if sizes.measured is not None:
        flops = sizes.measured.flops
        return Rate(flops.get(dtype, flops["float32"] / 2), _SHARE_OF_MEASURED, True)  # float64 is not measured
    peak = peak_flops(sizes.gpu_name, dtype) or peak_flops(USUAL_GPU, dtype) or peak_flops(USUAL_GPU, "float32")
    assert peak is not None
    return Rate(peak, _SHARE_OF_PEAK, False)


def reading_rate(sizes: Sizes) -> Rate:
    """Bytes from memory; of a GPU that is not known, those of the usual one."""
    if sizes.measured is not None:
        return Rate(sizes.measured.memory_bandwidth, _SHARE_OF_MEASURED_BANDWIDTH, True)
    bandwidth = memory_bandwidth(sizes.gpu_name) or memory_bandwidth(USUAL_GPU)
    assert bandwidth is not None
    return Rate(bandwidth, _SHARE_OF_BANDWIDTH, False)
