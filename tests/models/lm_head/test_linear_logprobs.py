"""Law 2 for the head: logprobs and losses computed by tiles equal autograd through whole logits."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cohort.models import Operands, linear_logprobs, linear_loss
from cohort.models.lm_head import tiled_softmax
from cohort.models.lm_head.logprobs import head_logits
from cohort.models.lm_head.softmax import IDENTITY, LogitTransform
from cohort.plan import defaults as tiles
from selection import examples, mostly_slow
from tiny import relative_error

VOCABULARY, WIDTH, RANK = 11, 6, 2


def make_inputs(num_tokens: int, *, dtype: torch.dtype = torch.float64, bias: bool, adapter: bool) -> dict[str, Tensor]:
    """Random operands of a head, by name, in the order of their gradients."""
    shapes = {"hidden": (num_tokens, WIDTH), "weight": (VOCABULARY, WIDTH)}
    if bias:
        shapes["bias"] = (VOCABULARY,)
    if adapter:
        shapes |= {"lora_hidden": (num_tokens, RANK), "lora_b": (VOCABULARY, RANK)}
    return {name: torch.randn(shape, dtype=dtype, requires_grad=True) for name, shape in shapes.items()}


def naive(inputs: dict[str, Tensor], targets: Tensor, transform: LogitTransform = IDENTITY) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies from whole logits."""
    logits = inputs["hidden"] @ inputs["weight"].T
    if "lora_b" in inputs:
        logits = logits + inputs["lora_hidden"] @ inputs["lora_b"].T
    logits = (logits + inputs.get("bias", 0.0)) * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    log_p = torch.log_softmax(logits / transform.temperature, -1)
    return log_p.gather(1, targets.unsqueeze(1)).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Logprobs from whole logits of a head without anything else."""
    return naive({"hidden": hidden, "weight": weight}, targets)[0]


def random_targets(num_tokens: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (num_tokens,))


heads = {
    "num_tokens": st.integers(0, 17),
    "tile_elements": st.integers(1, VOCABULARY * 20),
    "tile_tokens": st.sampled_from([3, 2048]),
    "block_elements": st.sampled_from([1, 30, 1 << 18]),
    "transform": st.builds(
        LogitTransform,
        temperature=st.sampled_from([0.5, 1.0, 1.7]),
        scale=st.sampled_from([1.0, 0.3]),
        softcap=st.sampled_from([None, 2.0]),
    ),
    "bias": st.booleans(),
    "adapter": st.booleans(),
    "live": st.sampled_from([0.0, 0.3, 1.0]),
    "entropy": st.sampled_from(["none", "no gradient", "gradient", "only gradient"]),
}


@examples(150)
@given(**heads, frozen=st.sets(st.sampled_from(["hidden", "weight", "bias", "lora_hidden", "lora_b"]), max_size=3))
def test_values_and_gradients_are_those_of_whole_logits(
    num_tokens, tile_elements, tile_tokens, block_elements, transform, bias, adapter, live, entropy, frozen
):
    """Any tile, any part frozen, any rows without a gradient; twice, since the first backward may use up a tile."""
    torch.manual_seed(num_tokens)
    inputs, targets = make_inputs(num_tokens, bias=bias, adapter=adapter), random_targets(num_tokens)
    for name in frozen & inputs.keys():
        inputs[name].requires_grad_(False)
    wanted = [x for x in inputs.values() if x.requires_grad]
    is_live = torch.rand(num_tokens) < live
    g, e = (torch.randn(num_tokens, dtype=torch.float64) * is_live for _ in range(2))

    def loss(logprobs: Tensor, entropies: Tensor | None) -> Tensor:
        total = logprobs.new_zeros(()) if entropy == "only gradient" else (logprobs * g).sum()
        return total + (entropies * e).sum() if "only" in entropy or entropy == "gradient" else total

    expected = naive(inputs, targets, transform)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE_TOKENS", tile_tokens)
        patch.setitem(tiled_softmax.BLOCK_ELEMENTS, "cpu", block_elements)
        options = {"entropy": entropy != "none", "tile_elements": tile_elements}
        actual = linear_logprobs(Operands(**inputs), targets, transform, **options)
        if wanted:
            expected_grads = torch.autograd.grad(loss(*expected), wanted)
            for _ in range(2):
                actual_grads = torch.autograd.grad(loss(*actual), wanted, retain_graph=True)
                torch.testing.assert_close(actual_grads, expected_grads, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-10, atol=1e-10)
    if entropy == "none":
        assert actual[1] is None
    else:
        torch.testing.assert_close(actual[1], expected[1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("num_tokens", [0, 7])
def test_without_any_gradient_to_give_gradients_are_zero_and_not_none(num_tokens: int):
    inputs = make_inputs(num_tokens, bias=True, adapter=True)
    logprobs, _ = linear_logprobs(Operands(**inputs), random_targets(num_tokens))
    (logprobs.sum() * 0).backward()
    for name, x in inputs.items():
        assert x.grad is not None and x.grad.shape == x.shape and not x.grad.any(), name


def test_a_target_beyond_the_vocabulary_is_not_a_number():
    inputs = make_inputs(3, bias=False, adapter=False)
    logprobs, _ = linear_logprobs(Operands(**inputs), torch.tensor([0, VOCABULARY, -1]))
    assert logprobs.isnan().tolist() == [False, True, True]


def test_large_logits_keep_the_digits_of_small_logprobs():
    """Logits 8000 and 7995: as a difference from a logsumexp of 8000.0067 the result would be off by 2 %."""
    hidden, weight = torch.tensor([[80.0]]), torch.tensor([[100.0], [99.9375]])
    logprobs, entropy = linear_logprobs(Operands(hidden, weight), torch.tensor([0]), entropy=True, tile_elements=1)
    assert logprobs.item() == pytest.approx(-0.006715348, rel=1e-5)
    assert entropy.item() == pytest.approx(0.040179555, rel=1e-5)


def big_inputs(dtype: torch.dtype, num_tokens: int = 200) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(num_tokens, 64), torch.randn(1000, 64) * 0.4
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), torch.randint(0, 1000, (num_tokens,))


def errors(compute: Callable[..., Tensor], inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[float, list[float]]:
    """Largest error of a logprob and relative errors of gradients, against float64 from the same inputs."""
    hidden, weight, targets = inputs
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    upstream = torch.linspace(-1, 1, len(targets), dtype=torch.float64)
    expected = plain(*exact, targets)
    expected_grads = torch.autograd.grad((expected * upstream).sum(), exact)
    actual = compute(hidden, weight, targets)
    actual_grads = torch.autograd.grad((actual * upstream).sum(), (hidden, weight))
    assert [x.dtype for x in actual_grads] == [hidden.dtype, weight.dtype]
    pairs = zip(actual_grads, expected_grads, strict=True)
    return (actual - expected).abs().max().item(), [relative_error(a.double(), e) for a, e in pairs]


def tiled(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return linear_logprobs(Operands(hidden, weight), targets, tile_elements=20_000)[0]


def test_bfloat16_is_as_exact_as_whole_float32_logits(monkeypatch: pytest.MonkeyPatch):
    """Nothing but the gradients themselves is rounded to bfloat16, however many tiles they are summed from."""
    monkeypatch.setattr(tiles, "TILE_TOKENS", 16)
    inputs = big_inputs(torch.bfloat16)
    value, grads = errors(tiled, inputs)
    naive_value, naive_grads = errors(lambda h, w, y: plain(h.float(), w.float(), y), inputs)
    assert value < 1e-5 and naive_value < 1e-5
    assert all(mine < 1.01 * theirs for mine, theirs in zip(grads, naive_grads, strict=True))


def test_rounded_logits_would_be_noticed():
    """Negative control: bfloat16 logits fail the test above by three orders of magnitude."""
    value, _ = errors(plain, big_inputs(torch.bfloat16))
    assert value > 1e-2


def test_autocast_decides_nothing():
    inputs = big_inputs(torch.float32)
    without, without_grads = errors(tiled, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, grads = errors(tiled, inputs)
        logits = head_logits(Operands(*inputs[:2]))
    assert without < 1e-5 and max(without_grads) < 1e-5  # under autocast float64's products are bfloat16's too
    assert torch.equal(logits, head_logits(Operands(*inputs[:2])))
    assert value < 1e-5 and max(grads) < 1e-5


def test_master_weights_are_rounded_to_the_dtype_of_hidden_states():
    """As a gathered bfloat16 copy of them would be; the gradient is theirs, in float32."""
    hidden, weight, targets = big_inputs(torch.float32)
    narrow_hidden, narrow_weight = (x.detach().bfloat16().requires_grad_() for x in (hidden, weight))
    logprobs = tiled(narrow_hidden, weight, targets)
    assert torch.equal(logprobs, tiled(narrow_hidden, narrow_weight, targets))
    logprobs.sum().backward()
    tiled(narrow_hidden, narrow_weight, targets).sum().backward()
    assert weight.grad.dtype == torch.float32
    assert torch.equal(weight.grad.bfloat16(), narrow_weight.grad)
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float())


class Sizes(TorchDispatchMode):
    """The sizes of all tensors that are made, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given_storages = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given_storages:
                self.sizes.append(x.untyped_storage().nbytes() // x.element_size())
        return out


def count_large(compute: Callable[[], Any], limit: int) -> tuple[Any, int, int]:
    """What was computed, the largest tensor that was made, and how many were larger than `limit`."""
    with Sizes() as made:
        result = compute()
    return result, max(made.sizes), sum(size > limit for size in made.sizes)


TILES = [*itertools.product((1 << 15, 1 << 18), (torch.float32, torch.bfloat16), (False, True))]
EACH_TWO = [case for case in TILES if ((case[0] > 1 << 15) + (case[1] == torch.bfloat16) + case[2]) % 2 == 0]


@pytest.mark.parametrize(
    ("tile_elements", "dtype", "entropy"), mostly_slow(TILES, *EACH_TWO, reason="each two of them")
)
def test_no_more_than_a_tile_exists_at_a_time(tile_elements: int, dtype: torch.dtype, entropy: bool, monkeypatch):
    """Bytes, not timings: one tile forward, one backward; nothing of T x V is saved but where it is one tile."""
    monkeypatch.setitem(tiled_softmax.BLOCK_ELEMENTS, "cpu", 512)
    hidden, weight, targets = big_inputs(dtype, num_tokens=256)
    is_one = tile_elements > 256 * 1000
    tile, small = (256 * 1000 if is_one else tile_elements), hidden.numel()
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x.numel()), x)[1], lambda x: x):
        (logprobs, _), largest, num_large = count_large(
            lambda: linear_logprobs(Operands(hidden, weight), targets, entropy=entropy, tile_elements=tile_elements),
            small,
        )
    assert sum(saved) == hidden.numel() + weight.numel() + (3 if entropy else 2) * 256
    weights_cast = dtype == torch.bfloat16 and is_one
    assert largest == tile and num_large == 1 + weights_cast
    _, largest, num_large = count_large(logprobs.sum().backward, max(small, 64 * 1000))
    assert largest <= max(tile, weight.numel())
    assert num_large == 0  # but for the weight's gradient and, where nothing was kept, a tile smaller than that


