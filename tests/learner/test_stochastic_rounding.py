"""Rounding bfloat16 weights at random: right in the mean, no update lost, the same noise wherever it is drawn."""

import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cohort.learner import optimizer as stochastic_rounding
from cohort.learner.optimizer import Optimizers, round_stochastically, rounding_key
from rank_engine import OPTIMIZERS
from selection import examples
from test_optimizers import Model, train, weights_of

NAMES = ("adamw", "adamw_8bit", "muon", "sgd")


def rounded(wide: torch.Tensor, *, key: int, first: int = 0) -> torch.Tensor:
    into = torch.empty(wide.shape, dtype=torch.bfloat16)
    round_stochastically(wide, into, key=key, first=first)
    return into.float()


def neighbors(x: float) -> tuple[float, float]:
    """The bfloat16 numbers next to a float32, towards 0 and away from it, by their bits."""
    (bits,) = struct.unpack("<I", struct.pack("<f", x))
    low = bits & 0xFFFF0000
    return tuple(struct.unpack("<f", struct.pack("<I", b))[0] for b in (low, low + 0x10000))  # type: ignore[return-value]


def test_by_hand():
    """1 + 2^-9 is a quarter of the way from 1 to the next bfloat16, 1 + 2^-7."""
    x = torch.full((100_000,), 1 + 2.0**-9)
    out = rounded(x, key=1)
    assert set(out.tolist()) == {1.0, 1 + 2.0**-7}
    assert (out > 1).float().mean().item() == pytest.approx(0.25, abs=0.007)  # 5 standard deviations
    assert torch.equal(rounded(-x, key=1), -out)


@examples(60)
@given(
    x=st.floats(width=32, min_value=-(2.0**100), max_value=2.0**100, allow_subnormal=False),
    key=st.integers(0, 2**32 - 1),
)
def test_each_number_becomes_a_neighbor_and_the_mean_is_right(x: float, key: int):
    near, far = neighbors(x)
    out = rounded(torch.full((20_000,), x), key=key).double()
    assert set(out.tolist()) <= {near, far}
    share = 0.0 if far == near else (x - near) / (far - near)
    # six standard deviations, and ten counts of what is rare
    deviation = (share * (1 - share) / 20_000) ** 0.5
    assert ((out == far).double().mean().item() - share) == pytest.approx(0, abs=6 * deviation + 5e-4)


def test_what_is_a_bfloat16_stays_whatever_the_key():
    exact = torch.tensor([0.0, -0.0, 1.0, -1.0078125, 3.3895313892515355e38, float("inf"), -float("inf")])
    for key in range(50):
        assert torch.equal(rounded(exact, key=key), exact)


def test_the_noise_is_that_of_the_element_wherever_it_is_computed(monkeypatch: pytest.MonkeyPatch):
    """A shard rounds as the whole does, and blocks as one; another update, weight or seed rounds otherwise."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    key = rounding_key(1, 2, "model.layers.0.weight")
    whole = rounded(x, key=key)
    assert torch.equal(torch.cat([rounded(x[:333], key=key), rounded(x[333:], key=key, first=333)]), whole)
    monkeypatch.setattr(stochastic_rounding, "_BLOCK", 7)
    assert torch.equal(rounded(x, key=key), whole)
    for other in ((2, 2, "model.layers.0.weight"), (1, 3, "model.layers.0.weight"), (1, 2, "model.layers.1.weight")):
        assert not torch.equal(rounded(x, key=rounding_key(*other)), whole)
    assert not torch.equal(rounded(x[333:], key=key), whole[333:])  # negative control: elements count from the shard


def rounding_optimizers(name: str, model: Model, **more: Any) -> Optimizers:
    return Optimizers(model, OPTIMIZERS[name].model_copy(update={"stochastic_rounding": True, **more}), seed=3)


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_updates_far_below_a_weights_precision_add_up(name: str):
    """200 updates of 1e-4 move weights of 1 by 0.02 in the mean; rounding to nearest loses all of them."""
    moved = {}
    for way in ("at random", "to nearest"):
        model = Model(width=32, dtype=torch.bfloat16)
        for p in model.parameters():
            p.data.fill_(1.0)
        of_way = {"at random": rounding_optimizers, "to nearest": lambda n, m: Optimizers(m, OPTIMIZERS[n])}[way]
        optimizers = of_way("sgd" if name == "sgd" else name, model)
        for update in range(200):
            for p in model.parameters():
                p.grad = torch.full_like(p, 1.0)
            optimizers.step(1e-5 if name == "sgd" else 1e-4, update=update)  # momentum of 0.9 makes it ten times that
        moved[way] = 1 - model.table.weight.float().mean().item()
    assert moved["at random"] == pytest.approx(0.02, rel=0.12)
    assert moved["to nearest"] == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_fifty_steps_follow_float32(name: str):
    """The loss to 5 % of the first one at every step, and the way gone in float32's direction to a fifth.

    Each weight by itself walks at random by steps of its precision, as far as the way is long here, and gradients are
    those of the weights as they are. Rounding to nearest goes less than half the way.
    """
    if name == "adamw_8bit":
        pytest.importorskip("torchao", reason="in the extra `torchao`, which `dev` has")
    losses, gone = {}, {}
    for way in ("float32", "at random", "to nearest"):
        model = Model(width=64, dtype=torch.float32 if way == "float32" else torch.bfloat16)
        start = weights_of(model)["body.weight"].float()
        optimizers = rounding_optimizers(name, model) if way == "at random" else Optimizers(model, OPTIMIZERS[name])
        with torch.compiler.set_stance("force_eager"):
            losses[way] = train(model, optimizers, 50, learning_rate=1e-4)
        gone[way] = weights_of(model)["body.weight"].float() - start
    share = {way: ((x * gone["float32"]).sum() / gone["float32"].square().sum()).item() for way, x in gone.items()}
    assert losses["at random"] == pytest.approx(losses["float32"], abs=0.05 * losses["float32"][0])
    assert share["to nearest"] < 0.5
    if name != "adamw_8bit":  # which rounds its moments too, by the largest of their block
        assert share["at random"] == pytest.approx(1, abs=0.2)
