"""Predict the duration of a step's phases with a roofline model: FLOPs and bytes in closed form.

Model FLOPs: matmuls and attention over attended pairs, forward and backward, each once. Recomputation, padding, norms,
activation functions and token mixing other than full attention (windows, recurrent states) are not counted, so MFU is
never overstated.

Assumed utilization, as in docs/scaling.md: 40 % of peak FLOP/s and 60 % of peak bandwidth by data sheet. The bus
between host and GPU is assumed to be PCIe 4.0 x16. `cohort plan --like` multiplies both phases by what an earlier run
took relative to its plan. A CPU, which has no data sheet, then starts from nominal rates, in both plans.

Every sequence is assumed to have the maximum length: P prompt tokens and C after them, G completions per group. With
`cohort plan --length`, C is the mean, and the longest completion of a server costs a step of reading the weights for
every token beyond it. By default its length is that of the longest of n exponentially distributed ones. Completions of
different lengths attend to more tokens than equal ones with the same mean: the mean of their squares is (1 + v) times
its square, with v = 1 for an exponential distribution, and less in proportion if the longest is closer to the mean.
N parameters, n of them active per token, L layers, Q query width, x attended tokens (P + (1 + v) C / 2 on average).

- Training: 6 FLOPs per active parameter and token, or 4 with an adapter, whose frozen base needs no weight gradients.
  2 more per extra forward pass: recomputation, reference, old logprobs, a critic's values. Attention takes 4 Q L x per
  token and forward pass, twice that in backward. A group's prompt counts once.
- Sampling: servers take whole groups in turn and decode B completions at a time. A decoding step reads the weights and
  each completion's KV cache (k bytes per token), and is bound by bandwidth or compute:

      seconds per token = max((bytes of N + k B x) / bandwidth, (2 n B + 4 Q L x B) / (FLOP/s))

  Tensor parallelism adds two all-reduces per layer and token. B is bounded by `rollout.max_num_seqs` and by a
  server's KV cache. Prompts are prefilled once per group. With `rollout.max_staleness: k` a server has the completions
  of at least k steps to decode at a time.
- Turns: a trajectory has `rollout.max_turns` turns of equal length. Of its C tokens, those beyond
  max_turns x max_completion_tokens come from tools. Servers cache prefixes, so they prefill only these; the local
  engine prefills the whole context of every turn again. Tools and environments take time that is not predicted.

- Publishing: the servers' weights cross the bus once, and servers that share the GPUs fall asleep and wake up.

A step takes the sum of all phases; with `rollout.max_staleness` above 0 training and sampling overlap, and it takes the
longer of the two.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cohort.config import Config, SamplingConfig, ServersConfig
from cohort.plan.adapter import adapter_shape
from cohort.plan.defaults import BYTES, checkpointing, compute_dtype, server_memory_utilization, serving_dtype
from cohort.plan.hardware import Hardware, Pace, memory_bandwidth, peak_flops
from cohort.plan.lengths import Lengths
from cohort.plan.shape import ModelShape, critic_shape

_INITIAL_FACTOR = re.compile(r"\.lora_\w+\.start\b")  # initial adapter weights, kept as the reference
Parameter = tuple[str, tuple[int, ...], bool]  # name, shape, trained


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """FLOPs of one model per token, loss token and attended pair. A multiply-add is two FLOPs.

    A weight takes two FLOPs per token in forward, two for its own gradient if it is trained, and two for the gradient
    of its input if anything before it is trained.
    """

    body_forward: float  # per token: all matrices but the head
    body_backward: float
    head_forward: float  # per loss token
    head_backward: float
    pair_forward: float  # per attended query-key pair, over all layers: scores and weighted values
    pair_backward: float

    def forward(self, *, tokens: int, loss_tokens: int, pairs: int) -> float:
        """FLOPs of a forward pass.

        Args:
            tokens: number of input tokens.
            loss_tokens: number of positions at which the head is applied.
            pairs: number of attended query-key pairs of one layer and head (`attention_pairs`).
        """
        return self.body_forward * tokens + self.head_forward * loss_tokens + self.pair_forward * pairs

    def forward_backward(self, *, tokens: int, loss_tokens: int, pairs: int) -> float:
        """FLOPs of a forward and a backward pass; arguments as `forward`."""
        backward = self.body_backward * tokens + self.head_backward * loss_tokens + self.pair_backward * pairs
        return self.forward(tokens=tokens, loss_tokens=loss_tokens, pairs=pairs) + backward


def model_flops(parameters: Iterable[Parameter], config: Mapping[str, Any]) -> ModelFlops:
    """Compute the per-token FLOPs of a Hugging Face causal language model.

    Args:
        parameters: parameters in model order, tied weights once, adapter weights included.
        config: content of config.json; for multimodal models the text part.
    """
    body_forward = body_backward = head_forward = head_backward = 0.0
    trained_before = False
    matrices = [
        (name.replace(".base_layer.", "."), shape, trained)  # without peft's wrapper
        for name, shape, trained in parameters
        if len(shape) >= 2 and not _INITIAL_FACTOR.search(name)
    ]
    has_own_head = any(_is_head(name) for name, *_ in matrices)
    body_is_trained = any(trained for name, _, trained in matrices if not _belongs_to_head(name))
    for name, shape, trained in matrices:
        size = 2.0 * math.prod(shape) * _active_fraction(name, config)
        backward = size * (trained + trained_before)
        if _is_embedding(name):
            if name.endswith(".weight") and not has_own_head and not head_forward:
                # a tied embedding is the head as well
                head_forward, head_backward = size, size * (trained + body_is_trained)
        elif _belongs_to_head(name):
            head_forward += size
            head_backward += backward
        else:
            body_forward += size
            body_backward += backward
        trained_before |= trained
    per_pair = 2.0 * _num_attention_layers(config) * _num_heads(config) * sum(_head_dims(config))
    return ModelFlops(
        body_forward=body_forward,
        body_backward=body_backward,
        head_forward=head_forward,
        head_backward=head_backward,
        pair_forward=per_pair,
        pair_backward=2 * per_pair * body_is_trained,
    )


# Model shapes


def _is_embedding(name: str) -> bool:
    """Whether this is an embedding table, of the model or of an adapter."""
    tables = ("embed_tokens", "embed_in", "word_embeddings", "wte", "wpe", "embed_positions", "position_embeddings")
    return name.endswith(tuple(f"{table}.weight" for table in tables)) or ".lora_embedding_A." in name


def _is_head(name: str) -> bool:
    return name.endswith(("lm_head.weight", "embed_out.weight", "value_head.weight"))


def _belongs_to_head(name: str) -> bool:
    """Whether this is the head, or an adapter on it."""
    return _is_head(name) or name.partition(".lora_")[0].endswith(("lm_head", "embed_out"))


def _active_fraction(name: str, config: Mapping[str, Any]) -> float:
    """Share of a weight that one token uses: for experts, the routed ones."""
    experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts") or 0
    if not experts or "expert" not in name or "shared" in name:
        return 1.0
    return (_first(config, "num_experts_per_tok", "moe_topk") or experts) / experts


def _num_attention_layers(config: Mapping[str, Any]) -> int:
    """Number of layers with full attention."""
    types: Sequence[str] = config.get("layer_types") or config.get("layers_block_type") or ()
    if types:
        return sum(kind in ("full_attention", "attention", "hybrid") for kind in types)
    return len(config.get("attn_layer_indices") or ()) or _first(config, "num_hidden_layers", "n_layer") or 0


def _num_heads(config: Mapping[str, Any]) -> int:
    return _first(config, "num_attention_heads", "n_head") or 0


def _head_dims(config: Mapping[str, Any]) -> tuple[int, int]:
    """Query and value features of one head."""
    if config.get("kv_lora_rank"):  # MLA: queries have a rotary part, values do not
        return config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]
    heads = _num_heads(config)
    dim = config.get("head_dim") or ((_first(config, "hidden_size", "n_embd") or 0) // heads if heads else 0)
    return dim, dim


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    """Value of the first of these keys that is set."""
    return next((config[name] for name in names if config.get(name)), None)


_PEAK_UTILIZATION = 0.4
_BANDWIDTH_UTILIZATION = 0.6
_CPU_FLOPS, _CPU_BANDWIDTH = 1e11, 1e10  # nominal, of one process
_DATA_SHEET = "data sheet"
_NOMINAL = "nominal, of any CPU"
BUS_BANDWIDTH = 25e9  # bytes/s in practice between host and GPU, of PCIe 4.0 x16's 32e9 one way
_EULER_GAMMA = 0.5772
_ALL_REDUCE_S = 20e-6  # assumed: latency within a machine
_SLEEP_AND_WAKE_S = 2.0  # assumed: a server on shared GPUs, per step
DEFAULT_GPU = "NVIDIA H100 80GB HBM3"  # stands in for an unknown GPU


@dataclass(frozen=True, slots=True)
class Rate:
    """Peak rate of one GPU and its assumed utilization."""

    peak: float  # per second
    utilization: float
    source: str  # of the peak, in words

    @property
    def achieved(self) -> float:
        """Rate that predictions use."""
        return self.peak * self.utilization


def compute_rate(hardware: Hardware, dtype: str) -> Rate:
    """Matmul FLOP/s in `dtype`; for an unknown GPU those of `DEFAULT_GPU`."""
    if not hardware.on_gpu:
        return Rate(_CPU_FLOPS, _PEAK_UTILIZATION, _NOMINAL)
    if hardware.peak_flops is not None:
        return Rate(hardware.peak_flops, _PEAK_UTILIZATION, "--gpu-tflops")
    peak = peak_flops(hardware.gpu_name, dtype) or peak_flops(DEFAULT_GPU, dtype) or peak_flops(DEFAULT_GPU, "float32")
    assert peak is not None
    return Rate(peak, _PEAK_UTILIZATION, _DATA_SHEET)


def memory_rate(hardware: Hardware) -> Rate:
    """Memory bandwidth in bytes/s; for an unknown GPU that of `DEFAULT_GPU`."""
    if not hardware.on_gpu:
        return Rate(_CPU_BANDWIDTH, _BANDWIDTH_UTILIZATION, _NOMINAL)
    if hardware.bandwidth is not None:
        return Rate(hardware.bandwidth, _BANDWIDTH_UTILIZATION, "--gpu-bandwidth")
    bandwidth = memory_bandwidth(hardware.gpu_name) or memory_bandwidth(DEFAULT_GPU)
    assert bandwidth is not None
    return Rate(bandwidth, _BANDWIDTH_UTILIZATION, _DATA_SHEET)


def digits(value: float, number: int) -> str:
    """Format with `number` significant digits and no exponent."""
    return f"{float(f'{value:.{number}g}'):,g}" if abs(value) < 1e6 else f"{value:,.0f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Predicted duration of a step's phases, in seconds."""

    training_s: float
    sampling_s: float
    publish_s: float  # to servers, with their sleep and wake-up on shared GPUs
    overlap: bool

    @property
    def step_s(self) -> float:
        """Predicted duration of the whole step."""
        phases = max(self.training_s, self.sampling_s) if self.overlap else self.training_s + self.sampling_s
        return phases + self.publish_s

    def at(self, pace: Pace | None) -> "StepTimes":
        """The times at the pace of an earlier run."""
        if pace is None:
            return self
        return replace(
            self,
            training_s=self.training_s * pace.training,
            sampling_s=self.sampling_s * pace.sampling,
            publish_s=self.publish_s * pace.training,
        )

    def describe(self) -> str:
        """The times in words."""
        how = "overlapping" if self.overlap else "in turn"
        training, sampling, step = (digits(s, 3) for s in (self.training_s, self.sampling_s, self.step_s))
        return f"{training} s of training and {sampling} s of sampling per step, {how}: {step} s"