def test_keeping_whole_logits_would_be_noticed():
    """Negative control of the test above."""
    hidden, weight, targets = big_inputs(torch.float32, num_tokens=256)
    _, largest, num_large = count_large(lambda: plain(hidden, weight, targets), 1 << 14)
    assert largest == 256 * 1000 and num_large > 1


def test_frozen_parts_and_entropy_without_gradient_cost_nothing():
    """Matrix products of one tile: made, and made into what is wanted."""
    hidden, weight, targets = big_inputs(torch.float32)

    class Products(TorchDispatchMode):
        count = exps = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            self.count += name in ("mm", "addmm", "addmm_")
            self.exps += name in ("exp", "exp_")
            return func(*args, **(kwargs or {}))

    def products(*, entropy: bool, tile_elements: int, live: int, **wanted: bool) -> tuple[int, int]:
        hidden.requires_grad_(wanted["hidden"])
        weight.requires_grad_(wanted["weight"])
        logprobs, _ = linear_logprobs(Operands(hidden, weight), targets, entropy=entropy, tile_elements=tile_elements)
        with Products() as seen:
            logprobs[:live].sum().backward()
        return seen.count, seen.exps

    both = {"hidden": True, "weight": True}
    assert products(entropy=False, tile_elements=10**6, live=200, **both) == (2, 1)
    assert products(entropy=True, tile_elements=10**6, live=200, **both) == (2, 1)
    assert products(entropy=True, tile_elements=10**5, live=200, **both) == (6, 2)
    assert products(entropy=True, tile_elements=10**5, live=100, **both) == (3, 1)
    assert products(entropy=True, tile_elements=10**5, live=200, hidden=False, weight=True) == (4, 2)
    assert products(entropy=True, tile_elements=10**5, live=200, hidden=True, weight=False) == (4, 2)
    assert products(entropy=True, tile_elements=10**5, live=0, **both) == (0, 0)


