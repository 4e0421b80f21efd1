"""Attention over segments, in every backend, against one dense mask."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from attending import (
    GROUPS,
    LENGTHS,
    PLAIN,
    UNEVEN,
    Groups,
    flash,
    flash_backward,
    make_inputs,
    reference,
    run,
    segments_of,
    worst_error,
)
from cohort.models import Policy
from cohort.models.activation_checkpointing import _selective_contexts
from cohort.models.attention import KVCache, PackedAttention, cascade, interface, varlen
from cohort.packing import collate, collate_part, collate_prompt
from selection import examples, slow
from tiny import gradients, make_gemma2, make_model, policy_of, random_sequences, relative_error


@pytest.fixture
def varlen_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "_flash", flash)
    monkeypatch.setattr(varlen, "_flash_backward", flash_backward)


@examples(30)
@given(groups=GROUPS, prefix=st.none() | st.tuples(LENGTHS, st.lists(LENGTHS, min_size=1, max_size=4)))
@pytest.mark.parametrize("value_dim", [8, 6])  # the fused kernel, and matrix products
def test_cascade_is_dense_attention(value_dim: int, groups: Groups, prefix: tuple[int, list[int]] | None):
    assert worst_error(cascade.cascade, segments_of(groups, prefix), value_dim=value_dim) < 1e-12


def test_cascade_in_float32():
    assert worst_error(cascade.cascade, segments_of(UNEVEN, (9, [70, 1])), dtype=torch.float32) < 1e-5


def test_16_bits_are_rounded_once():
    """Outputs and gradients are as far from float64 as rounding float64's to bfloat16 is, or little more.

    Where every part is rounded before it is merged, it is 1.35 times as far in outputs, and further in gradients. What
    is more here is that backward knows the outputs to bfloat16 only.
    """
    attn_metadata = segments_of(UNEVEN, (9, [70, 1]))
    x = {name: t.detach().bfloat16().requires_grad_() for name, t in make_inputs(attn_metadata).items()}
    exact_x = {name: t.detach().double().requires_grad_() for name, t in x.items()}
    upstream = torch.randn(attn_metadata.num_tokens, 6, 8).bfloat16()
    out, exact_out = run(cascade.cascade, x, attn_metadata), reference(exact_x, attn_metadata)
    results = [out, *torch.autograd.grad(out, list(x.values()), upstream)]
    exact = [exact_out, *torch.autograd.grad(exact_out, list(exact_x.values()), upstream.double())]
    for mine, right in zip(results, exact, strict=True):
        assert mine.dtype == torch.bfloat16
        assert relative_error(mine, right) < 1.3 * relative_error(right.bfloat16(), right)


@pytest.mark.parametrize("prefix", [None, (9, [70, 1, 4])])
def test_varlen_is_dense_attention(varlen_kernel: None, prefix):
    assert worst_error(varlen.varlen, segments_of(UNEVEN, prefix)) < 1e-12
    assert worst_error(varlen.varlen, segments_of([(9, [7, 2])], prefix)) < 1e-12  # slices of the row
    assert worst_error(varlen.varlen, segments_of([(5, []), (70, [])], prefix)) < 1e-12  # sequences without branches


SINKS = torch.linspace(-1.0, 2.0, 6, dtype=torch.float64).requires_grad_()
# Several sequences and a cached prefix: in one padded block, one by one, and both.
ROWS = [
    segments_of([(5, [3, 1, 7]), (1, [2])], (4, [6, 2])),
    segments_of([(70, [3, 80])]),
    segments_of(UNEVEN, (9, [70, 1])),
]
KERNELS = {"cascade": (cascade.cascade, 8), "products": (cascade.cascade, 6), "varlen": (varlen.varlen, 8)}


@pytest.mark.parametrize("attn_metadata", [*ROWS[:-1], pytest.param(ROWS[-1], marks=slow("rows of fewer segments"))])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("limit", ["window", "chunk"])
def test_windows_and_chunks_are_dense_attention(varlen_kernel: None, kernel: str, limit: str, attn_metadata):
    """From one token to more than there are. Negative control: another window is seen."""
    backend, value_dim = KERNELS[kernel]
    for size in (1, 2, 3, 5, 8, 64, 69, 71, 150, 999):
        spec = replace(PLAIN, **{limit: size})
        assert worst_error(backend, attn_metadata, spec, value_dim=value_dim) < 1e-12
        if size < attn_metadata.max_context_tokens:
            other = replace(PLAIN, **{limit: size + 1})
            assert worst_error(backend, attn_metadata, spec, expected_spec=other, value_dim=value_dim) > 1e-3


@pytest.mark.parametrize("kernel", ["cascade", "varlen"])
def test_every_offset_of_the_end_of_the_prompt(varlen_kernel: None, kernel: str):
    backend, _ = KERNELS[kernel]
    for prompt_tokens in range(1, 14):
        attn_metadata = segments_of([(prompt_tokens, [9, 1, 4])], (prompt_tokens, [7, 2]))
        for spec in (replace(PLAIN, window=6), replace(PLAIN, chunk=6), replace(PLAIN, window=4, chunk=6)):
            assert worst_error(backend, attn_metadata, spec) < 1e-12


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kernel", KERNELS)
def test_sinks_and_softcaps_are_dense_attention(varlen_kernel: None, kernel: str, window: int | None):
    """Gradients of the sinks too. Negative controls: sinks that are a little different, another softcap, and none."""
    backend, value_dim = KERNELS[kernel]
    spec = replace(PLAIN, sinks=SINKS, window=window)
    moved = replace(spec, sinks=(SINKS + 0.01).detach().requires_grad_())
    capped = replace(spec, softcap=0.5)
    for attn_metadata in ROWS:
        assert worst_error(backend, attn_metadata, spec, value_dim=value_dim) < 1e-12
        if kernel == "cascade":
            assert worst_error(backend, attn_metadata, capped) < 1e-12
            assert worst_error(backend, attn_metadata, capped, expected_spec=spec) > 1e-2
            assert worst_error(backend, attn_metadata, capped, expected_spec=replace(capped, softcap=0.51)) > 1e-4
        outputs = run(backend, make_inputs(attn_metadata), attn_metadata, spec)
        assert (outputs - reference(make_inputs(attn_metadata), attn_metadata, moved)).abs().max() > 1e-4


@pytest.mark.parametrize("spec", [replace(PLAIN, softcap=0.5), replace(PLAIN, window=100), PLAIN])
@pytest.mark.parametrize("value_dim", [8, 6])
def test_long_segments_in_tiles(monkeypatch: pytest.MonkeyPatch, spec: cascade.AttentionSpec, value_dim: int):
    monkeypatch.setattr(cascade, "_TILE_SCORES", 1)
    attn_metadata = segments_of([(150, [130, 3])], (80, [140, 7]))
    assert worst_error(cascade.cascade, attn_metadata, spec, value_dim=value_dim) < 1e-12


def test_a_kernel_without_windows_is_not_used(varlen_kernel: None, monkeypatch: pytest.MonkeyPatch):
    """A build of PyTorch may have left them out."""
    interface._windows_agree.cache_clear()
    assert interface._windows_agree(torch.device("cpu"), torch.float64, 8)
    monkeypatch.setattr(varlen, "_window", lambda span: {})
    interface._windows_agree.cache_clear()
    with pytest.warns(RuntimeWarning, match="Windows of the FlashAttention kernel do not work here"):
        assert not interface._windows_agree(torch.device("cpu"), torch.float64, 8)
    interface._windows_agree.cache_clear()


@pytest.mark.parametrize("window", [None, 5])
def test_the_fused_kernel_takes_what_it_is_called_with(window: int | None):
    """Its schemas, and its meta kernels, in this version of PyTorch: names, number and shapes."""
    attn_metadata = segments_of(UNEVEN, (9, [70, 1, 4]))
    x = {name: t.detach().bfloat16() for name, t in make_inputs(attn_metadata).items()}
    spec = replace(PLAIN, window=window)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {name: mode.from_tensor(t).requires_grad_() for name, t in x.items()}
        out = run(varlen.varlen, fake, attn_metadata, spec)
        grads = torch.autograd.grad(out, list(fake.values()), torch.empty_like(out))
    assert [g.shape for g in grads] == [t.shape for t in x.values()]


@pytest.mark.parametrize("backend", [cascade.cascade, varlen.varlen])
def test_what_is_kept_for_backward(varlen_kernel: None, backend):
    """Queries, keys, values, outputs and log-sum-exps: nothing per branch, whatever their number."""
    attn_metadata = segments_of([(200, [20] * 10), (70, [90, 30])], (50, [8, 9]))
    x = make_inputs(attn_metadata)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = run(backend, x, attn_metadata)
    lse_bytes = attn_metadata.num_tokens * 6 * 8
    assert sum(kept.values()) == sum(t.nbytes for t in x.values()) + out.nbytes + lse_bytes


def test_nothing_of_the_size_of_all_pairs_is_made():
    """Nor a root's keys once for each of its branches."""
    attn_metadata = segments_of([(300, [60] * 10)])
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple) else (out,):
                largest = max(largest, tensor.numel()) if isinstance(tensor, Tensor) else largest
            return out

    x = make_inputs(attn_metadata)
    with Largest():
        run(cascade.cascade, x, attn_metadata).sum().backward()
    assert largest == x["query"].numel() < 10 * 300 * 2 * 8


