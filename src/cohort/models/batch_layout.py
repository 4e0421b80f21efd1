"""Choose how micro-batches of a model are laid out: with shared prompts, packed, or padded.

First the architecture is inspected. Then short sequences are computed in the candidate layout and padded, forward and
backward. So an unusual model or a failing kernel costs speed, never correctness.

H hidden size.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from cohort.attention_mask import NO_PARENT, build_attention_metadata
from cohort.batch import MicroBatch
from cohort.host_to_device import to_device
from cohort.models import attention
from cohort.models.forward import forward

# "shared": a packed row in which completions share their prompt. "packed": a packed row of whole sequences.
# "padded": a padded batch of whole sequences.
Layout = Literal["shared", "packed", "padded"]

_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})  # frequencies depend on the longest sequence of a batch
_RECURRENT = ("state_size", "ssm_state_size", "mamba_d_state", "mamba_d_ssm", "conv_L_cache", "linear_conv_kernel_dim")
_FAILURES = (TypeError, ValueError, RuntimeError, AttributeError)
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
    reason = next(_reasons(model, longest_sequence_tokens), None)
    if reason is not None:
        return "padded", reason
    was_training = model.training
    model.eval()
    try:
        expected = _probe(model, module, output, "padded")
        if isinstance(expected, Exception):
            return "padded", f"the probe failed ({_short(expected)})"
        try:
            model.set_attn_implementation(attention.NAME)
        except _FAILURES as error:
            return "padded", f"its attention cannot be replaced ({_short(error)})"
        tolerance = 3e-2 if _is_narrow(model) else 1e-4
        layouts: tuple[Layout, ...] = ("shared", "packed")
        for layout in layouts:
            difference = _differences(_probe(model, module, output, layout), expected, tolerance)
            if difference is None:
                return layout, reason
            reason = f"{_NAMES[layout]} {difference}"
        model.set_attn_implementation(own)
        return "padded", reason
    finally:
        model.train(was_training)


_NAMES = {"shared": "a row with shared prompts", "packed": "a packed row"}


def _is_narrow(model: Any) -> bool:
    """Whether matrix products are in bfloat16, by the weights or by autocast."""
    weight = next(model.parameters())
    return weight.dtype == torch.bfloat16 or torch.is_autocast_enabled(weight.device.type)


def _differences(actual: "_ProbeResult | Exception", expected: "_ProbeResult", tolerance: float) -> str | None:
    """Describe how the results of a layout differ from the expected ones; None if they agree."""
    if isinstance(actual, Exception):
        return f"fails ({_short(actual)})"
    checks = (
        ("outputs", actual.outputs, expected.outputs, tolerance),
        ("gradients", actual.gradient, expected.gradient, 5 * tolerance),  # sums over all tokens
    )
    for name, mine, theirs, limit in checks:
        error = ((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30)).item()
        if not error <= limit:  # also true for NaN
            size = f"relative error {error:.1g}, rounding is below {limit:.0e}"
            return f"gives {name} that differ from the model's ({size})"
    return None


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


def _reasons(model: Any, longest: int | None) -> Iterator[str]:
    """Yield reasons against packed rows from the config and the modules."""
    config = model.config.get_text_config()
    own = model.config._attn_implementation
    if own not in ("sdpa", "eager", attention.NAME):
        yield f"its attention implementation is {own}, and packed rows replace only sdpa and eager"
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if others:
        yield f"it has layers of type {', '.join(sorted(others))}, not only full or sliding-window attention"
    windows = set()
    for layer in DynamicCache(config=model.config).layers:  # knows windows that layer_types does not list
        if type(layer) is DynamicSlidingWindowLayer:
            windows.add(layer.sliding_window)
        elif type(layer) is not DynamicLayer:
            yield "some of its layers cache more than the keys and values of full attention"
    if any(getattr(config, name, None) for name in _RECURRENT):
        yield "it has state-space or convolutional layers, whose state would leak into the next sequence"
    if windows and (longest is None or longest > min(windows)):
        than = "its sequences may be" if longest is None else f"its longest sequence of {longest} tokens is"
        yield f"{than} longer than its attention window of {min(windows)} tokens"
    if getattr(config, "attn_logit_softcapping", None):
        yield "its attention scores are softcapped"
    if any(name.rpartition(".")[-1] == "sinks" for name, _ in model.named_parameters()):
        yield "its attention has sinks"
    if getattr(config, "use_bidirectional_attention", None) or getattr(config, "is_causal", True) is False:
        yield "its attention is not causal"
    if _has_dropout(model, config):
        yield "it has dropout, and completions would share the dropout mask of their prompt"
    for rope in _ropes(config):
        kind = rope.get("rope_type", rope.get("type"))
        if kind not in _BATCH_DEPENDENT_ROPE:
            continue
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if longest is None or longest > original:
            yield f"the frequencies of its {kind} RoPE depend on the other sequences of the row"


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    """RoPE settings of a config: one for all layers, or one per layer type."""
    settings = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [s for s in settings.values() if isinstance(s, Mapping)]
    return nested or [settings]


def _has_dropout(model: Any, config: Any) -> bool:
    """Whether the model uses dropout."""
    if any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules()):
        return True
    return any((getattr(config, name, None) or 0.0) > 0 for name in ("attention_dropout", "attn_pdrop"))


class _ProbeResult(NamedTuple):
    """Results of the probe's sequences in a layout, at the positions that predict completions."""

    outputs: Tensor  # [positions, H]
    gradient: Tensor  # of a small weight before the first attention; zeros [1] if there is none