@examples(60)
@given(**heads)
def test_a_loss_with_gradients_made_in_forward(
    num_tokens, tile_elements, tile_tokens, block_elements, transform, bias, adapter, live, entropy
):
    """Equal to the loss of `linear_logprobs`, scaled by 3, in two parts that add up."""
    torch.manual_seed(num_tokens)
    inputs, targets = make_inputs(num_tokens, bias=bias, adapter=adapter), random_targets(num_tokens)
    wanted = list(inputs.values())
    is_live = torch.rand(num_tokens) < live
    g, e = (torch.randn(num_tokens, dtype=torch.float64) * is_live for _ in range(2))

    def token_loss(logprobs: Tensor, entropies: Tensor, tokens: slice) -> Tensor:
        losses = torch.zeros_like(logprobs) if entropy == "only gradient" else logprobs.exp() * g[tokens]
        return losses + entropies * e[tokens] if "only" in entropy or entropy == "gradient" else losses

    def compute() -> tuple[Tensor, Tensor]:
        return linear_loss(Operands(**inputs), targets, token_loss, transform, tile_elements=tile_elements)

    options = {"entropy": True, "tile_elements": tile_elements}
    logprobs, entropies = linear_logprobs(Operands(**inputs), targets, transform, **options)
    expected = token_loss(logprobs, entropies, slice(None)).sum()
    expected_grads = torch.autograd.grad(expected * 4.0, wanted)
    (loss, actual), (again, _) = compute(), compute()
    (loss * 3.0 + again).backward()
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close([x.grad for x in wanted], list(expected_grads), **close)
    torch.testing.assert_close(loss, expected, **close)
    torch.testing.assert_close(actual, logprobs, **close)
    assert not actual.requires_grad
    with torch.no_grad():
        assert compute()[0] == loss


