"""Law 2 over architectures: every fast path gives what one unpadded forward per completion with full logits gives.

Logprobs, entropies and the gradient of every parameter, in float64 to 1e-10 with the library's norms patched not to
round to float32, and in float32 to 1e-5.
"""

import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from cohort.models import Policy
from cohort.models.activation_checkpointing import enable_gradient_checkpointing
from cohort.models.attention import cascade, interface
from cohort.models.batch_layout import Layout
from cohort.packing import collate, collate_part, collate_prompt
from cohort.packing.segments import NO_PARENT, build_attention_metadata
from cohort.records import TrainSequence
from selection import examples, mostly_slow, slow
from tiny import SIZES, VOCAB_SIZE, gradients, naive_logprobs, random_sequences

Groups = list[tuple[int, list[int]]]  # tokens of each prompt and of its completions
# One-token prompts and completions, groups of one, prompts of unequal length, and segments that are taken alone.
GROUPS: Groups = [(5, [7, 1, 3]), (1, [1, 4]), (9, [12]), (4, [1, 1]), (70, [2, 66, 80]), (1, [2])]
FEW: Groups = [(5, [7, 1, 3]), (1, [1, 4]), (70, [2, 20])]
LONGEST = 150
TEMPERATURE = 0.7
LAYOUTS: list[Layout] = ["shared", "packed", "padded"]
COMMON: dict[str, Any] = {
    **SIZES,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "initializer_range": 0.15,  # wide enough for distributions that are not uniform
}
GEMMA: dict[str, Any] = {"head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "output_router_logits": False}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"tie_word_embeddings": False}),
    "llama": (LlamaConfig, {"tie_word_embeddings": False}),
    "gemma2": (Gemma2Config, {**GEMMA, "attn_logit_softcapping": None, "sliding_window": 512}),
    "gemma3": (Gemma3TextConfig, {**GEMMA, "sliding_window": 512}),
    "mistral": (MistralConfig, {"sliding_window": 512}),
    "qwen3_moe": (Qwen3MoeConfig, {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 32}),
    "gemma2_capped": (Gemma2Config, {**GEMMA, "attn_logit_softcapping": 2.0, "sliding_window": 8}),
    "gemma3_short": (Gemma3TextConfig, {**GEMMA, "sliding_window": 8}),
    "mistral_short": (MistralConfig, {"sliding_window": 8}),
    "gpt_oss": (GptOssConfig, {**EXPERTS, "num_local_experts": 4, "head_dim": 8, "sliding_window": 8}),
    "mixtral": (MixtralConfig, {**EXPERTS, "num_local_experts": 4, "sliding_window": None}),
}


