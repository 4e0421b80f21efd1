"""Law 2 over layers with a recurrent state: packed rows give what one forward per completion gives."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cohort.models import Policy, mixers
from cohort.models.activation_checkpointing import enable_gradient_checkpointing
from cohort.packing import segments
from cohort.packing.segments import NO_PARENT, AttentionMetadata
from families import FAMILIES, make_model
from selection import mostly_slow, slow
from test_law_two import Groups, differences, fast, make_law_policy, naive, streamed
from tiny import random_sequences

# Prompts and completions shorter than the convolution and longer than a chunk; prompts of one length and of others.
GROUPS: Groups = [(5, [7, 1, 3]), (1, [1, 4]), (5, [12, 2]), (4, [1, 1]), (70, [2, 66, 80]), (9, [2])]
KINDS = (
    *("Qwen3-Next", "Qwen3.5 (text)", "Qwen3.5-MoE (text)", "OLMo Hybrid", "Kimi Linear", "LFM2", "LFM2-MoE"),
    *("Granite 4", "Bamba", "Falcon-H1", "Nemotron-H", "Mamba 2"),
)
FLOAT32_PARTS = ("OLMo Hybrid", "Kimi Linear", "Nemotron-H")  # a part of the gradient is rounded to float32
PATHS: dict[str, Callable[[Policy, list[Any]], Any]] = {
    "shared": lambda policy, sequences: fast(policy, sequences, "shared"),
    "packed": lambda policy, sequences: fast(policy, sequences, "packed"),
    "streamed": streamed,
}


class _Wide(ModuleType):
    """`torch` for code that asks for float32."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def make_wide_model(kind: str, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """A model in float64, also where the code of its family asks for float32."""
    model = make_model(FAMILIES[kind], dtype=torch.float64)
    model.train()
    if model.config._experts_implementation is not None:
        model.set_experts_implementation("eager")  # the grouped products have no float64
    for name in {type(m).__module__ for m in model.modules() if type(m).__module__.startswith("transformers.models")}:
        monkeypatch.setattr(sys.modules[name], "torch", _Wide("torch"))
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    return model


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "Qwen3.5 (text)", "LFM2", "Nemotron-H", reason="one of each kind"))
def test_float64(kind: str, monkeypatch: pytest.MonkeyPatch):
    model = make_wide_model(kind, monkeypatch)
    sequences = random_sequences(GROUPS)
    expected = naive(model, sequences)
    policy = make_law_policy(model)
    assert (policy.layout, policy.traits.reason) == ("shared", None)
    for path in (*PATHS, "checkpointing"):
        if path == "checkpointing":
            enable_gradient_checkpointing(model)
        value, gradient = differences(PATHS.get(path, PATHS["shared"])(policy, sequences), expected)
        assert value < 1e-10 and gradient < (1e-6 if kind in FLOAT32_PARTS else 1e-10), path


@slow("float64 is compared")
@pytest.mark.parametrize("kind", KINDS)
def test_float32(kind: str):
    model = make_model(FAMILIES[kind])
    sequences = random_sequences(GROUPS)
    expected = naive(model, sequences)
    value, gradient = differences(fast(make_law_policy(model), sequences, "shared"), expected)
    assert value < 2e-5 and gradient < 5e-5


@pytest.mark.parametrize("sabotage", ["leaking_state", "detached_prompt", "wrong_parent", "padded_prompt"])
@pytest.mark.parametrize(
    "kind", mostly_slow(("Qwen3.5 (text)", "LFM2", "Nemotron-H"), "Qwen3.5 (text)", reason="other mixers")
)
def test_what_goes_wrong_is_seen(kind: str, sabotage: str, monkeypatch: pytest.MonkeyPatch):
    """Negative controls: the comparison fails, and by far."""
    model = make_wide_model(kind, monkeypatch)
    sequences = random_sequences(GROUPS)
    expected = naive(model, sequences)
    policy = make_law_policy(model)
    assert max(differences(fast(policy, sequences, "shared"), expected)) < 1e-6
    SABOTAGES[sabotage](monkeypatch)
    value, gradient = differences(fast(policy, sequences, "shared"), expected)
    assert gradient > 0.01 and (value > 0.01 or sabotage == "detached_prompt")


def leaking_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole row as one sequence."""
    build = segments._build_state_blocks
    monkeypatch.setattr(
        segments, "_build_state_blocks", lambda lengths, *_, **kwargs: build([sum(lengths)], [NO_PARENT], **kwargs)
    )


def detached_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Completions send no gradient into the state that they start from."""
    states = mixers._StateCache.states
    monkeypatch.setattr(
        mixers._StateCache, "states", property(lambda self: tuple(x.detach() for x in states.fget(self)))
    )


def wrong_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Completions start from the states of each other's prompts."""
    right = AttentionMetadata.state_blocks

    def flipped(self: AttentionMetadata, **kwargs: Any) -> segments.StateBlocks:
        blocks = right(self, **kwargs)
        return replace(blocks, blocks=tuple(replace(b, starts=b.starts.flip(0)) for b in blocks.blocks))

    monkeypatch.setattr(AttentionMetadata, "state_blocks", flipped)


def padded_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Completions start from the state after a token of padding."""
    right = mixers._mix_row

    def padded(compute: Any, *args: Any) -> Tensor:
        return right(lambda hidden, states: compute(torch.cat([hidden, hidden[:, -1:]], dim=1), states), *args)

    monkeypatch.setattr(mixers, "_mix_row", padded)


SABOTAGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    f.__name__: f for f in (leaking_state, detached_prompt, wrong_parent, padded_prompt)
}


def test_a_mixer_with_another_signature_is_padded(monkeypatch: pytest.MonkeyPatch):
    model = make_model(FAMILIES["LFM2"])
    (mixer,) = mixers.find_mixers(model)

    def forward(self: Any, hidden_states: Tensor, state: Any = None, attention_mask: Tensor | None = None) -> Tensor:
        return hidden_states

    monkeypatch.setattr(type(mixer), "forward", forward)
    policy = make_law_policy(model)
    assert policy.layout == "padded"
    assert policy.traits.reason == "it has layers of type conv, which packed rows do not support"


def test_without_metadata_a_mixer_computes_as_before():
    model = make_model(FAMILIES["Qwen3.5 (text)"])
    ids = torch.arange(12)[None] + 2
    before = model(input_ids=ids).logits
    make_law_policy(model)
    (mixer,) = mixers.find_mixers(model)
    assert "attention_mask" in inspect.signature(type(mixer).forward).parameters
    assert torch.equal(model(input_ids=ids).logits, before)