def step_times(
    config: Config, shape: ModelShape, hardware: Hardware, *, num_training: int, num_sampling: int, shared: bool = False
) -> StepTimes:
    """Predict both phases of a step (see the top of this file).

    Args:
        config: configuration of the run.
        shape: shape of its model.
        hardware: type of GPU, the same for all.
        num_training: number of training GPUs.
        num_sampling: number of rollout GPUs, in servers of `rollout.tensor_parallel`.
        shared: whether these are the same GPUs, with servers that sleep during training.
    """
    longest, config = config.rollout.max_new_tokens, _at_mean_length(config, hardware.lengths)
    rollout = config.rollout
    spread = _spread(hardware.lengths, config.train.prompts_per_step * rollout.num_generations, longest)
    tokens = rollout.max_prompt_tokens + rollout.num_generations * rollout.max_new_tokens
    operations = sum(training_operations(config, shape, spread).values()) * config.train.prompts_per_step * tokens
    speed = compute_rate(hardware, compute_dtype(config.model, on_gpu=hardware.on_gpu)).achieved
    return StepTimes(
        training_s=operations / (num_training * speed),
        sampling_s=_sampling_s(config, shape, hardware, num_sampling, shared=shared, limit=longest),
        publish_s=_publish_s(config, shape, hardware, shared=shared),
        overlap=rollout.samples_ahead,
    ).at(hardware.pace)


