"""Whole runs: golden numbers, laws 3, 4 and 6 through the front door, and what a run leaves behind."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import cohort
from cohort.config import config_from_dict
from cohort.display import Display
from cohort.policy import Policy
from cohort.trainer.evaluate_model import evaluate_model
from tiny import copy_task_rows, save_model_folder, write_jsonl
from waiting import num_lines

REWARDS = '''
"""Rewards in TRL's signature."""

def digit(prompts, completions, answer, **kwargs):
    return [float(a in c) + 0.1 * sum(x.isdigit() for x in c) / max(1, len(c)) for c, a in zip(completions, answer)]

async def brevity(completions, completion_ids, level, **kwargs):
    assert len(level) == len(completions)
    return [None if n == 3 else -len(ids) / 16 for ids, n in zip(completion_ids, level)]
'''


def make_inputs(folder: Path, kind: str = "llama", **model: Any) -> dict[str, Any]:
    """A model, data and rewards as files, and a configuration of 6 quick steps."""
    save_model_folder(folder / "base", kind, **model)
    write_jsonl(folder / "train.jsonl", copy_task_rows(40))
    write_jsonl(folder / "heldout.jsonl", copy_task_rows(10, start=40))
    (folder / "my_rewards.py").write_text(REWARDS)
    return {
        "model": {"path": str(folder / "base")},
        "data": {"path": str(folder / "train.jsonl"), "prompt": "question"},
        "rewards": [
            {"use": f"{folder}/my_rewards.py:digit"},
            {"use": f"{folder}/my_rewards.py:brevity", "weight": 0.1},
        ],
        "rollout": {"num_generations": 4, "max_prompt_tokens": 64, "max_completion_tokens": 12},
        "train": {"steps": 6, "prompts_per_step": 3, "micro_batch_tokens": 256, "learning_rate": 1e-2},
        "eval": {"path": str(folder / "heldout.jsonl"), "every": 3, "success_threshold": 0.5},
        "run": {"dir": str(folder / "run"), "checkpoint_every": 2},
    }


def changed(config: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    return {**config, **{name: {**config.get(name, {}), **keys} for name, keys in sections.items()}}


def train(config: dict[str, Any], **kwargs: Any) -> cohort.RunResult:
    return cohort.train(config, display=Display(), **kwargs)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_weights(actual: Path, expected: Path) -> None:
    a, b = weights(actual), weights(expected)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def metric(run: Path, name: str) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


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
    config = make_inputs(tmp_path, kind, tie=tie)
    rows = copy_task_rows(40)
    if data_format == "messages":
        for row in rows:
            row["question"] = [{"role": "user", "content": row["question"]}]
        (tmp_path / "my_rewards.py").write_text(
            REWARDS.replace("for c, a", "for c, a").replace(
                "zip(completions", "zip([m[0]['content'] for m in completions]"
            )
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
    assert_same_weights(result.run_dir / "checkpoints" / "step-6", result.final_dir)
    if "beta" in algorithm:
        kl = metric(result.run_dir, "kl")
        assert kl[0] == pytest.approx(0, abs=1e-9) and kl[-1] > 0


def test_what_a_run_leaves_behind(tmp_path: Path):
    config = make_inputs(tmp_path)
    result = train(config)
    run = result.run_dir
    assert {p.name for p in run.iterdir()} == {
        ".lock", "checkpoints", "completions", "config.yaml", "final", "metrics.jsonl", "summary.json",
    }  # fmt: skip
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
        parts = row["rewards/digit"] + 0.1 * (row["rewards/brevity"] or 0)
        assert row["reward"] == pytest.approx(parts)
        assert (row["finish_reason"] == "stop") == (row["completion_token_ids"][-1] == tokenizer.eos_token_id)
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


def test_the_gradient_does_not_depend_on_the_micro_batch_through_the_whole_run(tmp_path: Path):
    config = changed(make_inputs(tmp_path), model={"dtype": "float64"}, train={"learning_rate": 1e-3})
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
    result = train(config)
    assert_same_weights(result.final_dir, tmp_path / "base")
    assert metric(result.run_dir, "frac_reward_zero_std") == [1.0] * 6


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_interrupted_and_resumed_is_uninterrupted_bit_for_bit(tmp_path: Path, dropout: float):
    config = make_inputs(tmp_path, attention_dropout=dropout)
    config = changed(config, train={"lr_schedule": "cosine", "warmup_steps": 1, "updates_per_rollout": 2})
    expected = train(changed(config, run={"dir": str(tmp_path / "whole")}))

    with pytest.raises(KeyboardInterrupt):
        cohort.train(config, display=stop_after(5))
    actual = train(config, resume=True)
    assert_same_weights(actual.final_dir, expected.final_dir)
    for name in ("loss", "reward", "grad_norm", "learning_rate", "eval/reward", "num_tokens"):
        assert metric(actual.run_dir, name) == metric(expected.run_dir, name), name


CHILD = """
import sys
import cohort
from cohort.display import Display
from cohort.policy import Policy
cohort.train(sys.argv[1], display=Display())
"""


def test_killed_at_random_moments_and_resumed_by_the_same_command(tmp_path: Path):
    """SIGKILL after random numbers of new metrics lines, until the run gets through; then compare every weight."""
    import yaml

    config = changed(make_inputs(tmp_path), train={"steps": 30}, eval={"every": 7}, run={"checkpoint_every": 3})
    expected = train(changed(config, run={"dir": str(tmp_path / "whole")}))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    metrics, chance, kills = tmp_path / "run" / "metrics.jsonl", random.Random(0), 0
    while True:
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path / "config.yaml")], env=same_threads())
        start, lines = num_lines(metrics), chance.randint(1, 12)
        deadline = time.monotonic() + 120
        while child.poll() is None and time.monotonic() < deadline:
            if kills < 3 and 0 < num_lines(metrics) != start and abs(num_lines(metrics) - start) >= lines:
                time.sleep(chance.random() * 0.05)
                child.send_signal(signal.SIGKILL)
                kills += child.wait() == -signal.SIGKILL
                break
            time.sleep(0.002)
        if child.wait(timeout=120) == 0:
            break
        assert child.returncode == -signal.SIGKILL
    assert kills == 3
    assert_same_weights(tmp_path / "run" / "final", expected.final_dir)
    for name in ("loss", "reward", "eval/reward"):
        assert metric(tmp_path / "run", name) == metric(expected.run_dir, name), name
    steps = sorted(p.name for p in (tmp_path / "run" / "completions").iterdir())
    assert steps == sorted(p.name for p in (expected.run_dir / "completions").iterdir())


def same_threads() -> dict[str, str]:
    # bit for bit needs the same number of threads: that of this process
    return {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}


def test_a_finished_run_goes_on_when_it_gets_more_steps(tmp_path: Path):
    config = make_inputs(tmp_path)
    expected = train(changed(config, train={"steps": 8}, run={"dir": str(tmp_path / "whole")}))
    first = train(config)
    assert train(config).summary == first.summary  # nothing to do
    actual = train(changed(config, train={"steps": 8}))
    assert_same_weights(actual.final_dir, expected.final_dir)
    assert metric(actual.run_dir, "loss") == metric(expected.run_dir, "loss")


def test_tensorboard_gets_the_metrics(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(changed(make_inputs(tmp_path), run={"log": ["tensorboard"]})).run_dir
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    rewards = [event.value for event in events.Scalars("reward")]
    np.testing.assert_allclose(rewards, metric(run, "reward"), rtol=1e-6)


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


def stop_after(steps: int) -> Display:
    class Interrupt(Display):
        def step(self, report):
            if report.steps_done == steps:
                raise KeyboardInterrupt

    return Interrupt()


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_loggers_go_on_with_their_run_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    """With a stand-in for the package: what it is told to start, and that all metrics reach it."""
    started, logged = [], []
    run = SimpleNamespace(
        log=lambda metrics, step=None: logged.append(step if step is not None else metrics["step"]),
        define_metric=lambda *_, **__: None,
        finish=lambda: None,
    )
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.init = lambda **kwargs: started.append(kwargs) or run
    monkeypatch.setitem(sys.modules, name, module)
    config = changed(make_inputs(tmp_path), run={"log": [name]})
    with pytest.raises(KeyboardInterrupt):
        cohort.train(config, display=stop_after(5))
    train(config)
    identity = "id" if name == "wandb" else "name"
    assert len(started) == 2 and started[0][identity] == started[1][identity]
    assert set(logged) == {0, 1, 2, 3, 4, 5, 6}


def test_held_out_prompts_that_are_too_long_are_counted(tmp_path: Path):
    config = make_inputs(tmp_path)
    rows = [*copy_task_rows(4), {"question": "x" * 100, "answer": "1", "level": 0}]
    write_jsonl(tmp_path / "heldout.jsonl", rows)
    notes: list[str] = []

    class Notes(Display):
        def note(self, text: str) -> None:
            notes.append(text)

    run = cohort.train(config, display=Notes()).run_dir
    assert notes == ["1 held-out prompts over rollout.max_prompt_tokens: 64 dropped, 4 left"]
    assert metric(run, "eval/num_dropped_overlong") == [1, 1, 1]


def test_evaluation_with_k_samples(tmp_path: Path):
    config = changed(make_inputs(tmp_path), eval={"num_samples": 8, "temperature": 1.0, "success_threshold": 0.1})
    result = evaluate_model(config_from_dict(config))
    success = np.stack([g.reward_parts["digit"] >= 0.1 for g in result.groups])
    assert success.shape == (10, 8) and 0 < success.mean() < 1
    assert result.metrics["eval/mean@8"] == result.accuracy == success.mean()
    assert result.metrics["eval/pass@8"] == success.any(axis=1).mean()
    assert result.metrics["eval/pass@8"] > result.accuracy


class Notes(Display):
    """Keeps what a person would be told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def note(self, text: str) -> None:
        self.told.append(text)


def no_room_for_more_than(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator that refuses micro-batches of more than `tokens` tokens, after their forward pass."""
    real = Policy.logprobs

    def logprobs(self, micro_batch, **kwargs):
        out = real(self, micro_batch, **kwargs)
        if len(micro_batch.input_ids) > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        return out

    monkeypatch.setattr(Policy, "logprobs", logprobs)


def test_out_of_memory_is_survived_shown_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    train_keys = {"learning_rate": 1e-3, "updates_per_rollout": 2}
    config = changed(make_inputs(tmp_path), model={"dtype": "float64"}, train=train_keys)
    expected = train(changed(config, run={"dir": str(tmp_path / "whole")}))
    no_room_for_more_than(60, monkeypatch)
    notes = Notes()
    result = cohort.train(changed(config, train={"steps": 4}), display=notes)
    events, budgets = metric(result.run_dir, "out_of_memory"), metric(result.run_dir, "micro_batch_tokens")
    assert events[0] >= 1 and 25 < budgets[-1] <= 60
    assert notes.told == [
        f"out of memory in {number} micro-batches, which were computed again in parts: the gradient is the same, and "
        f"the budget is {budget} tokens from here on"
        for number, budget in zip(events, budgets, strict=True)
        if number
    ]
    result = train(config)  # goes on with the budget that was found
    assert metric(result.run_dir, "micro_batch_tokens")[4:] == budgets[-1:] * 2
    assert metric(result.run_dir, "out_of_memory")[4:] == [0, 0]
    np.testing.assert_allclose(metric(result.run_dir, "loss"), metric(expected.run_dir, "loss"), rtol=1e-5, atol=1e-8)
    for name, tensor in weights(result.final_dir).items():
        torch.testing.assert_close(tensor, weights(expected.final_dir)[name], rtol=1e-5, atol=1e-7)


def test_gradients_in_forward_without_a_known_head_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = changed(make_inputs(tmp_path), train={"gradients_in_forward": True, "steps": 1})
    monkeypatch.setattr("cohort.policy.policy.find_head", lambda model: None)
    with pytest.raises(cohort.UserError, match=r"train.gradients_in_forward: true has no effect on this model.*remove"):
        train(config)
    notes = Notes()
    cohort.train(changed(config, train={"gradients_in_forward": False}), display=notes)
    assert notes.told == [
        "the model computes its full logits, because its head is not a linear layer that is known here"
    ]


@pytest.mark.parametrize(("window", "layout"), [(8, "padded"), (512, "shared")])
def test_a_run_says_why_its_rows_are_padded(tmp_path: Path, window: int, layout: str):
    """A window matters where the run's longest sequence is longer, which is known from its data."""
    config = changed(make_inputs(tmp_path, "mistral", sliding_window=window), train={"steps": 1})
    notes = Notes()
    result = cohort.train(config, display=notes)
    shared = metric(result.run_dir, "prompt_tokens_saved")[0]
    if layout == "padded":
        (told,) = notes.told
        assert told.startswith("the model is computed in padded rows, because its longest sequence of ")
        assert told.endswith("tokens is longer than its attention window of 8 tokens") and shared == 0
    else:
        assert not notes.told and shared > 0


def test_a_sequence_that_does_not_fit_by_itself_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    no_room_for_more_than(10, monkeypatch)
    with pytest.raises(cohort.TrainingError, match=r"out of memory on a single sequence of \d+ tokens.*checkpointing"):
        train(make_inputs(tmp_path))


@pytest.mark.parametrize("room", [70, 10_000])
def test_the_budget_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int):
    config = changed(make_inputs(tmp_path), train={"micro_batch_tokens": "auto", "steps": 2})
    no_room_for_more_than(room, monkeypatch)
    notes = Notes()
    result = cohort.train(config, display=notes)
    (budget,) = set(metric(result.run_dir, "micro_batch_tokens"))
    if room == 70:
        assert 0.9 * 70 / 1.1 <= budget <= 70
        assert notes.told == [f"train.micro_batch_tokens: auto: {budget:.0f} tokens, the most that fits"]
    else:
        assert notes.told == [
            f"train.micro_batch_tokens: auto: {budget:.0f} tokens, a whole step's share of one process"
        ]
        assert budget == 12 * (8 + 12 - 1)  # 12 sequences of the longest prompt and the longest completion
    assert metric(result.run_dir, "out_of_memory") == [0, 0]
