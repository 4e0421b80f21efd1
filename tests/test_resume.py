"""A run that was interrupted, killed or finished goes on as if it had not been (law 4)."""

import random
import signal
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import cohort
from runs import assert_same_weights, changed, make_inputs, metric, same_threads, stop_after, train
from waiting import num_lines


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


def test_a_finished_run_goes_on_when_it_gets_more_steps(tmp_path: Path):
    config = make_inputs(tmp_path)
    expected = train(changed(config, train={"steps": 8}, run={"dir": str(tmp_path / "whole")}))
    first = train(config)
    assert train(config).summary == first.summary  # nothing to do
    actual = train(changed(config, train={"steps": 8}))
    assert_same_weights(actual.final_dir, expected.final_dir)
    assert metric(actual.run_dir, "loss") == metric(expected.run_dir, "loss")


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
