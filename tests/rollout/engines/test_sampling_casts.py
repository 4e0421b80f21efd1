"""The local engine casts a weight once per call, trained or frozen, and leaves frozen weights frozen."""

import gc
import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import test_plan_memory
from cohort.config import AdapterConfig, ModelConfig
from cohort.models import LoadRequest, Policy, load_policy, packed_weights
from cohort.models.quantization import is_quantized
from cohort.packing import collate
from cohort.plan import defaults, memory
from cohort.plan.memory import plan_memory
from cohort.plan.shape import read_shape
from cohort.plan.state_memory import dequantized_bytes
from cohort.rollout import SampledCompletion, Sampler, SampleRequest, SamplingParams
from cohort.rollout.engines.base import CallKey
from cohort.rollout.engines.local.decoders import SharedPromptDecoder
from engines import PACKS_BFLOAT16
from live_bytes import LiveBytes
from selection import mostly_slow
from tiny import VOCAB_SIZE, make_tokenizer, random_sequences, save_model_folder

TOKENS = 20
SIZES = {"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[bool, Path]:
    """Model folders, by whether the head is tied to the embedding."""
    folder = tmp_path_factory.mktemp("models")
    return {tie: save_model_folder(folder / str(tie), "qwen2", tie=tie, **SIZES) for tie in (True, False)}


def load(base: Path, *, adapter: bool = True, **keys: str | None) -> Policy:
    """Weights in float32 that compute in bfloat16; with an adapter of random weights, or all frozen."""
    config = ModelConfig(
        path=str(base), compute_dtype="bfloat16", adapter=AdapterConfig(rank=2) if adapter else None, **keys
    )
    device = torch.device("cpu")
    policy = load_policy(LoadRequest(config, device=device, tokenizer=make_tokenizer(), trainable=adapter))
    if policy.adapter is not None:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for tensor in policy.adapter.tensors().values():
                tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))
    return policy


def sample(policy: Policy) -> list[SampledCompletion]:
    """Three completions of 20 tokens."""
    keys = [CallKey(purpose="train", seed=0, step=0, epoch=0, prompt_id=0, index=n) for n in range(3)]
    request = SampleRequest(
        token_ids=np.arange(2, 9),
        sampling=SamplingParams(num_generations=3, max_completion_tokens=TOKENS, temperature=1.0),
        keys=tuple(keys),
    )
    return Sampler(policy, end_token_ids=frozenset({VOCAB_SIZE}), max_num_seqs=8).sample([request])


def sample_by_autocast_alone(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> list[SampledCompletion]:
    """The same, but autocast does not keep its copies of frozen weights."""

    @contextmanager
    def sampling(policy: Policy) -> Iterator[None]:
        with torch.no_grad(), policy.autocast():
            yield

    with monkeypatch.context() as patch:
        patch.setattr(Policy, "sampling", sampling)
        return sample(policy)


def assert_equal(some: list[SampledCompletion], others: list[SampledCompletion]) -> None:
    """Bit for bit."""
    assert len(some) == len(others) == 3
    for one, other in zip(some, others, strict=True):
        assert len(one.token_ids) == TOKENS
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.sampling_logprobs, other.sampling_logprobs)


def trained(policy: Policy) -> set[str]:
    return {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}


