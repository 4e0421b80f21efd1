"""The plan's shapes of `bench/families.py`'s models: parameters, and those that one token is multiplied with."""

import pytest

from cohort.config import Config
from cohort.plan.shape import _FAMILIES, shape_from_config
from cohort.plan.timing import training_operations
from families import FAMILIES, make_model

KNOWN = [name for name, family in FAMILIES.items() if family.model_type in _FAMILIES]


@pytest.mark.parametrize("name", KNOWN)
def test_parameters(name: str):
    model = make_model(FAMILIES[name])
    shape = shape_from_config(model.config.to_dict(), name=name)
    assert shape.num_parameters == model.num_parameters()
    of_experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    idle = of_experts * (1 - shape.experts_per_token / shape.experts)
    assert shape.layers * (shape.layer_parameters - shape.active_layer_parameters) == idle
    assert (of_experts > 0) == (shape.experts > 1)


def test_every_family_is_compared():
    assert {FAMILIES[name].model_type for name in KNOWN} == set(_FAMILIES)


def test_a_loss_of_routers_takes_a_forward_pass():
    run = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": [{"use": "exact"}]}
    shape = shape_from_config(make_model(FAMILIES["Qwen3-MoE"]).config.to_dict(), name="moe")
    plain, balanced = (
        training_operations(Config(**run, train={"updates_per_rollout": 2, "router_aux_loss_coef": c}), shape)
        for c in (0.0, 0.01)
    )
    assert balanced["router statistics"] == 2 * 2 * shape.active_parameters
    assert balanced["attention"] == pytest.approx(plain["attention"] * 8 / 6)
    assert balanced.keys() - plain.keys() == {"router statistics"}
