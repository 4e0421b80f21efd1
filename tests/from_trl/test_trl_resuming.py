"""`train(resume_from_checkpoint=...)`, and new runs in a folder that has one already."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, TrainerCallback

from cohort.errors import TrainingError, UserError
from cohort.trl import GRPOTrainer
from runs import assert_same_weights, metric
from scripted import digits, rows, settings
from selection import mostly_slow
from tiny import save_model_folder

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")


class StopAfter(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == self.step


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_folder(tmp_path_factory.mktemp("model") / "base", "qwen3")


def make(base: Path, out: Path, *callbacks: Any, as_object: bool = False, **given: Any) -> GRPOTrainer:
    args = settings(out, **{"save_strategy": "steps", "save_steps": 1, **given})
    model = AutoModelForCausalLM.from_pretrained(base) if as_object else str(base)
    return GRPOTrainer(model, digits, args, rows(), callbacks=list(callbacks))


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps without interruptions."""
    out = tmp_path_factory.mktemp("whole") / "out"
    make(base, out).train()
    return out


def assert_same_run(out: Path, whole: Path, *, run: str = "cohort") -> None:
    assert_same_weights(out / "checkpoint-4", whole / "checkpoint-4")
    assert_same_weights(out / run / "final", whole / "checkpoint-4")
    assert metric(out / run, "reward") == metric(whole / "cohort", "reward")


def test_from_the_last_checkpoint(tmp_path: Path, base: Path, whole: Path):
    out = tmp_path / "out"
    assert make(base, out, StopAfter(3)).train().global_step == 3
    again = make(base, out)
    again.train(resume_from_checkpoint=True)
    assert_same_run(out, whole)
    assert [entry["step"] for entry in again.state.log_history if "loss" in entry] == [1, 2, 3, 4]
    again = make(base, out)
    assert again.train(resume_from_checkpoint=True).global_step == 4, "there is nothing left to do"
    again.save_model(str(tmp_path / "final"))
    assert_same_weights(tmp_path / "final", whole / "checkpoint-4")


@pytest.mark.parametrize(
    "as_object", mostly_slow([False, True], True, reason="test_only_the_last_checkpoints_stay has a path")
)
def test_from_an_earlier_checkpoint(tmp_path: Path, base: Path, whole: Path, as_object: bool):
    """The run that has gone further stays as it is, and its later checkpoints are moved."""
    out = tmp_path / "out"
    make(base, out, as_object=as_object).train()
    last = (out / "checkpoint-4" / "model.safetensors").read_bytes()
    trainer = make(base, out, as_object=as_object)
    assert trainer.model is not None, "which makes a folder that is not used"
    trainer.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    assert_same_run(out, whole, run="cohort-2")
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [1, 2, 3, 4]
    assert metric(out / "cohort", "reward") == metric(whole / "cohort", "reward")
    assert sorted(p.name for p in (out / "earlier").iterdir()) == ["checkpoint-3", "checkpoint-4"]
    assert (out / "earlier" / "checkpoint-4" / "model.safetensors").read_bytes() == last
    again = make(base, out, as_object=as_object)
    again.train(resume_from_checkpoint=str(out / "earlier" / "checkpoint-3"))
    assert_same_run(out, whole, run="cohort-3")


TARGETS = ("another folder", "another run there", "the run is gone", "a model object")


@pytest.mark.parametrize("target", mostly_slow(TARGETS, "another run there", reason="where it is hardest to find"))
def test_wherever_the_run_of_a_checkpoint_is(tmp_path: Path, base: Path, whole: Path, target: str):
    """It is copied to where the new run writes, and goes on from there."""
    first, out, as_object = tmp_path / "first", tmp_path / "out", target == "a model object"
    make(base, first, StopAfter(2), as_object=as_object).train()
    if target == "the run is gone":
        shutil.rmtree(first / "cohort")
        out = first
    if target == "another run there":  # whose last step has the same name
        make(base, out, StopAfter(2), seed=3).train()
    trainer = make(base, out, as_object=as_object)
    assert trainer.train(resume_from_checkpoint=str(first / "checkpoint-2")).global_step == 4
    run = out / ("cohort-2" if target == "another run there" else "cohort")
    assert_same_weights(out / "checkpoint-4", whole / "checkpoint-4")
    steps = slice(2 if target == "the run is gone" else 0, None)  # its metrics are gone too
    assert metric(run, "reward") == metric(whole / "cohort", "reward")[steps]
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [1, 2, 3, 4]
    assert (out / "earlier" / "checkpoint-2").is_dir() == (target == "another run there")