def test_a_loss_with_gradients_made_in_forward_in_bfloat16():
    """Also bfloat16 gradients that add up over calls are as exact as those of `linear_logprobs`."""
    hidden, weight, targets = big_inputs(torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    (plain(*exact, targets).sum() * -4).backward()
    mistakes = []
    for compute in (
        lambda: linear_loss(Operands(hidden, weight), targets, lambda logprobs, *_: -logprobs, tile_elements=20_000)[0],
        lambda: -tiled(hidden, weight, targets).sum(),
    ):
        hidden.grad = weight.grad = None
        for factor in (3.0, 1.0):
            (compute() * factor).backward()
        assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
        mistakes.append([relative_error(x.grad.double(), y.grad) for x, y in zip((hidden, weight), exact, strict=True)])
    assert mistakes[0] == pytest.approx(mistakes[1], rel=0.05)
    assert max(mistakes[0]) < 5e-3


def test_the_loss_makes_each_tile_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(tiled_softmax.BLOCK_ELEMENTS, "cpu", 512)
    hidden, weight, targets = big_inputs(torch.float32, num_tokens=256)

    def token_loss(logprobs: Tensor, entropies: Tensor, tokens: slice) -> Tensor:
        return logprobs

    compute = lambda: linear_loss(Operands(hidden, weight), targets, token_loss, tile_elements=1 << 17)  # noqa: E731
    (loss, *_), largest, num_large = count_large(compute, weight.numel())
    assert largest == 131_000 and num_large == 1  # [131, V]
    _, largest, _ = count_large(loss.backward, 0)
    assert largest == 1  # the sums made in forward become the gradients
    with pytest.raises(RuntimeError, match="one backward pass"):
        loss.backward()
