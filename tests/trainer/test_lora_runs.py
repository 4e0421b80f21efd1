"""Runs that train an adapter: going on, merging, and refusing before anything is read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import cohort
from cohort.cli.merge import merge as merge_command
from cohort.config import config_from_dict
from cohort.errors import UserError
from cohort.models import Policy
from cohort.trainer.without_training import evaluate_model
from runs import changed, make_inputs, metric, stop_after, train
from selection import slow

# Runs


def run_config(folder: Path, **adapter: Any) -> dict[str, Any]:
    """A run with a KL term, so that there is a reference."""
    config = changed(make_inputs(folder, "qwen2"), model={"adapter": adapter})
    return {**config, "algorithm": {"name": "grpo", "beta": 0.05}}


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=slow("bfloat16 is tried")), "bfloat16"])
def test_a_run_resumes_bit_for_bit_and_leaves_an_adapter(tmp_path: Path, dtype: str):
    config = changed(run_config(tmp_path, rank=4), model={"dtype": dtype})
    whole = train(changed(config, run={"dir": str(tmp_path / "whole")}))
    with pytest.raises(KeyboardInterrupt):
        cohort.train(config, display=stop_after(5))
    again = train(config, resume=True)
    files = {p.name for p in again.final_dir.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files
    assert not files & {"config.json", "model.safetensors"}
    checkpoint = again.run_dir / "checkpoints/step-6"
    assert not (checkpoint / "model.safetensors").exists()
    first, second, saved = (
        load_file(f / "adapter_model.safetensors") for f in (whole.final_dir, again.final_dir, checkpoint)
    )
    assert len(first) == 28 and {t.dtype for t in first.values()} == {torch.float32}
    assert all(torch.equal(first[key], second[key]) and torch.equal(first[key], saved[key]) for key in first)
    for name in ("loss", "reward", "kl", "grad_norm", "eval/reward"):
        assert metric(again.run_dir, name) == metric(whole.run_dir, name), name
    kl = metric(whole.run_dir, "kl")
    assert kl[0] == 0 and kl[-1] > 0
    # the sampler has the adapter too: without it the difference grows with the KL term
    assert max(metric(whole.run_dir, "sampling/sampling_logp_difference/max")) < (1e-4 if dtype == "float32" else 0.3)


def test_a_sampler_without_the_adapter_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Negative control of the test above."""
    logits = Policy.packed_logits

    def off(self: Policy, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert self.adapter is not None
        with self.adapter.reference():
            return logits(self, *args, **kwargs)

    monkeypatch.setattr(Policy, "packed_logits", off)
    run = train(run_config(tmp_path, rank=4)).run_dir
    assert max(metric(run, "sampling/sampling_logp_difference/max")) > 0.05


def test_going_on_evaluating_and_merging(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What a run leaves is a start of another, a model for `cohort eval`, and merges."""
    config = changed(run_config(tmp_path, rank=4, alpha=6), train={"steps": 3})
    first = train(config)
    second = train(
        changed(config, model={"adapter": {"path": str(first.final_dir)}}, run={"dir": str(tmp_path / "on")})
    )
    assert metric(second.run_dir, "kl")[0] == 0  # the reference is what it started from
    written = (second.run_dir / "config.yaml").read_text()
    assert "rank:" not in written and "rank: 4" in (first.run_dir / "config.yaml").read_text()
    merge_command(second.run_dir, tmp_path / "merged")
    assert str(tmp_path / "merged") in capsys.readouterr().out

    def accuracy(path: Path) -> float:
        changes = {"model": {"path": str(path)}, "eval": {"success_threshold": 0.05}}
        return evaluate_model(
            config_from_dict({**config, **changes, "eval": {**config["eval"], **changes["eval"]}})
        ).metrics["eval/reward"]

    assert accuracy(second.final_dir) == pytest.approx(accuracy(tmp_path / "merged"), abs=1e-6)
    assert accuracy(second.final_dir) != accuracy(tmp_path / "base")
    with pytest.raises(UserError, match="exists and is not empty"):
        merge_command(second.run_dir, tmp_path / "merged")
    with pytest.raises(UserError, match=r"contains no adapter \(but .*config.json"):
        merge_command(tmp_path / "base", tmp_path / "other")


def test_it_is_refused_before_any_weights_are_read(tmp_path: Path):
    config = run_config(tmp_path, targets=["q_prj"])
    weights = tmp_path / "base/model.safetensors"
    header = weights.read_bytes()
    weights.write_bytes(header[:8] + header[8:])
    with pytest.raises(UserError, match="nearest: q_proj"):
        train(config)
    assert not (tmp_path / "run").exists()