class Casts(TorchDispatchMode):
    """Counts casts to bfloat16, by the storage that they read."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[int] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16:
            self.of[args[0].untyped_storage().data_ptr()] += 1
        return function(*args, **(kwargs or {}))

    def of_frozen(self, policy: Policy) -> dict[str, int]:
        """Casts of each frozen weight, without adapters, biases and norms."""
        named = ((n, p) for n, p in policy.model.named_parameters() if p.ndim == 2 and "lora_" not in n)
        return {name: self.of[p.untyped_storage().data_ptr()] for name, p in named}


@pytest.mark.parametrize(
    ("tie", "adapter"),
    mostly_slow([*itertools.product((True, False), (True, False))], (True, True), (False, False), reason="each once"),
)
def test_a_frozen_weight_is_cast_once(bases: dict[bool, Path], tie: bool, adapter: bool, monkeypatch):
    policy = load(bases[tie], adapter=adapter)
    assert policy.shares_prompts and policy.has_plain_head
    with Casts() as casts:
        completions = sample(policy)
    with Casts() as repeated:
        expected = sample_by_autocast_alone(policy, monkeypatch)
    assert_equal(completions, expected)
    # the prompt, and all tokens but the last
    counts = dict.fromkeys(casts.of_frozen(policy), TOKENS)
    if not tie:
        counts["model.embed_tokens.weight"] = 0
    assert len(counts) == 15 + (not tie)
    assert repeated.of_frozen(policy) == counts
    assert casts.of_frozen(policy) == {name: min(1, count) for name, count in counts.items()}


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_copies_are_what_the_plan_counts_and_are_gone_afterwards(bases: dict[bool, Path], quantization: str | None):
    """Beside an adapter's own, and a quantized matrix that is there only while it is multiplied."""
    policy = load(bases[True], quantization=quantization)
    with LiveBytes() as live:
        with policy.sampling():
            decoder = SharedPromptDecoder(policy, limit=4)
            decoder.start([np.arange(2, 9)], [3])
            del decoder
            gc.collect()
            copies = live.now
        gc.collect()
        assert live.now == 0
    shape, sampled = read_shape(bases[True]), {"sampled_sequences": 1, "sampled_tokens": 1}
    workload = test_plan_memory.workload(shape, processes=1, quantization=quantization, **sampled)
    planned = plan_memory(workload).phases["sampling"]["gathered weights"]
    if quantization is not None:
        planned -= dequantized_bytes(shape, quantization, 2)
    adapter = sum(tensor.numel() for tensor in policy.adapter.tensors().values())
    assert 0.99 * planned < copies < planned + 2 * adapter


@PACKS_BFLOAT16
@pytest.mark.parametrize("keys", [{}, {"dtype": "bfloat16"}])
def test_packed_copies_are_what_the_plan_counts(bases: dict[bool, Path], keys: dict[str, str], monkeypatch):
    for module in (defaults, memory):
        monkeypatch.setattr(module, "PACKED_WEIGHTS_BYTES", 0)
    monkeypatch.setattr(packed_weights, "_LEAST_NUMEL", 0)
    monkeypatch.setattr(packed_weights.PackedLayers, "are_faster", lambda self: True)
    packed: list[int] = []
    pack = packed_weights.PackedWeight.__init__

    def counted(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        packed.append(weight.numel() * dtype.itemsize)
        pack(self, weight, bias, dtype)

    monkeypatch.setattr(packed_weights.PackedWeight, "__init__", counted)
    policy = load(bases[True], adapter=False, **keys)
    with policy.sampling():
        policy.pack_weights()
    shape, sampled = read_shape(bases[True]), {"sampled_sequences": 1, "sampled_tokens": 1}
    weight_bytes = 2 if keys else 4
    workload = test_plan_memory.workload(shape, processes=1, weight_bytes=weight_bytes, on_gpu=False, **sampled)
    layers, head = sum(packed[:-1]), packed[-1]
    beside = layers if keys else 0  # autocast's copies of the layers are gone
    assert plan_memory(workload).phases["sampling"]["packed weights"] == beside + head


@pytest.mark.parametrize("quantization", [None, "nf4", "int8", "fp8"])
def test_frozen_stays_frozen(bases: dict[bool, Path], quantization: str | None, monkeypatch: pytest.MonkeyPatch):
    policy = load(bases[True], quantization=quantization)
    expected = sample_by_autocast_alone(policy, monkeypatch)
    before, head = trained(policy), policy._head
    bits = {n: p.clone() for n, p in policy.model.named_parameters() if n not in before and not is_quantized(p)}
    assert before and bits and all("lora_" in name for name in before)
    assert_equal(sample(policy), expected)

    def fails(decoder: SharedPromptDecoder, tokens: torch.Tensor) -> torch.Tensor:
        assert len(trained(policy)) > len(before) and policy._head is not head
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SharedPromptDecoder, "step", fails)
        sample(policy)
    assert trained(policy) == before and policy._head is head
    policy.logprobs(collate(random_sequences([(4, [6])]), share_prompts=True), temperature=1.0)[0].sum().backward()
    parameters = dict(policy.model.named_parameters())
    assert {name for name, parameter in parameters.items() if parameter.grad is not None} == before
    assert all(torch.equal(parameters[name], value) for name, value in bits.items())


def test_weights_that_are_not_cast_are_left_alone(bases: dict[bool, Path]):
    policy = load(bases[True], dtype="bfloat16")
    before = trained(policy)
    with policy.sampling(), LiveBytes() as live:
        assert trained(policy) == before
        SharedPromptDecoder(policy, limit=4).start([np.arange(2, 9)], [3])
        gc.collect()
    assert live.now == 0
