"""Choose how micro-batches of a model are laid out: with shared prompts, packed, or padded.

First the architecture is inspected. Then short sequences are computed in the candidate layout and padded, forward and
backward. Shared prompts are also computed as a group that is split over micro-batches, and decoded. So an unusual model
costs speed and not correctness. Kernels that only fail on longer sequences are not found.

H hidden size.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from cohort.errors import describe_error
from cohort.models import attention
from cohort.models.attention import KVCache, PackedAttention
from cohort.models.attention.cascade import AttentionSpec
from cohort.models.attention.decoding import DecodeBatch, PromptCache
from cohort.models.attention.own_layers import has_own_attention
from cohort.models.dropout import dropout_rates
from cohort.models.forward import PrefixState, forward, is_attention_free, packed_inputs
from cohort.models.mixers import LAYER_TYPES, find_mixers
from cohort.packing.batch import MicroBatch
from cohort.packing.segments import CACHED_PREFIX, NO_PARENT, build_attention_metadata
from cohort.packing.to_device import to_device

# "shared": a packed row in which completions share their prompt. "packed": a packed row of whole sequences.
# "padded": a padded batch of whole sequences.
Layout = Literal["shared", "packed", "padded"]

_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
_ATTENTION_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
# By name: versions of transformers differ in what they have.
_CACHES = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"})
_STATE_CACHES = frozenset({"LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer"})
_FAILURES = (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError)
# Groups of the probe: a prompt, and its completions without their last tokens, which are not inputs. The second prompt
# has a single token; an empty completion has outputs at the last token of its prompt only.
_PROBE = (
    ((1, 2, 3, 8, 2), ((5, 6, 1), (), (6, 5, 7, 9))),
    ((4,), ((7, 8, 9), (9,))),
    ((3, 9, 4), ((2, 7),)),
)


def choose_layout(
    model: Any, module: Any, output: Callable[[Any], Tensor], *, longest_sequence_tokens: int | None = None
) -> tuple[Layout, str | None]:
    """Choose the first of "shared", "packed" and "padded" that matches the model's own results, and set it up.

    Args:
        model: the whole model. Its attention implementation is replaced unless the layout is "padded".
        module: the model or its body, as called in training.
        output: selects the tensor [rows, positions, H] of the module's outputs.
        longest_sequence_tokens: longest sequence of the run; None if unknown.

    Returns:
        the layout, and if it is not "shared", the reason, as words that follow "because".
    """
    own = model.config._attn_implementation
    if own == "sdpa" and getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        own = "eager"  # transformers 5.17 offers sdpa, too, which leaves the softcap out
        model.set_attn_implementation(own)
    reason = next(_reasons(model, longest_sequence_tokens), None)
    if reason is not None:
        return "padded", reason
    was_training = model.training
    model.eval()
    try:
        expected = _probe(model, module, output, "padded")
        if isinstance(expected, Exception):
            return "padded", f"the probe failed ({describe_error(expected, 200)})"
        try:
            model.set_attn_implementation(attention.NAME)
        except _FAILURES as error:
            return "padded", f"its attention cannot be replaced ({describe_error(error, 200)})"
        calls_interface = model.config._attn_implementation == attention.NAME or is_attention_free(model.config)
        if not calls_interface and not has_own_attention(model):
            return "padded", "its layers do not call transformers' attention interface"
        tolerance = 3e-2 if is_narrow(model) else 1e-4
        layouts: tuple[Layout, ...] = ("shared", "packed")
        for layout in layouts:
            specs: dict[int, AttentionSpec] = {}
            result = _probe(model, module, output, layout, specs)
            difference = _differences(result, expected, tolerance)
            difference = difference or _spec_problem(model, specs, longest_sequence_tokens)
            problem = None if difference is None else f"{_NAMES[layout]} {difference}"
            if layout == "shared" and problem is None:
                problem = _split_problem(model, module, output, expected.outputs, tolerance)
            if problem is None:
                return layout, reason
            reason = problem
        model.set_attn_implementation(own)
        return "padded", reason
    finally:
        model.train(was_training)


_NAMES = {"shared": "a row with shared prompts", "packed": "a packed row"}


def is_narrow(model: Any) -> bool:
    """Whether matrix products are in bfloat16, by the weights or by autocast."""
    weight = next(model.parameters())
    return weight.dtype == torch.bfloat16 or torch.is_autocast_enabled(weight.device.type)


def _differences(actual: "_ProbeResult | Exception", expected: "_ProbeResult", tolerance: float) -> str | None:
    """Describe how the results of a layout differ from the expected ones; None if they agree."""
    if isinstance(actual, Exception):
        return f"fails ({describe_error(actual, 200)})"
    checks = (
        ("outputs", actual.outputs, expected.outputs, tolerance),
        ("gradients", actual.gradient, expected.gradient, 5 * tolerance),  # sums over all tokens
    )
    return next(filter(None, (_difference(*check) for check in checks)), None)


def _difference(name: str, actual: Tensor, expected: Tensor, limit: float) -> str | None:
    error = ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()
    if error <= limit:  # false for NaN
        return None
    return f"gives {name} that differ from the model's (relative error {error:.1g}, rounding is below {limit:.0e})"


def _reasons(model: Any, longest: int | None) -> Iterator[str]:
    """Yield reasons against packed rows from the config and the modules."""
    config = model.config.get_text_config()
    own = model.config._attn_implementation
    if own not in ("sdpa", "eager", attention.NAME):
        yield f"its attention implementation is {own}, and packed rows replace only sdpa and eager"
    mixers = find_mixers(model)
    types = set(getattr(config, "layer_types", None) or ())
    others = types - _ATTENTION_TYPES - (LAYER_TYPES if mixers else set())
    if others:
        yield f"it has layers of type {', '.join(sorted(others))}, which packed rows do not support"
    known = _CACHES | _STATE_CACHES if mixers else _CACHES
    if any(type(layer).__name__ not in known for layer in _cache_layers(model)):
        yield "some of its layers cache more than the keys and values of attention"
    inside = {m for mixer in mixers for m in mixer.modules()}
    if any(isinstance(m, nn.Conv1d) or hasattr(m, "A_log") for m in model.modules() if m not in inside):
        yield "it has state-space or convolutional layers, whose state would leak into the next sequence"
    is_bidirectional = getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision")  # no images
    if is_bidirectional or getattr(config, "is_causal", True) is False:
        yield "its attention is not causal"
    if dropout_rates(model) or any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules()):  # adapters' too
        yield "it has dropout, and completions would share the dropout mask of their prompt"
    for rope in rope_settings(config):
        if not depends_on_length(rope):
            continue
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if longest is None or longest > original:
            yield (
                f"its {rope_type(rope)} RoPE takes other frequencies for all sequences of a row once one exceeds "
                f"{original} tokens; padded, too, only batches of up to {original} tokens are right"
            )


def _cache_layers(model: Any) -> list[Any]:
    """The layers of an empty cache. They have windows and chunk sizes that `layer_types` does not list."""
    return list(DynamicCache(config=model.config).layers)


def _spec_problem(model: Any, specs: Mapping[int, AttentionSpec], longest: int | None) -> str | None:
    """Describe a window, chunk or softcap that does not reach attention; the probe may be too short to show it."""
    softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    for number, layer in enumerate(_cache_layers(model)):
        spec = specs.get(number)
        if spec is None:
            continue
        expected = layer.sliding_window if type(layer) is DynamicSlidingWindowLayer else None
        actual = spec.window or spec.chunk
        if actual != expected and min(actual or math.inf, expected or math.inf) < (longest or math.inf):
            return f"has a window of {actual} tokens in layer {number}, not of {expected}"
        if spec.softcap != softcap:
            return f"has a softcap of {spec.softcap} in layer {number}, not of {softcap}"
    return None


def rope_settings(config: Any) -> list[Mapping[str, Any]]:
    """RoPE settings of a config: one for all layers, or one per layer type."""
    settings = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [s for s in settings.values() if isinstance(s, Mapping)]
    return nested or [settings]


def rope_type(rope: Mapping[str, Any]) -> str | None:
    """The type of RoPE settings, which older configs call `type`."""
    return rope.get("rope_type", rope.get("type"))


def depends_on_length(rope: Mapping[str, Any]) -> bool:
    """Whether frequencies change if the longest sequence of a batch exceeds the original length.

    Hunyuan's `alpha` makes them constant.
    """
    return rope_type(rope) in _LENGTH_DEPENDENT_ROPE and not rope.get("alpha")


class _ProbeResult(NamedTuple):
    """Results of the probe's sequences in a layout, at the positions that predict completions."""

    outputs: Tensor  # [positions, H]
    gradient: Tensor  # of a small weight before the first attention; zeros [1] if there is none


