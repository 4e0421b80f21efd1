"""Whole runs of a mixture of experts: a loss of its routers, frozen weights, and going on from a checkpoint."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import cohort
from cohort.errors import UserError
from families import FAMILIES, make_model
from runs import assert_same_weights, changed, make_inputs, metric, stop_after, train, weights


def moe_run(folder: Path) -> dict:
    """A run of four steps, its model one with experts and the tokenizer of the other tests."""
    config = make_inputs(folder)
    make_model(FAMILIES["Qwen3-MoE"]).save_pretrained(folder / "base")
    return changed(
        config,
        model={"freeze": ["model.embed_tokens.*"]},
        train={"steps": 4, "router_aux_loss_coef": 0.1, "updates_per_rollout": 2, "micro_batch_tokens": 128},
        eval={"every": 4, "max_prompts": 2},
    )


def test_a_run_and_its_continuation(tmp_path: Path):
    config = moe_run(tmp_path)
    run = train(config).run_dir
    losses, most, least = (metric(run, f"moe/{name}") for name in ("aux_loss", "expert_load/max", "expert_load/min"))
    assert len(losses) == 4 and all(1.9 < loss < 4 for loss in losses)
    assert all(low <= 1 <= high <= 2 for low, high in zip(least, most, strict=True))
    assert all(difference < 1e-4 for difference in metric(run, "sampling/sampling_logp_difference/max"))
    first, last = weights(tmp_path / "base"), weights(run / "final")
    assert {name for name in first if torch.equal(first[name], last[name])} == {"model.embed_tokens.weight"}
    AutoModelForCausalLM.from_pretrained(run / "final")
    again = changed(config, run={"dir": str(tmp_path / "again")})
    with pytest.raises(KeyboardInterrupt):
        cohort.train(again, display=stop_after(3))
    train(again)
    assert_same_weights(tmp_path / "again" / "final", run / "final")


def test_a_dense_model_has_nothing_to_balance(tmp_path: Path):
    config = changed(make_inputs(tmp_path), train={"router_aux_loss_coef": 0.1})
    with pytest.raises(
        UserError,
        match=r"train\.router_aux_loss_coef: 0\.1 has no effect: the model has no",
    ):
        train(config)