def make_law_model(
    kind: str, *, dtype: torch.dtype = torch.float64, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    torch.manual_seed(seed)
    config, settings = MODELS[kind]
    # in transformers 5.17, sdpa leaves softcaps out
    attention = overrides.pop("attn_implementation", "eager" if settings.get("attn_logit_softcapping") else None)
    model = AutoModelForCausalLM.from_config(
        config(**{**COMMON, **settings, **overrides}), dtype=dtype, attn_implementation=attention
    )
    if "num_experts_per_tok" in settings:
        model.set_experts_implementation("eager")  # the grouped product takes no float64
    with torch.no_grad():  # norms of one and biases of zero would hide mistakes
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def make_law_policy(
    model: PreTrainedModel,
    *,
    longest: int | None = LONGEST,
    compute_dtype: torch.dtype | None = None,
    dropout: bool = False,
) -> Policy:
    return Policy(
        model,
        device=torch.device("cpu"),
        compute_dtype=compute_dtype or model.dtype,
        pad_token_id=0,
        longest_sequence_tokens=longest,
        dropout=dropout,
    )


def compute_in_float64(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of the model's family, and its softmaxes, compute in the weights' dtype instead of float32."""
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim=None, dtype=None, **_: softmax(x, dim=dim))

    def norm(self: Any, hidden: Tensor) -> Tensor:
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        normed = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps)
        return normed * (1 + self.weight if type(self).__name__.startswith("Gemma") else self.weight)

    classes = {type(m) for m in model.modules() if type(m).__name__.endswith("RMSNorm")}
    assert classes
    for norm_class in classes:
        monkeypatch.setattr(norm_class, "forward", norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    logprobs: Tensor  # [T] of the sequences in order
    entropies: Tensor  # [T]
    gradients: dict[str, Tensor]


def upstream(sequences: list[TrainSequence]) -> Tensor:
    """What the logprobs are weighted with before backward, [T]."""
    num_scored = sum(s.num_loss_tokens for s in sequences)
    return torch.linspace(-1.0, 2.0, num_scored, dtype=torch.float64)


def naive(model: PreTrainedModel, sequences: list[TrainSequence]) -> Scores:
    both = [naive_logprobs(model, s, TEMPERATURE) for s in sequences]
    logprobs, entropies = (torch.cat([pair[i] for pair in both]) for i in (0, 1))
    (logprobs * upstream(sequences).to(logprobs.dtype)).sum().backward()
    return Scores(logprobs=logprobs.detach(), entropies=entropies.detach(), gradients=gradients(model))


def fast(policy: Policy, sequences: list[TrainSequence], layout: Layout) -> Scores:
    policy.traits = replace(policy.traits, layout=layout)
    row = collate(sequences, share_prompts=policy.shares_prompts)
    logprobs, entropies = policy.logprobs(row, temperature=TEMPERATURE)
    (logprobs * upstream(sequences).to(logprobs.dtype)).sum().backward()
    return Scores(logprobs=logprobs.detach(), entropies=entropies.detach(), gradients=gradients(policy.model))


def differences(actual: Scores, expected: Scores) -> tuple[float, float]:
    """Largest difference of a logprob or entropy, and largest relative error of a parameter's gradient."""
    assert actual.gradients.keys() == expected.gradients.keys()
    values = [(actual.logprobs - expected.logprobs).abs().max(), (actual.entropies - expected.entropies).abs().max()]
    whole = max(g.norm().item() for g in expected.gradients.values())
    errors = [
        # a key's bias has no gradient but rounding: softmax does not see it
        (actual.gradients[name] - g).norm().item() / max(g.norm().item(), 1e-3 * whole)
        for name, g in expected.gradients.items()
    ]
    return max(values).item(), max(errors)


@pytest.mark.parametrize(
    "kind", mostly_slow(MODELS, "qwen3", "gemma2_capped", "gpt_oss", reason="three families show it")
)
def test_float64(kind: str, monkeypatch: pytest.MonkeyPatch):
    model = make_law_model(kind)
    compute_in_float64(model, monkeypatch)
    model.train()
    sequences = random_sequences(GROUPS)
    expected = naive(model, sequences)
    policy = make_law_policy(model)
    assert (policy.layout, policy.traits.reason) == ("shared", None)
    # the router of Mixtral rounds its scores to float32
    assert_layouts_are_naive(policy, sequences, expected, most=1e-6 if kind == "mixtral" else 1e-10)


def assert_layouts_are_naive(policy: Policy, sequences: list[TrainSequence], expected: Scores, *, most: float) -> None:
    """In every layout, and with layers that are computed again in backward; `most`: the error of gradients."""
    for layout in LAYOUTS:
        value, gradient = differences(fast(policy, sequences, layout), expected)
        assert value < 1e-10 and gradient < most, layout
    enable_gradient_checkpointing(policy.model)
    value, gradient = differences(fast(policy, sequences, "shared"), expected)
    assert value < 1e-10 and gradient < most, "checkpointing"


@pytest.mark.parametrize("kind", mostly_slow(MODELS, "qwen3", reason="test_float64 has three families"))
def test_float32(kind: str):
    model = make_law_model(kind, dtype=torch.float32)
    sequences = random_sequences(GROUPS)
    expected = naive(model, sequences)
    for layout in LAYOUTS:
        assert max(differences(fast(make_law_policy(model), sequences, layout), expected)) < 1e-5, layout


@examples(15)
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=4)), min_size=1, max_size=3
    ),
    seed=st.integers(0, 9),
    twins=st.booleans(),
)
def test_lengths_that_are_drawn(groups: Groups, seed: int, twins: bool):
    """In any order, and with completions that are the same token by token."""
    sequences = random_sequences(groups, seed=seed)
    if twins:
        count = len(sequences)
        sequences += [replace(s, index=count + n, trajectory=count + n) for n, s in enumerate(sequences[:2])]
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(seed)).tolist()
    sequences = [sequences[n] for n in order]
    with pytest.MonkeyPatch.context() as monkeypatch:
        model = make_law_model("qwen3")
        compute_in_float64(model, monkeypatch)
        expected = naive(model, sequences)
        policy = make_law_policy(model)
        for layout in LAYOUTS:
            value, gradient = differences(fast(policy, sequences, layout), expected)
            assert value < 1e-10 and gradient < 1e-10