class _Segments:
    """Segments of a row, and the positions whose outputs are compared."""

    def __init__(self) -> None:
        self.tokens: list[tuple[int, ...]] = []
        self.parents: list[int] = []
        self.offsets: list[int] = []
        self.source: list[int] = []

    def add(self, tokens: tuple[int, ...], parent: int, offset: int) -> range:
        """Add a segment whose first token has position `offset` in its sequence; return its positions in the row."""
        start = sum(map(len, self.tokens))
        self.tokens.append(tokens)
        self.parents.append(parent)
        self.offsets.append(offset)
        return range(start, start + len(tokens))

    def micro_batch(self, model: Any, *, prefix_tokens: int = 0) -> MicroBatch:
        """Lay the segments out; tokens are taken modulo the model's vocabulary."""
        device, vocabulary = next(model.parameters()).device, model.config.get_text_config().vocab_size
        nothing = torch.zeros(0, device=device)
        lengths = [len(s) for s in self.tokens]
        metadata = build_attention_metadata(lengths, self.parents, prefix_tokens=prefix_tokens)
        return MicroBatch(
            input_ids=torch.tensor([token for s in self.tokens for token in s], device=device) % vocabulary,
            position_ids=torch.cat([o + torch.arange(n) for o, n in zip(self.offsets, lengths, strict=True)]).to(
                device
            ),
            input_counts=nothing,
            attn_metadata=to_device(metadata, device),
            logit_positions=torch.tensor(self.source, device=device),
            labels=nothing,
            sampling_logprobs=nothing,
            advantages=nothing,
            loss_weights=nothing,
            returns=nothing,
            trajectory_ids=nothing,
        )