def _at_mean_length(config: Config, lengths: Lengths | None) -> Config:
    """The configuration with the mean length as the limit of completions or trajectories."""
    rollout = config.rollout
    if lengths is None or lengths.mean >= rollout.max_new_tokens:
        return config
    key = rollout.max_new_tokens_key.partition(".")[2]
    return config.model_copy(update={"rollout": rollout.model_copy(update={key: lengths.mean})})


def _longest_tokens(lengths: Lengths, num_completions: int, limit: int) -> float:
    """Expected length of the longest of some completions (the mean of the maximum of exponential variables)."""
    expected = lengths.mean * (math.log(num_completions) + _EULER_GAMMA)
    return min(limit, max(lengths.mean, expected if lengths.longest is None else lengths.longest))


def _spread(lengths: Lengths | None, num_completions: int, limit: int) -> float:
    """Squared coefficient of variation of the lengths of some completions (see the top of this file)."""
    exponential = math.log(num_completions) + _EULER_GAMMA - 1
    if lengths is None or exponential <= 0:
        return 0.0
    longest = _longest_tokens(lengths, num_completions, limit) / min(lengths.mean, limit)
    return min(1.0, (longest - 1) / exponential)


def training_operations(config: Config, shape: ModelShape, spread: float = 0.0) -> dict[str, float]:
    """FLOPs per token of a step, by purpose."""
    algorithm, updates = config.algorithm, config.train.updates_per_rollout
    policy, kind, adapter = shape.active_parameters, checkpointing(config.model), config.model.adapter
    if adapter is None:
        parts = {"6 FLOPs per weight and token": 6.0 * policy * updates}
    else:
        trained = adapter_shape(adapter, shape).num_parameters
        parts = {"4 FLOPs per weight and token": updates * (4.0 * policy + 6.0 * trained)}
    passes = 3.0 * updates  # through attention, in units of a forward pass
    if kind:
        parts["recomputed layers"] = 2.0 * policy * updates
        passes += updates * (kind is True)  # selective checkpointing keeps attention's output
    if algorithm.beta > 0:
        parts["the reference"] = 2.0 * policy
        passes += 1
    if algorithm.kl_in == "reward" or algorithm.top_entropy_quantile < 1:
        parts["old logprobs"] = 2.0 * policy
        passes += 1
    if config.train.router_aux_loss_coef > 0:
        parts["router statistics"] = 2.0 * policy * updates
        passes += updates
    parts["attention"] = passes * _attention(shape, _mean_context(config, spread))
    critic = critic_shape(config, shape)
    if critic is not None:
        per_update = config.critic.updates if config.critic else 1
        passes = 1 + updates * per_update * (3 + (kind is True))
        attention = _attention(critic, _mean_context(config, spread)) * passes
        weights = critic.active_parameters * (2.0 + updates * per_update * (6.0 + 2.0 * bool(kind)))
        parts["the critic"] = weights + attention
    return parts


