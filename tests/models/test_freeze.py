"""`model.freeze`, routers without noise, and adapters beside experts: what is trained, and what is refused."""

import pytest
import torch
import yaml

import rank_moe
from cohort.config import AdapterConfig, ModelConfig, load_config
from cohort.errors import UserError
from cohort.models import check_router_loss, find_routers, trained_weights
from cohort.ranks.collectives import SINGLE_PROCESS
from families import FAMILIES, make_model, save_folder
from rank_moe import load, make_engine, step
from tiny import save_model_folder


@pytest.fixture(scope="module")
def moe(tmp_path_factory) -> str:
    return str(save_folder(FAMILIES["Qwen3-MoE"], tmp_path_factory.mktemp("moe")))


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> str:
    return str(save_model_folder(tmp_path_factory.mktemp("dense")))


def test_frozen_weights_stay_bit_identical(moe):
    rank_moe.check_frozen(rank_moe.run_frozen(SINGLE_PROCESS, moe))


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            ("model.layer.0.*",),
            r"model\.freeze: 'model\.layer\.0\.\*' matches no weight .*; nearest: model\.",
        ),
        (("routers",), r"model\.freeze: 'routers' matches no weight of the model, which has no routers"),
        (("*",), r"model\.freeze: all weights are frozen, nothing is left to train"),
    ],
)
def test_what_cannot_be_frozen(dense, patterns, message):
    with pytest.raises(UserError, match=message):
        trained_weights(ModelConfig(path=dense, freeze=patterns))


def test_what_is_frozen_is_not_among_the_trained_weights(moe):
    everything, rest = (set(trained_weights(ModelConfig(path=moe, freeze=f))) for f in ((), ("routers", "lm_head.*")))
    assert everything - rest == {"model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate.weight", "lm_head.weight"}


@pytest.mark.parametrize(
    ("model", "train", "message"),
    [
        ({"freeze": ["routers"], "adapter": {"rank": 2}}, {}, "freeze has no effect with adapter"),
        ({"freeze": ["routers"]}, {"router_aux_loss_coef": 0.01}, r"no effect with model\.freeze: \[routers\]"),
        ({"adapter": {"rank": 2}}, {"router_aux_loss_coef": 0.01}, r"no effect with model\.adapter"),
    ],
)
def test_keys_that_contradict(moe, tmp_path, model, train, message):
    run = {"model": {"path": moe, **model}, "data": {"path": "x.jsonl"}, "rewards": [{"use": "exact"}], "train": train}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    with pytest.raises(UserError, match=message):
        load_config(tmp_path / "run.yaml", [])


def test_a_loss_of_routers_without_routers_is_refused(moe, dense, tmp_path):
    check_router_loss(ModelConfig(path=moe), 0.01)
    check_router_loss(ModelConfig(path=dense), 0.0)
    deepseek = str(save_folder(FAMILIES["DeepSeek-V3, Kimi-K2"], tmp_path))
    for config, why in (
        (ModelConfig(path=dense), "no supported mixture-of-experts routers"),
        (ModelConfig(path=deepseek), "(a correction bias|no supported)"),  # transformers 5.17 does not record these
        (ModelConfig(path=moe, freeze=("*.mlp.gate.*",)), "freezes all routers"),
    ):
        with pytest.raises(UserError, match=rf"train\.router_aux_loss_coef: 0\.01 has no effect: .*{why}.*; remove it"):
            check_router_loss(config, 0.01)


def test_routers_choose_in_training_as_in_sampling(tmp_path):
    """Those of Phi-3.5-MoE draw their choice at random in training, by themselves."""
    ids = torch.arange(2, 40).unsqueeze(0)
    noisy = make_model(FAMILIES["Phi-3.5-MoE"]).train()
    assert not torch.equal(noisy(input_ids=ids).logits, noisy(input_ids=ids).logits)  # negative control
    policy = load(str(save_folder(FAMILIES["Phi-3.5-MoE"], tmp_path)))
    model = policy.model.train()
    expected = model(input_ids=ids).logits
    assert model.model.layers[0].mlp.training and not find_routers(model)[0].module.training
    assert torch.equal(expected, model.eval()(input_ids=ids).logits)
    step(make_engine(policy, router_aux_loss_coef=0.0), 45)
    assert torch.equal(expected, model.train()(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("kind", "left_out"),
    [("DeepSeek-V3, Kimi-K2", "gate_proj"), ("Qwen2-MoE", "shared_expert_gate"), ("Llama 4 (text)", "router")],
)
def test_adapters_leave_routers_and_what_is_taken_for_experts_alone(kind, left_out, tmp_path):
    path = str(save_folder(FAMILIES[kind], tmp_path))
    names = trained_weights(ModelConfig(path=path, adapter=AdapterConfig(rank=2)))
    layers = {name.partition(".lora_")[0] for name in names}
    assert any("self_attn" in layer for layer in layers) and not any(layer.endswith(left_out) for layer in layers)
    assert make_engine(load(path, adapter=AdapterConfig(rank=2)), router_aux_loss_coef=0.0)


@pytest.mark.parametrize(
    ("kind", "target", "message"),
    [
        (
            "DeepSeek-V3, Kimi-K2",
            "gate_proj",
            "'gate_proj' is not supported: peft mistakes .* for the fused experts",
        ),
        ("Qwen3-MoE", "experts", "'experts' is a Qwen3MoeExperts, not a linear layer of this model"),
        ("Llama 4 (text)", "router", "'router' is a Llama4Router, not a linear layer of this model"),
    ],
)
def test_targets_that_are_no_linear_layers(kind, target, message, tmp_path):
    path = str(save_folder(FAMILIES[kind], tmp_path))
    with pytest.raises(UserError, match=rf"model\.adapter\.targets: {message}"):
        trained_weights(ModelConfig(path=path, adapter=AdapterConfig(rank=2, targets=(target,))))
