"""A run that was interrupted, killed or finished goes on as if it had not been (law 4)."""

import json
import random
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import cohort
from runs import assert_same_weights, changed, in_a_process, make_inputs, metric, stop_after, train, train_and_be_killed
from selection import mostly_slow


@pytest.mark.parametrize("dropout", mostly_slow([0.0, 0.1], 0.1, reason="dropout adds random numbers to it"))
def test_interrupted_and_resumed_is_uninterrupted_bit_for_bit(tmp_path: Path, dropout: float):
    config = changed(make_inputs(tmp_path, attention_dropout=dropout), model={"dropout": dropout > 0})
    config = changed(config, train={"lr_schedule": "cosine", "warmup_steps": 1, "updates_per_rollout": 2})
    expected = train(changed(config, run={"dir": str(tmp_path / "whole")}))

    with pytest.raises(KeyboardInterrupt):
        cohort.train(config, display=stop_after(5))
    actual = train(config, resume=True)
    assert_same_weights(actual.final_dir, expected.final_dir)
    for name in ("loss", "reward", "grad_norm", "learning_rate", "eval/reward", "num_tokens"):
        assert metric(actual.run_dir, name) == metric(expected.run_dir, name), name


@pytest.mark.parametrize(
    ("steps", "kills"),
    mostly_slow([(9, ((2, 4),)), (30, ((1, 8), (10, 17), (19, 26)))], (9, ((2, 4),)), reason="three kills"),
    ids=["one", "three"],
)
def test_killed_at_random_moments_and_resumed_by_the_same_command(
    tmp_path: Path, steps: int, kills: tuple[tuple[int, int], ...]
):
    """SIGKILL at random moments of some stretches, then nothing; compare every weight."""
    config = changed(make_inputs(tmp_path), train={"steps": steps}, eval={"every": 7}, run={"checkpoint_every": 3})
    config = changed(config, run={"record_tokens": True})
    expected = train(changed(config, run={"dir": str(tmp_path / "whole")}))
    chance = random.Random(0)
    for first, last in kills:
        train_and_be_killed(config, chance.randint(first, last), chance.random() * 0.05)
    assert in_a_process(train, config) == 0
    assert_same_weights(tmp_path / "run" / "final", expected.final_dir)
    for name in ("loss", "reward", "eval/reward"):
        assert metric(tmp_path / "run", name) == metric(expected.run_dir, name), name
    for folder in ("completions", "tokens"):
        steps = sorted(p.name for p in (tmp_path / "run" / folder).iterdir())
        assert steps == sorted(p.name for p in (expected.run_dir / folder).iterdir())
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert [events.count(f'"event": "{name}"') for name in ("start", "stop", "end")] == [len(kills) + 1, 0, 1]


def test_a_finished_run_goes_on_when_it_gets_more_steps(tmp_path: Path):
    config = changed(make_inputs(tmp_path), train={"steps": 2})
    expected = train(changed(config, train={"steps": 4}, run={"dir": str(tmp_path / "whole")}))
    first = train(config)
    assert train(config).summary == first.summary  # nothing to do
    actual = train(changed(config, train={"steps": 4}))
    assert_same_weights(actual.final_dir, expected.final_dir)
    assert metric(actual.run_dir, "loss") == metric(expected.run_dir, "loss")


@pytest.mark.parametrize("name", mostly_slow(["wandb", "trackio"], "wandb", reason="another name for the same calls"))
def test_loggers_go_on_with_their_run_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    """With a stand-in for the package: what it is told to start, and that all metrics reach it; warnings, once."""
    started, logged, alerts = [], [], []
    run = SimpleNamespace(
        log=lambda metrics, step=None: logged.append(step if step is not None else metrics["step"]),
        alert=lambda **alert: alerts.append(alert),
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
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    warnings = [e["text"].removeprefix("warning: ") for e in events if e["event"] == "warning"]
    assert alerts and [alert["text"] for alert in alerts] == [text for text in warnings if text.startswith("step ")]
