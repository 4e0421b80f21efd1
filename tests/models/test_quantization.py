"""Adapters on quantized weights, on the CPU for real: laws 1 and 2, what is frozen, what is kept, files, and memory."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_blockwise, has_avx512bf16, quantize_4bit
from bitsandbytes.nn import Linear4bit, Params4bit
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

from cohort.config import AdapterConfig, ModelConfig
from cohort.models import LoadRequest, Policy, load_policy
from cohort.models.quantization import QuantizedLinear, dequantize, is_quantized, loading_options, storage_tensors
from cohort.packing import collate
from cohort.plan.shape import read_shape
from cohort.plan.state_memory import model_bytes
from test_law_two import LAYOUTS, differences, fast, naive
from tiny import make_tokenizer, random_sequences, relative_error, save_model_folder

CPU = torch.device("cpu")
KINDS = ("nf4", "int8", "fp8")
GROUPS = [(5, [7, 1, 3]), (1, [1, 4]), (9, [12])]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """With biases that are not 0, and rows of one and a half blocks of 64."""
    path = tmp_path_factory.mktemp("model") / "base"
    return save_model_folder(path, "qwen2", hidden_size=96, intermediate_size=192, num_attention_heads=4)


@pytest.fixture(scope="module")
def blocks(tmp_path_factory) -> Path:
    """With rows of whole blocks of 64, as bitsandbytes' own layers need them on some CPUs."""
    path = tmp_path_factory.mktemp("model") / "blocks"
    return save_model_folder(path, "qwen2", hidden_size=64, intermediate_size=128, num_attention_heads=4)


def load(base: Path, kind: str | None, *, dtype: str = "float32", adapter: bool = True) -> Policy:
    config = ModelConfig(path=str(base), dtype=dtype, adapter=AdapterConfig(rank=4), quantization=kind)
    if not adapter:
        config = config.model_copy(update={"adapter": None})
    policy = load_policy(LoadRequest(config, device=CPU, tokenizer=make_tokenizer(), trainable=adapter))
    generator = torch.Generator().manual_seed(0)
    if policy.adapter is not None:
        with torch.no_grad():
            for tensor in policy.adapter.tensors().values():
                tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))
    return policy


def frozen(policy: Policy) -> str:
    """A hash of every frozen bit: codes, scales, tables, biases, norms and the embedding."""
    digest = hashlib.sha256()
    for _, parameter in sorted(policy.model.named_parameters()):
        if not parameter.requires_grad:
            for part in storage_tensors(parameter):
                digest.update(part.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def plain_copy(base: Path, quantized: Policy) -> Policy:
    """The model with the numbers that the quantized weights stand for, and the same adapter."""
    plain = load(base, None)
    layers = dict(plain.model.named_modules())
    for name, module in quantized.model.named_modules():
        if isinstance(module, QuantizedLinear):
            layers[name].weight.data.copy_(dequantize(module.weight, torch.float32))
    return plain


# Laws 1 and 2


@pytest.mark.parametrize("kind", KINDS)
def test_fast_equals_naive_equals_linear_layers(base: Path, kind: str):
    """Values and every gradient of the adapter, in each layout; and those of ordinary layers with the same numbers."""
    policy, sequences = load(base, kind), random_sequences(GROUPS)
    assert (policy.layout, policy.has_plain_head) == ("shared", True)
    expected = naive(policy.model, sequences)
    assert expected.gradients and all("lora_" in name for name in expected.gradients)
    assert max(differences(naive(plain_copy(base, policy).model, sequences), expected)) < 1e-5
    for layout in LAYOUTS:
        assert max(differences(fast(policy, sequences, layout), expected)) < 1e-5


def test_a_weight_that_is_off_is_seen(base: Path):
    """The negative control of the test above."""
    policy, sequences = load(base, "int8"), random_sequences(GROUPS)
    plain = plain_copy(base, policy)
    plain.model.model.layers[0].self_attn.q_proj.base_layer.weight.data.mul_(1.01)
    assert max(differences(naive(plain.model, sequences), naive(policy.model, sequences))) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_does_not_depend_on_how_the_batch_is_split(base: Path, kind: str):
    policy, sequences = load(base, kind), random_sequences(GROUPS)

    def summed(parts: list[Any]) -> torch.Tensor:
        for part in parts:
            policy.logprobs(collate(part, share_prompts=True), temperature=0.7)[0].sum().backward()
        tensors = [p for p in policy.model.parameters() if p.requires_grad]
        gradient = torch.cat([p.grad.flatten() for p in tensors if p.grad is not None])
        policy.model.zero_grad(set_to_none=True)
        return gradient

    whole_batch, one_by_one = summed([sequences]), summed([[sequence] for sequence in sequences])
    assert 0 < relative_error(one_by_one, whole_batch) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 128), (96, 96), (7, 48), (5, 144), (32, 208), (10, 66), (1, 128)])