def _probe(
    model: Any,
    module: Any,
    output: Callable[[Any], Tensor],
    layout: Layout,
    specs: dict[int, AttentionSpec] | None = None,
) -> _ProbeResult | Exception:
    """Compute the probe's sequences in a layout, forward and backward; return the error if that fails."""
    row = _Segments()
    for prompt, completions in _PROBE:
        if layout == "shared":
            parent = len(row.tokens)
            last = row.add(prompt, NO_PARENT, 0)[-1]
            for completion in completions:
                row.source += [last, *(row.add(completion, parent, len(prompt)) if completion else ())]
        else:
            for completion in completions:
                row.source += row.add(prompt + completion, NO_PARENT, 0)[len(prompt) - 1 :]
    weight = next((p for p in model.parameters() if p.ndim == 1 and p.is_floating_point()), None)
    was_trained = weight is not None and weight.requires_grad
    try:
        with torch.set_grad_enabled(weight is not None):
            if weight is not None:
                weight.requires_grad_(True)
            padded = layout == "padded"
            outputs = forward(module, row.micro_batch(model), output, padded=padded, specs=specs).float()
            if weight is None:
                return _ProbeResult(outputs, outputs.new_zeros(1))
            signs = torch.linspace(-1.0, 1.0, outputs.numel(), device=outputs.device).view_as(outputs).sin()
            (gradient,) = torch.autograd.grad((outputs * signs).sum(), weight)
            return _ProbeResult(outputs.detach(), gradient.float())
    except _FAILURES as error:
        return error
    finally:
        if weight is not None:
            weight.requires_grad_(was_trained)


def _split_problem(
    model: Any, module: Any, output: Callable[[Any], Tensor], expected: Tensor, tolerance: float
) -> str | None:
    """Describe what is wrong if the keys and values of a prompt are kept; None if nothing is.

    The first group of the probe continues its prompt in another micro-batch, and is decoded for two tokens.

    Args:
        model: the whole model.
        module: see `choose_layout`.
        output: see `choose_layout`.
        expected: outputs of the probe, [positions, H].
        tolerance: largest relative error.
    """
    prompt, completions = _PROBE[0]
    root, part = _Segments(), _Segments()
    root.source = [root.add(prompt, NO_PARENT, 0)[-1]]
    starts = []  # of the completions among the expected outputs
    for completion in completions:
        starts.append(len(part.source))
        own = part.add(completion, CACHED_PREFIX, len(prompt)) if completion else ()
        part.source += [0, *(1 + position for position in own)]
    name = "a group that is split over micro-batches"
    try:
        with torch.no_grad():
            captured = KVCache()
            hidden = forward(module, root.micro_batch(model), output, padded=False, captured=captured)
            outputs = forward(
                module,
                part.micro_batch(model, prefix_tokens=len(prompt)),
                output,
                padded=False,
                prefix=PrefixState(hidden, captured),
            )
            difference = _difference("outputs", outputs.float(), expected[: len(outputs)], tolerance)
            if difference is None:
                name = "decoding with a shared prompt"
                outputs, rows = _decoded(model, module, output, captured)
                wanted = [starts[row] + 1 + t for t in range(_NUM_DECODED) for row in rows]
                difference = _difference("outputs", outputs.float(), expected[wanted], tolerance)
    except _FAILURES as error:
        difference = f"fails ({describe_error(error, 200)})"
    return None if difference is None else f"{name} {difference}"


_NUM_DECODED = 2  # the second token attends to the first in the completions' cache


def _decoded(model: Any, module: Any, output: Callable[[Any], Tensor], captured: KVCache) -> tuple[Tensor, list[int]]:
    """Decode the first tokens of the first group's long completions.

    Returns:
        outputs [_NUM_DECODED * R, H], step by step, and the indices of the R completions.
    """
    prompt, completions = _PROBE[0]
    device, vocabulary = next(model.parameters()).device, model.config.get_text_config().vocab_size
    rows = [n for n, completion in enumerate(completions) if len(completion) >= _NUM_DECODED]
    block = PromptCache([len(prompt)], device=device)
    block.write(0, 1, captured)
    batch = DecodeBatch([block], [[np.arange(len(rows))]], limit=_NUM_DECODED, device=device)
    outputs = []
    for t in range(_NUM_DECODED):
        tokens = torch.tensor([completions[n][t] for n in rows], device=device) % vocabulary
        positions = torch.full_like(tokens, len(prompt) + t)
        inputs = packed_inputs(module, tokens, PackedAttention(position_ids=positions, decoding=[batch]))
        outputs.append(output(module(**inputs)).squeeze(0))
        batch.advance()
    return torch.cat(outputs), rows
