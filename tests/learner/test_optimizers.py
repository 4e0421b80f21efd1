"""Optimizers: what they do to a weight, which ones they move how far, what they keep, that they go on exactly."""

from typing import Any

import pytest
import torch
from torch import nn

from cohort.config import Adamw8bitConfig, AdamwConfig, MuonConfig, OptimConfig, SgdConfig, config_from_dict
from cohort.errors import UserError
from cohort.learner.optimizer import Optimizers, check_optimizer, check_weights
from rank_engine import OPTIMIZERS
from selection import mostly_slow

GROUP = {"match": "body.weight"}


class Model(nn.Module):
    """An embedding, a matrix with a bias, and a head, as language models have them."""

    def __init__(self, width: int = 8, *, dtype: torch.dtype = torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Embedding(5, width)
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, 5, bias=False)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator).mul_(0.3).to(dtype)

    def get_input_embeddings(self) -> nn.Module:
        """As transformers' models."""
        return self.table

    def get_output_embeddings(self) -> nn.Module:
        """As transformers' models."""
        return self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.head(torch.tanh(self.body(self.table(ids))))


def train(model: Model, optimizers: Optimizers, steps: int, *, learning_rate: float = 0.01) -> list[float]:
    """Learns to name the next number; the losses."""
    losses = []
    for _ in range(steps):
        ids = torch.arange(5)
        loss = nn.functional.cross_entropy(model(ids).float(), (ids + 1) % 5)
        loss.backward()
        optimizers.step(learning_rate)
        losses.append(loss.item())
    return losses


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def parsed(**optim: Any) -> OptimConfig:
    raw = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"use": "math"}], "optim": optim}
    return config_from_dict(raw).optim


def test_sgd_by_hand():
    model = Model()
    before = weights_of(model)
    optimizers = Optimizers(model, SgdConfig(weight_decay=0.5))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizers.step(0.1)
    after = weights_of(model)
    torch.testing.assert_close(after["body.weight"], before["body.weight"] * 0.95 - 0.1)
    torch.testing.assert_close(after["body.bias"], before["body.bias"] - 0.1)  # vectors do not decay
    assert all(p.grad is None for p in model.parameters())


def test_the_first_step_of_adamw_is_the_learning_rate_in_each_weight():
    model = Model()
    before = weights_of(model)
    optimizers = Optimizers(model, AdamwConfig())
    for p in model.parameters():
        p.grad = torch.full_like(p, -3.0)
    optimizers.step(0.1)
    torch.testing.assert_close(weights_of(model)["body.weight"], before["body.weight"] + 0.1)


def test_muon_moves_matrices_to_orthogonal_updates_and_the_rest_as_adamw_does():
    model = Model(width=16)
    before = weights_of(model)
    optimizers = Optimizers(model, OPTIMIZERS["muon"].model_copy(update={"weight_decay": 0.0}))
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    optimizers.step(0.1)
    after = weights_of(model)
    moved = {name: after[name] - before[name] for name in after}
    singular = torch.linalg.svdvals(moved["body.weight"]) / (0.1 * 0.2 * 16**0.5)
    assert singular.min() > 0.4 and singular.max() < 1.3  # five Newton-Schulz iterations bring them near 1
    for name in ("table.weight", "head.weight", "body.bias"):
        torch.testing.assert_close(moved[name].abs(), torch.full_like(moved[name], 0.1))


def test_groups_have_their_own_decay_and_factor():
    model = Model()
    before = weights_of(model)
    groups = [{"match": "head.*", "learning_rate_factor": 0}, {"match": "*.bias", "weight_decay": 0.5}]
    optimizers = Optimizers(model, parsed(name="sgd", weight_decay=0.25, groups=groups))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizers.step(0.1)
    after = weights_of(model)
    assert torch.equal(after["head.weight"], before["head.weight"])
    torch.testing.assert_close(after["body.bias"], before["body.bias"] * 0.95 - 0.1)
    torch.testing.assert_close(after["body.weight"], before["body.weight"] * 0.975 - 0.1)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adamw_8bit"])
def test_each_learns_goes_on_exactly_and_keeps_what_it_is_said_to(name: str):
    config, learning_rate = OPTIMIZERS[name], {"sgd": 0.3, "adafactor": 0.1}.get(name, 0.01)
    model = Model(width=64)
    optimizers = Optimizers(model, config)
    losses = train(model, optimizers, 20, learning_rate=learning_rate)
    assert losses[-1] < 0.5 * losses[0]
    state, weights = optimizers.state_dict(), weights_of(model)
    kept = sum(x.nbytes for x in _tensors(state["state"]) if x.ndim > 0)
    assert kept == pytest.approx(optimizers.state_bytes(), rel=0.02, abs=8)
    again = Model(width=64)
    again.load_state_dict(weights)
    other = Optimizers(again, config)
    other.load_state_dict({"state": _copied(state["state"]), "param_groups": state["param_groups"]})
    train(model, optimizers, 3, learning_rate=learning_rate)
    train(again, other, 3, learning_rate=learning_rate)
    assert all(torch.equal(weights_of(model)[k], weights_of(again)[k]) for k in weights)