@pytest.mark.parametrize(
    ("kind", "overrides", "longest", "reason"),
    [
        ("llama", {"attention_dropout": 0.1, "dropout": True}, LONGEST, "it has dropout"),
        ("llama", {"rope_parameters": DYNAMIC}, None, "its dynamic RoPE takes other frequencies"),
    ],
)
def test_what_packed_rows_cannot_do_is_padded_for_a_stated_reason(
    kind: str,
    overrides: dict[str, Any],
    longest: int | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
):
    dropout = overrides.get("dropout", False)
    model = make_law_model(kind, **{key: value for key, value in overrides.items() if key != "dropout"})
    own = model.config._attn_implementation
    model.eval()  # training would draw the dropout
    compute_in_float64(model, monkeypatch)
    sequences = random_sequences(GROUPS)
    expected = naive(model, sequences)
    policy = make_law_policy(model, longest=longest, dropout=dropout)
    assert policy.layout == "padded" and not policy.shares_prompts
    assert policy.traits.reason is not None and policy.traits.reason.startswith(reason)
    assert model.config._attn_implementation == own
    value, gradient = differences(fast(policy, sequences, "padded"), expected)
    assert value < 1e-10 and gradient < 1e-10


@pytest.mark.parametrize("window", mostly_slow([1, 2, 7, 12, 30], 1, 7, 30, reason="the smallest and the widest"))
def test_windows_at_every_end_of_a_prompt(window: int, monkeypatch: pytest.MonkeyPatch):
    """Negative control: the same weights with a window of one more token."""
    sequences = random_sequences([(n, [11, 3]) for n in range(1, 10)])
    models = [make_law_model("mistral", sliding_window=size) for size in (window, window + 1)]
    compute_in_float64(models[0], monkeypatch)
    expected, other = (naive(model, sequences) for model in models)
    for path in (lambda policy: fast(policy, sequences, "shared"), lambda policy: streamed(policy, sequences)):
        models[0].zero_grad()
        actual = path(make_law_policy(models[0], longest=None))
        assert max(differences(actual, expected)) < 1e-10
        assert (max(differences(actual, other)) > 1e-3) == (window < 20)


def test_what_does_not_reach_attention_is_found(monkeypatch: pytest.MonkeyPatch):
    """Though the probe is too short for a window, and its scores may be too small for a softcap.

    A window that no sequence of the run leaves does not matter.
    """
    right = interface.make_spec
    monkeypatch.setattr(interface, "make_spec", lambda *args, **kwargs: replace(right(*args, **kwargs), window=None))
    policy = make_law_policy(make_law_model("mistral", sliding_window=20), longest=None)
    assert policy.layout == "padded"
    assert policy.traits.reason == "a packed row has a window of None tokens in layer 0, not of 20"
    assert make_law_policy(make_law_model("mistral", sliding_window=20), longest=20).shares_prompts
    monkeypatch.setattr(interface, "make_spec", lambda *args, **kwargs: replace(right(*args, **kwargs), softcap=None))
    capped = make_law_policy(make_law_model("gemma2", attn_logit_softcapping=1e6), longest=None)
    assert capped.traits.reason == "a packed row has a softcap of None in layer 0, not of 1000000.0"


@pytest.mark.parametrize("sabotage", ["plain_causal", "unrestarted_positions", "detached_prompt", "wrong_root"])
def test_what_goes_wrong_is_seen(sabotage: str, monkeypatch: pytest.MonkeyPatch):
    """Negative controls: the comparison fails, and by far."""
    model = make_law_model("llama")
    compute_in_float64(model, monkeypatch)
    sequences = random_sequences(GROUPS)
    expected = naive(model, sequences)
    policy = make_law_policy(model)
    assert max(differences(fast(policy, sequences, "shared"), expected)) < 1e-10
    SABOTAGES[sabotage](monkeypatch)
    value, gradient = differences(fast(policy, sequences, "shared"), expected)
    assert gradient > 0.05 and (value > 0.05 or sabotage == "detached_prompt")


