"""Runs whose data stay on disk are those whose data are in memory."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import cohort
from cohort.cli.evaluate import eval_config
from cohort.cli.plan import plan_run
from cohort.cli.rescore import rescore
from cohort.config import config_from_dict
from cohort.display import Display, ProgressBar
from cohort.plan.hardware import local_cpu
from cohort.trainer.without_training import evaluate_model, sample_rows
from runs import assert_same_weights, changed, make_inputs, metric, train


def test_a_run_with_data_on_disk_is_the_same_bit_for_bit_also_when_it_resumes(tmp_path, monkeypatch):
    config = changed(make_inputs(tmp_path), train={"steps": 4, "micro_batch_tokens": "auto"})
    train(changed(config, run={"dir": str(tmp_path / "in_memory")}))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("cohort.data.files._IN_MEMORY_BYTES", 0)
    on_disk = changed(config, run={"dir": str(tmp_path / "on_disk")})
    train(changed(on_disk, train={"steps": 2}))
    assert len(list((tmp_path / "cache").rglob("*.arrow"))) == 2, "training and held-out rows"
    train(on_disk, resume=True)
    assert_same_weights(tmp_path / "on_disk" / "final", tmp_path / "in_memory" / "final")
    for name in ("reward", "loss", "eval/accuracy"):
        values = metric(tmp_path / "on_disk", name)
        assert values and values[-1] == metric(tmp_path / "in_memory", name)[-1], name


class Listening(Display):
    """Keeps the names of what takes long."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def data_progress(self, name: str, done: float, total: float) -> None:
        self.names[name] = None


def told(listening: Listening) -> dict[str, Any]:
    return {"on_data_progress": listening.data_progress}


def test_every_command_tells_how_far_its_data_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = make_inputs(tmp_path)
    (tmp_path / "rows.py").write_text("def same(row): return row\n")
    config = changed(config, train={"steps": 1}, data={"map": f"{tmp_path}/rows.py:same"})
    settings = config_from_dict(config)
    monkeypatch.setattr("cohort.data.files._IN_MEMORY_BYTES", 0)

    def names_of(command: str, use: Any) -> list[str]:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / command))
        use(listening := Listening())
        return list(listening.names)

    training = [f"{doing} train.jsonl (MB)" for doing in ("reading", "converting")] + ["calling data.map"]
    held_out = [f"{doing} heldout.jsonl (MB)" for doing in ("reading", "converting")]
    of_train = names_of("train", lambda listening: cohort.train(config, display=listening))
    assert of_train == [*training, *held_out, "tokenizing prompts"]
    assert (
        names_of("rollout", lambda listening: sample_rows(settings, rows=1, generations=1, **told(listening)))
        == of_train
    )
    run = settings.run.dir
    of_eval = names_of("eval", lambda listening: evaluate_model(eval_config(run, {}), **told(listening)))
    assert of_eval == [*held_out, "tokenizing prompts"]
    file = Path(run) / "completions" / "step-000001.parquet"
    assert names_of("reward", lambda listening: rescore(settings, file, **told(listening))) == [
        "reading step-000001.parquet (MB)",
        *(f"converting {column} of step-000001.parquet" for column in pq.read_schema(file).names),
        *training,
    ]

    def plan(listening: Listening) -> None:
        monkeypatch.setattr(ProgressBar, "data_progress", lambda self, *how: listening.data_progress(*how))
        plan_run(settings, local_cpu(1), tmp_path, model=None)

    assert names_of("plan", plan) == training
