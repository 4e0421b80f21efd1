"""The loss that balances experts: over the whole step, however it is split, shared, padded or spread over ranks."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

import rank_moe
from cohort.learner import TrainEngine
from cohort.models import Policy
from cohort.models.activation_checkpointing import enable_gradient_checkpointing
from cohort.models.batch_layout import Layout
from families import FAMILIES, make_model, save_folder
from rank_moe import BUDGETS, make_engine, naive, step, switch_loss
from ranks import RanksOnDemand
from selection import mostly_slow, slow
from tiny import relative_error

KINDS = ("Qwen3-MoE", "Qwen2-MoE", "Mixtral", "OLMoE")
AUX, LOAD = "moe/aux_loss", "moe/expert_load"


def moe_model(kind: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    model = make_model(FAMILIES[kind], dtype=dtype)
    model.set_experts_implementation("eager")  # the grouped product takes no float64
    return model


def moe_policy(model: PreTrainedModel) -> Policy:
    return Policy(
        model, device=torch.device("cpu"), compute_dtype=model.dtype, pad_token_id=0, longest_sequence_tokens=100
    )


def gradients(engine: TrainEngine) -> dict[str, torch.Tensor]:
    grads = {name: p.grad.to_dense().clone() for name, p in engine.policy.model.named_parameters()}
    engine.policy.model.zero_grad()
    return grads


def largest_error(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert actual.keys() == expected.keys()
    return max(relative_error(actual[name], g) for name, g in expected.items())


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "Qwen3-MoE", reason="routers of other architectures"))
def test_the_same_for_every_split_and_layout(kind: str):
    """1e-6, as the library's norms and softmaxes of routers round to float32 in a float64 model."""
    aux, expected = naive(moe_model(kind))
    model = moe_model(kind)
    engine = make_engine(moe_policy(model))
    layouts: list[Layout] = ["shared", "packed", "padded"]
    for layout in layouts:
        engine.policy.traits = replace(engine.policy.traits, layout=layout)
        for budget in BUDGETS:
            assert step(engine, budget).metrics[AUX] == pytest.approx(aux, rel=1e-6)
            assert largest_error(gradients(engine), expected) < 1e-6, (layout, budget)
    enable_gradient_checkpointing(model)
    engine.policy.traits = replace(engine.policy.traits, layout="shared")
    step(engine, 45)
    assert largest_error(gradients(engine), expected) < 1e-6
    _, without = naive(moe_model(kind), coefficient=0.0)
    assert largest_error(without, expected) > 0.05  # the loss is not lost beside the policy's


def test_the_mean_of_micro_batches_is_another_number():
    """Negative control: what others add up depends on the split."""
    whole, _ = naive(moe_model("Qwen3-MoE"))
    model = moe_model("Qwen3-MoE")
    values = []
    for s in rank_moe.sequences():
        ids = torch.from_numpy(s.token_ids[None, :-1])
        logits = model(input_ids=ids, output_router_logits=True).router_logits
        values.append(switch_loss(torch.stack([x.flatten(0, -2) for x in logits]), 2).item())
    assert abs(sum(values) / len(values) - whole) > 0.02


def test_a_loss_that_forgets_who_shares_a_prompt_is_seen(monkeypatch: pytest.MonkeyPatch):
    """Negative control: every position of the row counts once."""
    _, expected = naive(moe_model("Qwen3-MoE"))
    engine = make_engine(moe_policy(moe_model("Qwen3-MoE")))
    monkeypatch.setattr(Policy, "sequences_per_position", lambda _, micro_batch: micro_batch.input_counts.clamp(max=1))
    step(engine, 10_000)
    assert largest_error(gradients(engine), expected) > 0.01


@pytest.mark.parametrize(
    "kind",
    mostly_slow(
        [*KINDS, "Granite-MoE", "GPT-OSS", "Qwen3-Next", "Phi-3.5-MoE"],
        "Qwen3-MoE",
        "Mixtral",
        reason="routers of other architectures",
    ),
)
def test_transformers_gives_the_same_number(kind: str):
    """Of one padded batch with its attention mask, which is all of the step."""
    model = moe_model(kind, torch.float32)
    rows = [torch.from_numpy(s.token_ids[:-1]) for s in rank_moe.sequences()]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = (torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in rows])).long()
    logits = model(input_ids=ids, attention_mask=mask, output_router_logits=True).router_logits
    config = model.config
    num_experts = logits[0].shape[-1]
    expected = load_balancing_loss_func(logits, num_experts, config.num_experts_per_tok, mask).item()
    metrics = step(make_engine(moe_policy(model)), 45).metrics
    assert metrics[AUX] == pytest.approx(expected, rel=1e-5)
    assert 0 <= metrics[f"{LOAD}/min"] < 1 < metrics[f"{LOAD}/max"] <= num_experts / config.num_experts_per_tok


def test_updates_balance_the_experts():
    engine = make_engine(moe_policy(moe_model("Qwen3-MoE", torch.float32)), router_aux_loss_coef=10.0)
    values = []
    for _ in range(12):
        values.append(step(engine, 45).metrics[AUX])
        engine.optim_step()
    assert values[0] > 2.05 and values[-1] < 2 + 0.5 * (values[0] - 2)  # 2 experts per token: 2 is even


def test_memory_that_runs_out_changes_nothing():
    """In the pass that counts, and in training: what failed is not counted twice."""
    aux, expected = naive(moe_model("Qwen3-MoE"))
    engine = make_engine(moe_policy(moe_model("Qwen3-MoE")))

    def fail(module, inputs, output):
        if output.shape[1] > 70:
            raise torch.OutOfMemoryError("injected")

    engine.policy.model.model.layers[1].mlp.register_forward_hook(fail)
    result = step(engine, 10_000)
    assert result.num_out_of_memory >= 2
    assert result.metrics[AUX] == pytest.approx(aux, rel=1e-6)
    assert largest_error(gradients(engine), expected) < 1e-6


@slow("test_ranks has ranks, and the tests above the loss of routers in one process")
@pytest.mark.parametrize(("world_size", "replicas"), [(2, 1), (3, 1), (2, 2)])
def test_ranks(world_size: int, replicas: int, tmp_path):
    folder = str(save_folder(FAMILIES["Qwen3-MoE"], tmp_path / "model"))
    aux, expected = naive(AutoModelForCausalLM.from_pretrained(folder))
    jobs = (("moe_balance", folder), ("moe_frozen", folder), ("moe_out_of_memory", folder))
    on = RanksOnDemand(tmp_path)
    balance, frozen, out_of_memory = (on(world_size, "replicated", str(replicas), *job)["result"] for job in jobs)
    assert len(balance) == 2 * len(BUDGETS)
    for way, (metrics, grads) in balance.items():
        assert metrics[AUX] == pytest.approx(aux, rel=1e-5), way
        assert largest_error(grads, expected) < 2e-5, way
    rank_moe.check_frozen(frozen)
    for place, again in out_of_memory.items():
        assert again.num_out_of_memory >= 1 and not again.different, place