def test_a_second_resume_keeps_all_ancestors_and_the_best_model(tmp_path: Path, base: Path):
    given: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    given |= {"metric_for_best_model": "eval_reward", "greater_is_better": False}

    class FirstIsBest(GRPOTrainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            return {**super().evaluate(*args, **kwargs), "eval_reward": self.state.global_step}

    def train(resume: str | None = None) -> FirstIsBest:
        args = settings(out, save_strategy="steps", save_steps=1, **given)
        trainer = FirstIsBest(str(base), digits, args, rows(), rows(2))
        trainer.train(resume_from_checkpoint=resume and str(out / resume))
        return trainer

    out = tmp_path / "out"
    train()
    train("checkpoint-2")
    trainer = train("checkpoint-3")
    assert sorted(p.name for p in out.glob("checkpoint-*")) == [f"checkpoint-{n}" for n in (1, 2, 3, 4)]
    trainer.save_model(str(tmp_path / "final"))
    assert_same_weights(tmp_path / "final", out / "checkpoint-1")
    trainer = train("earlier/checkpoint-4")  # of the first run: checkpoint-3 is of another one
    assert trainer.state.best_model_checkpoint == str(out / "checkpoint-1")
    make(base, out, max_steps=1).train()  # writes another checkpoint-1
    trainer = train("earlier-4/checkpoint-2")
    assert trainer.state.best_model_checkpoint == str(out / "earlier-4" / "checkpoint-1")


def test_a_best_model_that_was_deleted(tmp_path: Path, base: Path):
    trainer = make(base, tmp_path / "out")
    with pytest.raises(TrainingError, match=r"gone: has no weights to load"):
        trainer._built().load(tmp_path / "gone")


def test_a_new_run_starts_anew_and_loses_nothing(
    tmp_path: Path, base: Path, whole: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"
    make(base, out, StopAfter(2)).train()
    assert make(base, out).train().global_step == 4
    assert f"checkpoint-1, checkpoint-2 of an earlier run: now in {out / 'earlier'}" in capsys.readouterr().out
    assert_same_run(out, whole, run="cohort-2")
    assert len(metric(out / "cohort", "reward")) == 2
    with pytest.raises(UserError, match=r"output_dir: .* has the model, .*; use another output_dir"):
        make(out / "checkpoint-4", out).train()


def test_what_cannot_be_resumed(tmp_path: Path, base: Path, whole: Path):
    with pytest.raises(UserError, match=r"has no checkpoint-N; leave it out"):
        make(base, tmp_path / "empty").train(resume_from_checkpoint=True)
    make(base, tmp_path / "out", save_only_model=True).train()
    with pytest.raises(UserError, match=r"checkpoint-2' has no state that Cohort resumes from; use one of none in"):
        make(base, tmp_path / "out").train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))


def test_an_interrupted_run_has_a_checkpoint(tmp_path: Path, base: Path, whole: Path, in_foreground: None):
    class Interrupt(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                os.kill(os.getpid(), signal.SIGINT)

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        make(base, out, Interrupt, save_strategy="no").train()
    assert [p.name for p in out.glob("checkpoint-*")] == ["checkpoint-3"]
    make(base, out, save_steps=4).train(resume_from_checkpoint=True)
    assert_same_run(out, whole)


def test_only_the_last_checkpoints_stay(tmp_path: Path, base: Path, whole: Path):
    out = tmp_path / "out"
    make(base, out, StopAfter(3), save_total_limit=2).train()
    assert sorted(p.name for p in out.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]
    make(base, out).train(resume_from_checkpoint=str(out / "checkpoint-2"))
    assert_same_run(out, whole, run="cohort-2")