def test_the_same_every_time():
    attn_metadata = segments_of(UNEVEN, (9, [70, 1]))
    x = make_inputs(attn_metadata, dtype=torch.float32)

    def once() -> tuple[Tensor, ...]:
        out = run(cascade.cascade, x, attn_metadata)
        return (out, *torch.autograd.grad(out.square().sum(), list(x.values())))

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


@pytest.mark.parametrize("name", ["cascade", "varlen"])
def test_what_selective_checkpointing_keeps_is_not_written_to(
    varlen_kernel: None, monkeypatch: pytest.MonkeyPatch, name: interface.Backend
):
    """Segments of one length are one block without padding, of which outputs could be merged in place."""
    with torch.library._scoped_library("test_attention", "FRAGMENT") as kernels:
        schema = "(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, int m, int n, bool c) -> (Tensor, Tensor)"
        kernels.define(f"attention{schema}")
        kernels.impl(
            "attention",
            lambda q, k, v, a, b, m, n, c: flash(q, k, v, a, b, m, n, 0.0, c, False, scale=0.3)[:2],
            "CompositeExplicitAutograd",
        )
        check_selective_checkpointing(monkeypatch, {"cascade": cascade.cascade, "varlen": varlen.varlen}[name])


def check_selective_checkpointing(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    def operation(q, k, v, a, b, m, n, dropout, c, debug, **options):
        return torch.ops.test_attention.attention(q, k, v, a, b, m, n, c)

    monkeypatch.setattr(varlen, "_flash", operation)
    attn_metadata = segments_of([(6, [6, 6])])
    x = make_inputs(attn_metadata)
    expected = torch.autograd.grad(run(backend, x, attn_metadata).square().sum(), list(x.values())[:3])

    def layer(*tensors: Tensor) -> Tensor:
        return backend(*tensors, attn_metadata, PLAIN, prefix=None).square().sum()

    used = list(x.values())[:3]
    loss = checkpoint(layer, *used, use_reentrant=False, context_fn=_selective_contexts)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(loss, used), expected, strict=True))


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("_without_padding", lambda block, grad: grad),
        ("_key_padding", lambda span: None),
        ("_merge", lambda where, out, lse, more_out, more_lse: None),
    ],
)
def test_what_goes_wrong_in_the_cascade_is_seen(monkeypatch: pytest.MonkeyPatch, name: str, broken):
    """Negative controls: padded queries in backward, padded keys, and a root that is not looked at."""
    attn_metadata = segments_of([(5, [3, 1, 7]), (9, [2, 4])])
    assert worst_error(cascade.cascade, attn_metadata) < 1e-12
    monkeypatch.setattr(cascade, name, broken)
    assert worst_error(cascade.cascade, attn_metadata) > 1e-3


