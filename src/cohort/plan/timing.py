"""How long the phases of a step take on given GPUs, by a simple model of operations and bytes.

A step has groups of G completions, and all of them are taken to have the longest length: P prompt tokens, C completion
tokens. N weights, n that one token is multiplied with, L layers, Q features of queries. A token sees x tokens, itself
among them: P + C / 2 in the mean of a completion.

- training: 6 operations per weight and token; 4 where an adapter is trained in the place of the weights, whose own
  gradients are not computed then. 2 more for each forward pass besides: layers that are computed again, a reference,
  estimates before training, a critic's values. Attention takes 4 Q L x for each forward pass, and twice that backward.
  A group's prompt counts once.
- sampling: whole groups go to servers in turn. A server makes one token for each of its B completions in flight at a
  time. That reads the weights once, and of every completion the keys and values of what it sees, k bytes each; and it
  computes 2 n B + 4 Q L x B operations. Whichever takes longer is what it takes:

      seconds per token = max((bytes of N + k B x) / bandwidth, (2 n B + 4 Q L x B) / operations per second)

  B is at most `rollout.max_num_seqs`, and what a server of vLLM has memory for keys and values of. Prompts are computed
  once per group.

Operations and bytes per second are those of `cohort.plan.rates`. A step takes the sum of the two phases, since they
wait for each other; with `rollout.max_staleness` above 0 they overlap, and it takes the longer one.
"""

import math
from dataclasses import dataclass

from cohort.config import Config, ServersConfig
from cohort.plan.adapter import adapter_shape
from cohort.plan.critic import critic_shape
from cohort.plan.defaults import BYTES, compute_dtype, memory_share, serving_dtype
from cohort.plan.hardware import Hardware
from cohort.plan.rates import computing_rate, reading_rate
from cohort.plan.shape import ModelShape


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


def step_times(
    config: Config, shape: ModelShape, hardware: Hardware, *, num_training: int, num_sampling: int, shared: bool = False
) -> StepTimes:
    """Both phases of a step, by the model at the top of this file.

    Args:
        config: of the run.
        shape: of its model.
        hardware: the kind of GPU; all are taken to be alike.
        num_training: GPUs that train.
        num_sampling: GPUs that sample, in servers of `rollout.tensor_parallel`.
        shared: whether these are the same ones, with servers that sleep meanwhile.
    """
    rollout = config.rollout
    tokens = rollout.max_prompt_tokens + rollout.num_generations * rollout.max_completion_tokens
    operations = sum(training_operations(config, shape).values()) * config.train.prompts_per_step * tokens
    speed = computing_rate(hardware, compute_dtype(config.model, on_gpu=hardware.on_gpu)).used
    return StepTimes(
        training_s=operations / (num_training * speed),
        sampling_s=_sampling_s(config, shape, hardware, num_sampling, shared=shared),
        overlap=rollout.samples_ahead,
    )


def training_operations(config: Config, shape: ModelShape) -> dict[str, float]:
    """Per token of a step, by what they are for."""
    algorithm, updates = config.algorithm, config.train.updates_per_rollout
    policy, again, adapter = shape.active_parameters, config.model.gradient_checkpointing, config.model.adapter
    if adapter is None:
        parts = {"6 operations per weight and token": 6.0 * policy * updates}
    else:
        own = adapter_shape(adapter, shape).num_parameters(shape.layers)
        parts = {"4 operations per weight and token": updates * (4.0 * policy + 6.0 * own)}
    passes = 3.0 * updates  # of attention, in forward passes
    if again:
        parts["layers computed twice"] = 2.0 * policy * updates
        passes += updates * (again is True)  # selective checkpointing keeps attention's output
    if algorithm.beta > 0:
        parts["the reference"] = 2.0 * policy
        passes += 1
    if algorithm.kl_in == "reward" or algorithm.top_entropy_quantile < 1:
        parts["the policy before training"] = 2.0 * policy
        passes += 1
    if config.train.router_aux_loss_coef > 0:
        parts["what routers choose"] = 2.0 * policy * updates
        passes += updates
    parts["attention"] = passes * _attention(shape, _mean_seen(config))
    critic = critic_shape(config, shape)
    if critic is not None:
        per_update = config.critic.updates if config.critic else 1
        attention = _attention(critic, _mean_seen(config)) * (1 + updates * per_update * (3 + (again is True)))
        weights = critic.active_parameters * (2.0 + updates * per_update * (6.0 + 2.0 * bool(again)))
        parts["the critic"] = weights + attention
    return parts


def _attention(shape: ModelShape, seen: float) -> float:
    """Operations of one token's forward pass: its scores, and the sum of values."""
    return 4.0 * shape.query_width * shape.layers * seen


def _mean_seen(config: Config) -> float:
    """Tokens that one of a group's tokens sees."""
    rollout = config.rollout
    prompt, completions = rollout.max_prompt_tokens, rollout.num_generations * rollout.max_completion_tokens
    seen = prompt * prompt / 2 + completions * (prompt + rollout.max_completion_tokens / 2)
    return seen / (prompt + completions)


def _sampling_s(config: Config, shape: ModelShape, hardware: Hardware, num_sampling: int, *, shared: bool) -> float:
    rollout, on_gpu = config.rollout, hardware.on_gpu
    length = rollout.max_completion_tokens
    dtype: str
    if rollout.uses_servers:
        dtype, per_server = serving_dtype(config, on_gpu=on_gpu), rollout.tensor_parallel
        most = min(rollout.max_num_seqs, _places(rollout, shape, hardware, BYTES[dtype], shared=shared))
    else:
        dtype, per_server, most = compute_dtype(config.model, on_gpu=on_gpu), 1, rollout.max_num_seqs
    computing = per_server * computing_rate(hardware, dtype).used
    reading = per_server * reading_rate(hardware).used
    # of the server with the most
    prompts = math.ceil(config.train.prompts_per_step / max(1, num_sampling // per_server))
    completions = prompts * rollout.num_generations
    in_flight = min(most, completions)
    seen = rollout.max_prompt_tokens + length / 2
    read = BYTES[dtype] * shape.num_parameters + shape.kv_bytes(BYTES[dtype]) * in_flight * seen
    computed = in_flight * (2.0 * shape.active_parameters + _attention(shape, seen))
    decoding_s = completions / in_flight * length * max(read / reading, computed / computing)
    prefill_s = 2.0 * shape.active_parameters * prompts * rollout.max_prompt_tokens / computing
    return prefill_s + decoding_s


def _places(rollout: ServersConfig, shape: ModelShape, hardware: Hardware, bytes_each: int, *, shared: bool) -> int:
    """Completions of the longest length whose keys and values a server has room for, a prompt's once per group."""
    memory = rollout.tensor_parallel * memory_share(rollout, shared=shared) * hardware.gpu_memory_bytes
    room = memory - bytes_each * shape.num_parameters
    tokens = rollout.max_completion_tokens + rollout.max_prompt_tokens / rollout.num_generations
    return max(1, int(room // (tokens * shape.kv_bytes(bytes_each))))