def _probe(model: Any, module: Any, output: Callable[[Any], Tensor], layout: Layout) -> _ProbeResult | Exception:
    """Compute the probe's sequences in a layout, forward and backward; return the error if that fails."""
    device, vocabulary = next(model.parameters()).device, model.config.get_text_config().vocab_size
    segments: list[tuple[int, ...]] = []
    parents: list[int] = []
    offsets: list[int] = []
    source: list[int] = []

    def add(tokens: tuple[int, ...], parent: int, offset: int) -> range:
        start = sum(map(len, segments))
        segments.append(tokens)
        parents.append(parent)
        offsets.append(offset)
        return range(start, start + len(tokens))

    for prompt, completions in _PROBE:
        if layout == "shared":
            parent = len(segments)
            last = add(prompt, NO_PARENT, 0)[-1]
            for completion in completions:
                source += [last, *(add(completion, parent, len(prompt)) if completion else ())]
        else:
            for completion in completions:
                source += add(prompt + completion, NO_PARENT, 0)[len(prompt) - 1 :]
    nothing = torch.zeros(0, device=device)
    micro_batch = MicroBatch(
        input_ids=torch.tensor([token for s in segments for token in s], device=device) % vocabulary,
        position_ids=torch.cat([o + torch.arange(len(s)) for o, s in zip(offsets, segments, strict=True)]).to(device),
        input_counts=nothing,
        attn_metadata=to_device(build_attention_metadata([len(s) for s in segments], parents), device),
        logit_positions=torch.tensor(source, device=device),
        labels=nothing,
        sampling_logprobs=nothing,
        advantages=nothing,
        loss_weights=nothing,
        returns=nothing,
        trajectory_ids=nothing,
    )
    weight = next((p for p in model.parameters() if p.ndim == 1 and p.is_floating_point()), None)
    was_trained = weight is not None and weight.requires_grad
    try:
        with torch.set_grad_enabled(weight is not None):
            if weight is not None:
                weight.requires_grad_(True)
            outputs = forward(module, micro_batch, output, padded=layout == "padded").float()
            if weight is None:
                return _ProbeResult(outputs, outputs.new_zeros(1))
            signs = torch.linspace(-1.0, 1.0, outputs.numel(), device=device).view_as(outputs).sin()
            (gradient,) = torch.autograd.grad((outputs * signs).sum(), weight)
            return _ProbeResult(outputs.detach(), gradient.float())
    except _FAILURES as error:
        return error
    finally:
        if weight is not None:
            weight.requires_grad_(was_trained)