@pytest.mark.parametrize("stance", mostly_slow(["force_eager", "default"], "force_eager", reason="it compiles"))
def test_adamw_in_8_bits_follows_adamw(stance: str):
    """Fifty steps, with moments of two bytes for each of 4,096 weights instead of eight."""
    pytest.importorskip("torchao", reason="in the extra `torchao`, which `dev` has")
    plain, small = Model(width=64), Model(width=64)
    of_small = Optimizers(small, Adamw8bitConfig())
    expected = train(plain, Optimizers(plain, AdamwConfig()), 50, learning_rate=0.003)
    with torch.compiler.set_stance(stance):
        actual = train(small, of_small, 50, learning_rate=0.003)
    assert expected[-1] < 0.1 * expected[0]
    assert actual == pytest.approx(expected, rel=0.05, abs=0.01)
    a, b = weights_of(plain)["body.weight"], weights_of(small)["body.weight"]
    assert (a - b).norm() < 0.1 * (a - weights_of(Model(width=64))["body.weight"]).norm()
    kept = of_small.state_dict()["state"]["body.weight"]["exp_avg"]
    assert type(kept).__name__ == "OptimState8bit" and kept.codes.dtype == torch.uint8
    # 4,096 weights in two bytes, 8 for every 256 and two tables of 1,024; 704 in 8 bytes each
    assert of_small.state_bytes() == 2 * (4096 + 64 + 1024) + 8 * 704


def test_blocks_that_are_not_whole_are_kept_as_they_are():
    """72 x 72 numbers are 20.25 blocks of 256: torchao keeps their moments in float32."""
    pytest.importorskip("torchao", reason="in the extra `torchao`, which `dev` has")
    model = Model(width=72)
    optimizers = Optimizers(model, Adamw8bitConfig())
    with torch.compiler.set_stance("force_eager"):
        train(model, optimizers, 1)
    kept = sum(x.nbytes for x in _tensors(optimizers.state_dict()["state"]) if x.ndim > 0)
    assert kept == optimizers.state_bytes() == 8 * sum(p.numel() for p in model.parameters())


def test_muon_leaves_the_heads_and_tables_of_adapters_to_adamw():
    wrapped = Model(width=16)
    wrapped.table.lora_embedding_A = nn.Parameter(torch.ones(4, 5))
    optimizers = Optimizers(wrapped, MuonConfig())
    muon, adamw = optimizers._optimizers
    assert [p.shape for group in muon.param_groups for p in group["params"]] == [(16, 16)]
    assert any(p is wrapped.table.lora_embedding_A for group in adamw.param_groups for p in group["params"])
    wrapped.requires_grad_(False)
    wrapped.head.requires_grad_(True)
    assert len(Optimizers(wrapped, MuonConfig())._optimizers) == 1  # no matrix is left for Muon


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (parsed(groups=[{"match": "lm_haed.*"}]), "optim.groups: match: 'lm_haed.*' matches no trained weight"),
        (parsed(groups=[{"match": "*"}, GROUP]), "or earlier groups match them all"),
        (
            parsed(name="adamw_8bit", stochastic_rounding=True),
            "optim.stochastic_rounding: true has no effect",
        ),
    ],
)
def test_groups_and_keys_without_effect_are_refused(config: OptimConfig, expected: str):
    with pytest.raises(UserError) as caught:
        check_weights(config, dict(Model().named_parameters()))
    assert expected in str(caught.value)


def test_what_cannot_be_sharded_is_refused_before_anything_is_loaded():
    check_optimizer(parsed(name="adafactor"), 1)
    with pytest.raises(UserError, match=r"optim\.name: adafactor does not support weights sharded over"):
        check_optimizer(parsed(name="adafactor"), 2)


@pytest.mark.parametrize(
    ("optim", "expected"),
    [
        (
            {"name": "adam"},
            "optim.name: 'adam' is not one of adamw, adamw_8bit, adafactor, muon, sgd, custom; did you mean",
        ),
        (
            {"name": "sgd", "beta1": 0.5},
            "optim.beta1: only optim.name: adamw or adamw_8bit or muon has this key; remove it, or use "
            "optim.name: adamw; optim sgd has: weight_decay, groups",
        ),
    ],
)
def test_messages(optim: dict[str, Any], expected: str):
    with pytest.raises(UserError) as caught:
        parsed(**optim)
    assert str(caught.value).startswith(expected)


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, dict):
        return [x for value in tree.values() for x in _tensors(value)]
    return [tree] if isinstance(tree, torch.Tensor) else []


def _copied(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return tree.clone() if isinstance(tree, torch.Tensor) else tree