def test_a_broken_plan_of_varlen_is_seen(varlen_kernel: None):
    """Negative control: branches that see the wrong root."""
    attn_metadata = segments_of([(5, [3, 1]), (5, [2])])
    assert worst_error(varlen.varlen, attn_metadata) < 1e-12
    (block,) = attn_metadata.varlen.prefix
    block.keys.positions[:] = block.keys.positions.roll(5)
    assert worst_error(varlen.varlen, attn_metadata) > 1e-3


def test_a_backward_that_knows_one_part_only_is_seen(varlen_kernel: None, monkeypatch: pytest.MonkeyPatch):
    """Negative control: each part's own outputs and log-sum-exps in backward, as autograd through the kernel has."""
    backward = varlen._flash_backward

    def of_one_part(grad, query, key, value, out, lse, *args, **kwargs):
        own, lse, *_ = flash(query, key, value, *args[:4], 0.0, args[5], False, scale=kwargs["scale"])
        return backward(grad, query, key, value, own, lse, *args, **kwargs)

    monkeypatch.setattr(varlen, "_flash_backward", of_one_part)
    assert worst_error(varlen.varlen, segments_of([(5, []), (70, [])])) < 1e-12
    assert worst_error(varlen.varlen, segments_of([(5, [3, 1])])) > 1e-3