def test_nf4_is_its_table_times_its_scales(shape: tuple[int, int], dtype: torch.dtype):
    """Rows that are whole blocks of 64 and rows that are not; kernels for AVX-512 got the latter wrong by 25 %."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes, state = quantize_4bit(weight.to(dtype), quant_type="nf4", compress_statistics=True)
    scales = dequantize_blockwise(state.absmax, state.state2) + state.offset
    numbers = torch.stack([codes.flatten() >> 4, codes.flatten() & 15], 1).flatten()[: weight.numel()].long()
    expected = (state.code[numbers] * scales.repeat_interleave(64)[: weight.numel()]).view(shape)
    assert (expected - weight).norm() < 0.15 * weight.norm()
    layer = nn.Linear(shape[1], shape[0], bias=False).requires_grad_(False)
    layer.weight = Params4bit(codes, requires_grad=False, quant_state=state, quant_type="nf4", bnb_quantized=True)
    x = torch.randn(2, shape[1], dtype=dtype).requires_grad_()
    quantized = QuantizedLinear(layer, dtype)
    torch.testing.assert_close(dequantize(quantized.weight, torch.float32), expected, rtol=0.01, atol=0)
    out = quantized(x)
    torch.testing.assert_close(
        out.float(), x.float() @ expected.T, rtol=0.02, atol=0.05 if dtype != torch.float32 else 1e-5
    )
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient.float(), expected.sum(0).expand(2, -1), rtol=0.05, atol=0.05)


# What is frozen, and what is kept


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_and_frozen_stays_frozen_bit_for_bit(base: Path, kind: str, dtype: str):
    policy, (sequence,) = load(base, kind, dtype=dtype), random_sequences([(4, [6])])
    batch = collate([sequence], share_prompts=True)
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    optimizer, before = torch.optim.Adam(trained, lr=1e-2), frozen(policy)
    values = []
    for _ in range(8):
        logprobs = policy.logprobs(batch, temperature=1.0)[0]
        (-logprobs.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(logprobs.sum().item())
        policy.model.eval()  # as sampling does
        with torch.no_grad():
            policy.logprobs(batch, temperature=1.0)
        policy.model.train()
    assert values[-1] > values[0] + 2
    assert frozen(policy) == before
    weight = next(p for p in policy.model.parameters() if is_quantized(p))
    storage_tensors(weight)[0].view(torch.uint8)[0, 0] ^= 1  # the hash sees one bit
    assert frozen(policy) != before


@pytest.mark.parametrize("kind", KINDS)
def test_with_the_adapter_off_the_policy_is_the_quantized_base_bit_for_bit(base: Path, kind: str):
    batch = collate(random_sequences(GROUPS), share_prompts=True)
    policy, alone = load(base, kind), load(base, kind, adapter=False)
    with torch.no_grad():
        expected, off = (p.logprobs(batch, temperature=1.0)[0] for p in (alone, policy.as_reference()))
        on, unquantized = (p.logprobs(batch, temperature=1.0)[0] for p in (policy, load(base, None, adapter=False)))
    assert torch.equal(off, expected)
    assert not torch.equal(on, expected) and not torch.equal(unquantized, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_weight_is_kept_for_backward(base: Path, kind: str):
    layer = load(base, kind, adapter=False).model.model.layers[0].mlp.up_proj
    x = torch.randn(3, layer.in_features, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x).sum().backward()
        assert kept == []
        torch.testing.assert_close(x.grad, dequantize(layer.weight, torch.float32).sum(0).expand(3, -1))
        if kind != "nf4":  # which is why the layer is ours
            nn.functional.linear(x, layer.weight)
            assert max(t.numel() for t in kept) == layer.in_features * layer.out_features


# Memory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_allocated_is_what_is_planned(base: Path, kind: str, dtype: str):
    policy, shape = load(base, kind, dtype=dtype, adapter=False), read_shape(str(base))
    parts = {part.data_ptr(): part.nbytes for p in policy.model.parameters() for part in storage_tensors(p)}
    planned = model_bytes(shape, kind, getattr(torch, dtype).itemsize)
    assert sum(parts.values()) == pytest.approx(planned, rel=0.05)
    layers = [m for m in policy.model.modules() if isinstance(m, QuantizedLinear)]
    assert len(layers) == 7 * shape.layers
    assert {m.weight.device for m in layers} == {CPU}
    assert type(policy.model.get_output_embeddings()) is nn.Linear
    (note,) = policy.notes()
    assert note.startswith(f"{sum(m.in_features * m.out_features for m in layers) / 1e6:.4g} million weights of 14")


# Files


def load_with_transformers(base: Path, kind: str) -> Any:
    """The model with the library's own quantized layers."""
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **loading_options(kind, CPU, torch.float32))


def logits_of_both(policy: Policy, library: Any, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the library's model with the policy's adapter, and of the policy."""
    assert policy.adapter is not None
    policy.adapter.save(folder, policy.adapter.full_weights())
    wrapped = PeftModel.from_pretrained(library, str(folder)).base_model.model.eval()
    with torch.no_grad():
        ids = torch.arange(2, 30).unsqueeze(0)
        expected, actual = (model(input_ids=ids, use_cache=False).logits for model in (wrapped, policy.model.eval()))
    return expected, actual


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_what_is_saved_on_the_librarys_quantized_model(base: Path, blocks: Path, tmp_path: Path, kind: str):
    base = blocks if kind == "nf4" else base
    library = load_with_transformers(base, kind)
    for module in library.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False  # else codes are packed anew: the next test
    expected, actual = logits_of_both(load(base, kind), library, tmp_path)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path))
    assert torch.isfinite(plain(input_ids=torch.arange(2, 30).unsqueeze(0)).logits).all()


@pytest.mark.skipif(
    not has_avx512bf16(), reason="bitsandbytes packs codes anew on CPUs with avx512_bf16, and this has none"
)
def test_ours_agrees_with_codes_packed_for_avx512_bf16(blocks: Path, tmp_path: Path):
    """There the library evaluates in bfloat16, whatever the compute dtype."""
    expected, actual = logits_of_both(load(blocks, "nf4"), load_with_transformers(blocks, "nf4"), tmp_path)
    assert 0 < relative_error(actual, expected) < 0.02
