"""Whole runs: golden numbers, laws 3, 4 and 6 through the front door, and what a run leaves behind."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import cohort
from cohort.cli.evaluate import eval_config
from cohort.config import config_from_dict
from cohort.display import Display
from cohort.trainer.without_training import evaluate_model
from runs import (
    REWARDS,
    assert_in_catalogue,
    assert_same_weights,
    changed,
    make_inputs,
    metric,
    stop_after,
    train,
    weights,
)
from selection import slow
from tiny import copy_task_rows, write_jsonl


def test_golden_run(tmp_path: Path):
    """Ten steps in float64, where rounding cannot choose another token: the same on every machine."""
    config = make_inputs(tmp_path, "qwen3")
    config = changed(config, model={"dtype": "float64"}, train={"steps": 10, "updates_per_rollout": 2})
    run = train(config).run_dir
    np.testing.assert_allclose(metric(run, "loss"), GOLDEN_LOSSES, rtol=1e-4, atol=1e-8)
    np.testing.assert_allclose(metric(run, "reward"), GOLDEN_REWARDS, rtol=1e-6)


GOLDEN_LOSSES = [
    -0.0200990729, -0.0409512376, -0.0464556955, -0.0423034646, -0.0430858761,
    -0.0387200998, -0.0268478294, -0.0263699867, -0.0295694431, -0.0250377299,
]  # fmt: skip
GOLDEN_REWARDS = [
    0.0154040404, 0.0194728535, 0.38477904, 0.0302861953, 0.203677399,
    0.120035173, 0.207623106, 0.210343013, 0.134220328, 0.471949405,
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "tie", "algorithm", "data_format"),
    [
        ("llama", False, {"name": "dr_grpo"}, "parquet"),
        ("qwen2", True, {"name": "dapo", "mask_truncated_completions": True}, "csv"),
        ("qwen3", False, {"name": "grpo", "beta": 0.1}, "messages"),
    ],
)
def test_architectures_algorithms_and_formats(tmp_path: Path, kind: str, tie: bool, algorithm: dict, data_format: str):
    config = changed(make_inputs(tmp_path, kind, tie=tie), train={"steps": 2})
    rows = copy_task_rows(40)
    if data_format == "messages":
        for row in rows:
            row["question"] = [{"role": "user", "content": row["question"]}]
        (tmp_path / "my_rewards.py").write_text(
            REWARDS.replace("zip(completions", "zip([m[0]['content'] for m in completions]")
        )
        write_jsonl(tmp_path / "train.jsonl", rows)
        config = changed(config, eval={"path": str(tmp_path / "train.jsonl"), "max_prompts": 5})
    else:
        import pandas

        frame, path = pandas.DataFrame(rows), tmp_path / f"train.{data_format}"
        frame.to_parquet(path) if data_format == "parquet" else frame.to_csv(path, index=False)
        config = changed(config, data={"path": str(path)})
        if data_format == "csv":  # every value of a CSV file is text
            config["rewards"] = config["rewards"][:1]
    before = {name: tensor.clone() for name, tensor in weights(tmp_path / "base").items()}
    result = train({**config, "algorithm": algorithm})
    model = AutoModelForCausalLM.from_pretrained(result.final_dir)
    assert model.config.tie_word_embeddings == tie
    assert AutoTokenizer.from_pretrained(result.final_dir).chat_template is not None
    assert all(not torch.equal(tensor, before[name]) for name, tensor in weights(result.final_dir).items())
    assert_same_weights(result.run_dir / "checkpoints" / "step-2", result.final_dir)
    if "beta" in algorithm:
        kl = metric(result.run_dir, "kl")
        assert kl[0] == pytest.approx(0, abs=1e-9) and kl[-1] > 0


def test_what_a_run_leaves_behind(tmp_path: Path):
    config = make_inputs(tmp_path)
    result = train(config)
    run = result.run_dir
    assert {p.name for p in run.iterdir()} == {
        ".lock", "checkpoints", "completions", "config.yaml", "events.jsonl", "final", "metrics.jsonl", "plan.json",
        "status.json", "summary.json", "tokens",
    }  # fmt: skip
    assert sorted(p.name for p in (run / "tokens").iterdir()) == [f"step-{n:06}.parquet" for n in range(1, 7)]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-2", "step-4", "step-6"]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 6 and summary["seed"] == 0 and summary["seconds"] > 0
    assert set(summary["accuracy_by_step"]) == {"0", "3", "6"}
    assert summary["accuracy_after"] == summary["accuracy_by_step"]["6"]
    table = pq.read_table(run / "completions" / "step-000004.parquet").to_pylist()
    assert len(table) == 3 * 4
    tokenizer = AutoTokenizer.from_pretrained(result.final_dir)
    for row in table:
        assert tokenizer.decode(row["completion_token_ids"], skip_special_tokens=True) == row["completion"]
        assert row["policy_version"] == 3
        assert row["answer"] == copy_task_rows(40)[row["prompt_id"]]["answer"]
        parts = row["rewards/digit"] + 0.1 * (row["rewards/brevity"] or 0)
        assert row["reward"] == pytest.approx(parts)
        assert (row["finish_reason"] == "stop") == (row["completion_token_ids"][-1] == tokenizer.eos_token_id)
    heldout = copy_task_rows(10, start=40)
    for row in pq.read_table(run / "completions" / "eval-000003.parquet").to_pylist():
        assert row["answer"] == heldout[row["prompt_id"]]["answer"]
    by_prompt = {row["prompt_id"]: [] for row in table}
    for row in table:
        by_prompt[row["prompt_id"]].append(row["advantage"])
    assert all(sum(advantages) == pytest.approx(0, abs=1e-9) for advantages in by_prompt.values())
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-2])
    for name in (
        "reward", "reward_std", "frac_reward_zero_std", "completions/mean_length", "completions/clipped_ratio",
        "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "grad_norm", "num_tokens",
        "time/rollout_s", "time/train_s", "step_time", "tokens_per_second", "padding_fraction", "memory/peak_bytes",
        "rewards/digit/mean", "sampling/sampling_logp_difference/max", "model_tflops_per_second", "prompt_tokens_saved",
        "memory/rollout_peak_bytes", "memory/train_peak_bytes", "memory/optim_peak_bytes",
    ):  # fmt: skip
        assert name in last, name
    assert "mfu" not in last  # nobody knows the peak of a CPU
    assert last["model_tflops_per_second"] > 0
    assert max(metric(run, "sampling/sampling_logp_difference/max")) < 1e-5
    assert_in_catalogue(run)


def test_the_gradient_does_not_depend_on_the_micro_batch_through_the_whole_run(tmp_path: Path):
    config = changed(make_inputs(tmp_path), model={"dtype": "float64"}, train={"steps": 3, "learning_rate": 1e-3})
    whole = train(changed(config, train={"micro_batch_tokens": 100_000}, run={"dir": str(tmp_path / "whole")}))
    split = train(changed(config, train={"micro_batch_tokens": 1}, run={"dir": str(tmp_path / "split")}))
    assert max(metric(split.run_dir, "micro_batches")) == 12
    np.testing.assert_allclose(metric(split.run_dir, "loss"), metric(whole.run_dir, "loss"), rtol=1e-5, atol=1e-7)
    for name, tensor in weights(split.final_dir).items():
        torch.testing.assert_close(tensor, weights(whole.final_dir)[name], rtol=1e-4, atol=1e-6)


def test_a_dataset_smaller_than_a_step(tmp_path: Path):
    config = make_inputs(tmp_path)
    write_jsonl(tmp_path / "train.jsonl", copy_task_rows(2))
    run = train(changed(config, train={"steps": 2, "prompts_per_step": 5})).run_dir
    rows = pq.read_table(run / "completions" / "step-000001.parquet").to_pylist()
    assert len(rows) == 5 * 4
    # the same prompt twice in a step is sampled anew, not repeated
    texts = [tuple(row["completion"] for row in rows[4 * p : 4 * p + 4]) for p in range(5)]
    assert len(set(texts)) == 5


def test_nothing_is_learned_from_equal_rewards(tmp_path: Path):
    config = make_inputs(tmp_path)
    (tmp_path / "my_rewards.py").write_text("def digit(completions, **kwargs): return [1.0 for _ in completions]\n")
    config["rewards"] = config["rewards"][:1]
    result = train(changed(config, train={"steps": 2}))
    assert_same_weights(result.final_dir, tmp_path / "base")
    assert metric(result.run_dir, "frac_reward_zero_std") == [1.0] * 2


@slow("test_ranks has mixed precision, and test_lora_runs a run on bfloat16 weights")
@pytest.mark.parametrize(
    ("model", "bound"),
    [({"dtype": "bfloat16"}, 0.3), ({"dtype": "float32", "compute_dtype": "bfloat16"}, 0.3)],
    ids=["bfloat16 weights", "bfloat16 autocast"],
)
def test_bfloat16(tmp_path: Path, model: dict[str, str], bound: float):
    result = train(changed(make_inputs(tmp_path), model=model))
    saved = AutoModelForCausalLM.from_pretrained(result.final_dir)
    assert saved.dtype == getattr(torch, model["dtype"])  # autocast leaves the weights in float32
    assert 0 < max(metric(result.run_dir, "sampling/sampling_logp_difference/max")) < bound
    before = weights(tmp_path / "base")
    assert any(not torch.equal(t.float(), before[name].float()) for name, t in weights(result.final_dir).items())
    with pytest.raises(KeyboardInterrupt):  # and it resumes bit for bit too
        cohort.train(
            changed(make_inputs(tmp_path), model=model, run={"dir": str(tmp_path / "b")}), display=stop_after(5)
        )
    again = train(changed(make_inputs(tmp_path), model=model, run={"dir": str(tmp_path / "b")}), resume=True)
    assert_same_weights(again.final_dir, result.final_dir)


def test_held_out_prompts_that_are_too_long_are_counted_and_tensorboard_gets_the_metrics(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = changed(make_inputs(tmp_path), train={"steps": 2}, eval={"every": 1}, run={"log": ["tensorboard"]})
    rows = [*copy_task_rows(4), {"question": "x" * 100, "answer": "1", "level": 0}]
    write_jsonl(tmp_path / "heldout.jsonl", rows)
    notes: list[str] = []

    class Notes(Display):
        def notify(self, text: str) -> None:
            notes.append(text)

    run = cohort.train(config, display=Notes()).run_dir
    assert notes[0] == "dropped 1 held-out prompts over rollout.max_prompt_tokens=64, 4 left"
    assert metric(run, "eval/num_dropped_overlong") == [1, 1, 1]
    assert metric(run, "eval/num_prompts") == [4, 4, 4] and metric(run, "num_groups") == [3] * 2
    assert not metric(run, "eval/num_groups") and len(metric(run, "eval/reward_max")) == 3
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    rewards = [event.value for event in events.Scalars("reward")]
    np.testing.assert_allclose(rewards, metric(run, "reward"), rtol=1e-6)


def test_evaluation_with_k_samples(tmp_path: Path):
    config = changed(make_inputs(tmp_path), eval={"num_samples": 8, "temperature": 1.0, "success_threshold": 0.1})
    result = evaluate_model(config_from_dict(config))
    success = np.stack([g.reward_parts["digit"] >= 0.1 for g in result.groups])
    assert success.shape == (10, 8) and 0 < success.mean() < 1
    assert result.metrics["eval/mean@8"] == result.accuracy == success.mean()
    assert result.metrics["eval/pass@8"] == success.any(axis=1).mean()
    assert result.metrics["eval/pass@8"] > result.accuracy


def test_stop_strings_end_completions_of_a_whole_run(tmp_path: Path):
    """Of training and evaluation, interrupted and resumed; the run's evaluation later has them too."""
    stop = ["1", "e", "x y"]
    config = changed(make_inputs(tmp_path), rollout={"stop": stop}, train={"steps": 3}, eval={"max_prompts": 4})
    config = changed(config, run={"checkpoint_every": 1})
    whole = train(changed(config, run={"dir": str(tmp_path / "whole")}))
    with pytest.raises(KeyboardInterrupt):
        cohort.train(config, display=stop_after(2))
    run = train(config, resume=True).run_dir
    assert_same_weights(run / "final", whole.final_dir)
    assert max(metric(run, "sampling/sampling_logp_difference/max")) < 1e-5
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    files = sorted((run / "completions").iterdir())
    assert [file.name[:5] for file in files] == ["eval-"] * 2 + ["step-"] * 3
    ends = []
    for row in [row for file in files for row in pq.read_table(file).to_pylist()]:
        ids, text = row["completion_token_ids"], row["completion"]
        assert text == tokenizer.decode(ids, skip_special_tokens=True)
        assert not any(one in tokenizer.decode(ids[:-1]) for one in stop)
        stopped, ended = any(one in tokenizer.decode(ids) for one in stop), ids[-1] == tokenizer.eos_token_id
        assert row["finish_reason"] == ("stop" if stopped or ended else "length")
        ends.append((stopped, ended))
    assert {(True, False), (False, False)} <= {*ends}
    assert eval_config(str(run), {}).rollout.stop == ("1", "e", "x y")
    assert eval_config(str(run), {"stop": ["z"]}).rollout.stop == ("z",)


@slow("the local engine's completions with stop strings do not depend on the batch")
def test_stop_strings_on_two_processes(tmp_path: Path):
    config = changed(make_inputs(tmp_path), rollout={"stop": ["1", "e"]}, train={"steps": 2})
    config["eval"] = None
    texts = []
    for processes in (1, 2):
        run = {"dir": str(tmp_path / f"on-{processes}")}
        cohort.train(changed(config, run=run, hardware={"processes": processes, "device": "cpu"}))
        tables = [pq.read_table(file) for file in sorted(Path(run["dir"], "completions").glob("step-*"))]
        texts.append([table.column("completion_token_ids").to_pylist() for table in tables])
    assert texts[0] == texts[1]