class Layer(torch.nn.Module):
    is_causal = True
    layer_idx = 0


def call_layer(*, captured: KVCache | None = None, **kwargs: Any) -> tuple[Tensor, None]:
    attn_metadata = segments_of([(5, [3])])
    x = {name: t.transpose(0, 1).unsqueeze(0) for name, t in make_inputs(attn_metadata).items()}
    mask = PackedAttention(position_ids=torch.arange(8), attn_metadata=attn_metadata, captured=captured).as_mask()
    return interface.attention(Layer(), x["query"], x["key"], x["value"], mask, **kwargs)


def test_what_a_layer_wants_and_segments_do_not_do():
    call_layer(softcap=None, sliding_window=8)
    for wish in ({"position_bias": torch.zeros(6)}, {"dropout": 0.1}, {"is_causal": False}):
        with pytest.raises(ValueError, match="packed attention"):
            call_layer(**wish)


def test_keys_are_captured_once():
    captured = KVCache()
    call_layer(captured=captured)
    first = captured[0]
    call_layer(captured=captured)  # as checkpointing does
    assert captured[0] is first and first[0].shape == (1, 2, 8, 8)


def test_the_backend_follows_device_dtype_and_head_sizes(monkeypatch: pytest.MonkeyPatch):
    def name(dtype: torch.dtype, size: int = 64, value_size: int = 64) -> str:
        query, value = (
            SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(5, 2, n)) for n in (size, value_size)
        )
        return interface.choose_backend(cast(Tensor, query), cast(Tensor, value))

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert [name(dtype) for dtype in (torch.bfloat16, torch.float16)] == ["varlen"] * 2
    assert [name(dtype) for dtype in (torch.float32, torch.float64)] == ["cascade"] * 2
    assert [name(torch.bfloat16, *sizes) for sizes in ((64, 32), (36, 36), (320, 320))] == ["cascade"] * 3
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert name(torch.bfloat16) == "cascade"
    with interface.backend("varlen"):
        assert name(torch.bfloat16) == "varlen"


def test_autocast_computes_attention_in_its_dtype():
    """Layers that norm queries and keys hand them over in float32, and values in bfloat16."""
    model = make_model("qwen3")
    policy = Policy(model, device=torch.device("cpu"), compute_dtype=torch.bfloat16, pad_token_id=0)
    sequences = random_sequences([(5, [7, 2]), (3, [9])])

    def logprobs() -> Tensor:
        return policy.logprobs(collate(sequences, share_prompts=policy.shares_prompts), temperature=1.0)[0]

    assert policy.shares_prompts
    shared = logprobs()
    policy.traits = replace(policy.traits, layout="padded")
    assert 0 < (shared - logprobs()).abs().max() < 0.1
    shared.sum().backward()
    assert all(x.isfinite().all() for x in gradients(model).values())


@pytest.mark.parametrize("name", ["cascade", "varlen"])
def test_a_prefix_that_nothing_goes_on_from(name: interface.Backend, varlen_kernel: None):
    """Completions of one token: the row is a placeholder, and the prompt's keys are not there to be seen."""
    policy = policy_of(make_model())
    sequences = random_sequences([(5, [1, 1])])
    prompt = policy.forward_prefix(collate_prompt(sequences[0].token_ids[:5]))
    expected, _ = policy.logprobs(collate(sequences, share_prompts=True), temperature=1.0)
    with interface.backend(name), torch.no_grad():
        actual, _ = policy.logprobs(collate_part(sequences), temperature=1.0, prefix=prompt.detach())
    torch.testing.assert_close(actual, expected.detach())


def test_softcaps_with_a_cache_of_transformers():
    """As `trainer.model.generate` computes them, one token after the other."""
    policy = policy_of(make_gemma2(attn_logit_softcapping=2.0, layer_types=["full_attention"] * 2))
    assert policy.model.config._attn_implementation == interface.NAME
    ids = torch.tensor([[5, 9, 31, 7, 12]])
    with torch.no_grad():
        whole = policy.model(ids).logits[0]
        cache, steps = None, []
        for token in ids.unbind(1):
            out = policy.model(token[None], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits[0, -1])
    torch.testing.assert_close(torch.stack(steps), whole, rtol=1e-5, atol=1e-5)
