"""Whole runs of a mixture of experts: a loss of its routers, frozen weights, and going on from a checkpoint."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import cohort
from cohort.data import read_rows
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


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_a_trainer_goes_on_with_saved_weights(tmp_path: Path, is_offloaded: bool, monkeypatch: pytest.MonkeyPatch):
    """Their names and shapes differ from those in memory, and so may the weights that the optimizer updates."""
    monkeypatch.setattr("cohort.trainer.setup.check_cpu_offload", lambda *_, **__: None)  # that of GPUs, here
    config = changed(moe_run(tmp_path), model={"freeze": []}, optim={"name": "adamw", "offload": is_offloaded})
    rows = read_rows(config["data"]["path"], field="data.path")
    rest = {name: config[name] for name in ("rollout", "train", "run", "optim")}
    trainer = cohort.Trainer(config["model"], {"path": rows, "prompt": "question"}, config["rewards"], **rest)
    trainer.save(tmp_path / "first")
    steps = iter(trainer)
    next(steps)
    trainer.save(tmp_path / "second")
    trainer.load(tmp_path / "first")
    held = dict(trainer.model.named_parameters())["model.layers.0.mlp.experts.down_proj"].detach().clone()
    trainer.save(tmp_path / "third")
    assert_same_weights(tmp_path / "third", tmp_path / "first")
    name = "model.layers.0.mlp.experts.0.down_proj.weight"
    torch.testing.assert_close(held[0], weights(tmp_path / "first")[name])
    assert not torch.equal(held[0], weights(tmp_path / "second")[name])