def plain_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole row as one sequence."""
    monkeypatch.setattr(
        "cohort.packing.micro_batches.build_attention_metadata",
        lambda lengths, *_, **__: build_attention_metadata([sum(lengths)], [NO_PARENT]),
    )


def unrestarted_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions in the row in place of those in each sequence."""
    right = collate

    def counted(*args: Any, **kwargs: Any) -> Any:
        micro_batch = right(*args, **kwargs)
        return replace(micro_batch, position_ids=torch.arange(len(micro_batch.input_ids)))

    monkeypatch.setattr(sys.modules[__name__], "collate", counted)


def detached_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches send no gradient into the keys and values of their root."""
    backward = cascade._DenseKernel.backward

    def cut(*args: Any) -> tuple[Tensor, ...]:
        grad_query, grad_key, grad_value = backward(*args)
        return grad_query, grad_key * args[-1].causal, grad_value * args[-1].causal

    monkeypatch.setattr(cascade._DenseKernel, "backward", cut)


def wrong_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Roots that are taken together go to each other's branches."""
    of_roots = cascade._prefix_keys
    monkeypatch.setattr(cascade, "_prefix_keys", lambda *args: of_roots(*args).flip(0))


SABOTAGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    f.__name__: f for f in (plain_causal, unrestarted_positions, detached_prompt, wrong_root)
}


def streamed(policy: Policy, sequences: list[TrainSequence]) -> Scores:
    """Each prompt first, and its completions by twos from its keys and values."""
    policy.traits = replace(policy.traits, layout="shared")
    weights, logprobs, entropies = upstream(sequences), [], []
    for _, group in groupby(sequences, key=lambda sequence: sequence.group):
        members = list(group)
        prompt = policy.forward_prefix(collate_prompt(members[0].token_ids[: members[0].shared_prefix_tokens]))
        for part in (members[n : n + 2] for n in range(0, len(members), 2)):
            branch = prompt.detach()
            scores = policy.logprobs(collate_part(part), temperature=TEMPERATURE, prefix=branch)
            mine, weights = weights[: len(scores[0])], weights[len(scores[0]) :]
            (scores[0] * mine.to(scores[0].dtype)).sum().backward()
            prompt.add(branch)
            logprobs.append(scores[0].detach())
            entropies.append(scores[1].detach())
        prompt.backward()
    return Scores(logprobs=torch.cat(logprobs), entropies=torch.cat(entropies), gradients=gradients(policy.model))


def squared_errors(actual: Scores, expected: Scores) -> Tensor:
    """Of the logprobs, and of all gradients relative to the whole gradient, [2]."""
    grads = [(actual.gradients[name] - g).square().sum() for name, g in expected.gradients.items()]
    whole = sum(g.square().sum() for g in expected.gradients.values())
    return torch.stack([(actual.logprobs - expected.logprobs).square().mean(), sum(grads) / whole])


@slow("eight families and seeds; float64 is compared")
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32], ids=["bfloat16", "autocast"])
def test_bfloat16_is_as_exact_as_the_naive_path(weights: torch.dtype):
    """The error against float64 is no larger, as the root of its mean square over models, seeds and parameters.

    Not in every draw: rounding is noise, and the ratio of two draws of it varies by a fifth.
    """
    errors: dict[str, Tensor] = defaultdict(lambda: torch.zeros(2, dtype=torch.float64))
    for kind, seed in product(("qwen2", "qwen3", "llama"), range(3)):
        exact_model = make_law_model(kind, seed=seed, tie_word_embeddings=False)
        model = make_law_model(kind, seed=seed, tie_word_embeddings=False, dtype=weights)
        with torch.no_grad():
            for mine, exact in zip(model.parameters(), exact_model.parameters(), strict=True):
                exact.copy_(mine)
        sequences = random_sequences(FEW, seed=seed)
        expected = naive(exact_model, sequences)
        with torch.autocast("cpu", torch.bfloat16, enabled=weights != torch.bfloat16):
            errors["naive"] += squared_errors(naive(model, sequences), expected)
        policy = make_law_policy(model, compute_dtype=torch.bfloat16)
        assert policy.shares_prompts
        for layout in LAYOUTS:
            errors[layout] += squared_errors(fast(policy, sequences, layout), expected)
        errors["streamed"] += squared_errors(streamed(policy, sequences), expected)
    for path in (*LAYOUTS, "streamed"):
        ratio = (errors[path] / errors["naive"]).sqrt()
        assert ratio.min() > 0 and ratio.max() <= 1, (path, ratio)