def _attention(shape: ModelShape, context: float) -> float:
    """FLOPs of attention per token in forward: scores and weighted values."""
    return 4.0 * shape.attention_width * context


def _mean_context(config: Config, spread: float) -> float:
    """Average number of tokens that a token of a group attends to."""
    rollout = config.rollout
    prompt, completions = rollout.max_prompt_tokens, rollout.num_generations * rollout.max_new_tokens
    pairs = prompt * prompt / 2 + completions * (prompt + (1 + spread) * rollout.max_new_tokens / 2)
    return pairs / (prompt + completions)


def _sampling_s(
    config: Config, shape: ModelShape, hardware: Hardware, num_sampling: int, *, shared: bool, limit: int
) -> float:
    """Seconds of sampling; `limit`: maximum length, of which the configuration has the mean."""
    rollout, on_gpu = config.rollout, hardware.on_gpu
    length = rollout.max_trained_tokens
    dtype: str
    if rollout.uses_servers:
        dtype, per_server = serving_dtype(config, on_gpu=on_gpu), rollout.tensor_parallel
        max_num_seqs = min(rollout.max_num_seqs, _kv_capacity(rollout, shape, hardware, BYTES[dtype], shared=shared))
    else:
        dtype, per_server, max_num_seqs = compute_dtype(config.model, on_gpu=on_gpu), 1, rollout.max_num_seqs
    flops_per_s = per_server * compute_rate(hardware, dtype).achieved
    bytes_per_s = per_server * memory_rate(hardware).achieved
    # the busiest server
    prompts = math.ceil(config.train.prompts_per_step / max(1, num_sampling // per_server))
    completions = prompts * rollout.num_generations
    batch = min(max_num_seqs, completions * max(1, rollout.max_staleness if rollout.samples_ahead else 1))
    spread = _spread(hardware.lengths, completions, limit)
    context = rollout.max_prompt_tokens + (1 + spread) * rollout.max_new_tokens / 2
    cached = shape.kv_bytes(BYTES[dtype], on_server=rollout.uses_servers) * context
    # a recurrent state is read and written
    read_bytes = BYTES[dtype] * shape.num_parameters + (cached + 2 * shape.state_bytes) * batch
    flops = batch * (2.0 * shape.active_parameters + _attention(shape, context))
    waits_s = 2 * shape.layers * _ALL_REDUCE_S * (per_server > 1)
    decoding_s = completions / batch * length * (max(read_bytes / bytes_per_s, flops / flops_per_s) + waits_s)
    if hardware.lengths is not None:
        tail = max(0.0, _longest_tokens(hardware.lengths, completions, limit) - rollout.max_new_tokens)
        decoding_s += tail * (BYTES[dtype] * shape.num_parameters / bytes_per_s + waits_s)
    prefilled = prompts * rollout.max_prompt_tokens + completions * _later_prefill_tokens(rollout)
    prefill_s = 2.0 * shape.active_parameters * prefilled / flops_per_s
    return prefill_s + decoding_s


def _publish_s(config: Config, shape: ModelShape, hardware: Hardware, *, shared: bool) -> float:
    rollout, adapter = config.rollout, config.model.adapter
    if not rollout.uses_servers or not hardware.on_gpu:
        return 0.0
    sent = shape.num_parameters if adapter is None else adapter_shape(adapter, shape).num_parameters
    return BYTES[serving_dtype(config, on_gpu=True)] * sent / BUS_BANDWIDTH + _SLEEP_AND_WAKE_S * shared


def _later_prefill_tokens(rollout: SamplingConfig) -> float:
    """Tokens that are prefilled for a trajectory after its first turn."""
    if not rollout.has_turns:
        return 0.0
    if rollout.uses_servers:
        return rollout.max_new_tokens - rollout.max_trained_tokens
    # turn k of n begins with the prompt and k / n of the trajectory
    return (rollout.max_turns - 1) * (rollout.max_prompt_tokens + rollout.max_new_tokens / 2)


def _kv_capacity(
    rollout: ServersConfig, shape: ModelShape, hardware: Hardware, bytes_each: int, *, shared: bool
) -> int:
    """Number of trajectories of maximum length that fit into a server's KV cache, with shared prompts."""
    memory = rollout.tensor_parallel * server_memory_utilization(rollout, shared=shared) * hardware.gpu_memory_bytes
    room = memory - bytes_each * shape.num_parameters
    tokens = rollout.max_new_tokens + rollout.max_prompt_tokens / rollout.num_generations
    return max(1, int(room // (tokens * shape.kv_bytes(bytes_each, on_server=True) + shape.state_bytes)))
