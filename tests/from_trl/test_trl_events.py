"""When callbacks are called, and what they and the trainer remember."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from cohort.errors import UserError
from cohort.trl import GRPOTrainer
from runs import metric
from scripted import digits, rows, settings
from tiny import save_model_folder

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model_folder(tmp_path_factory.mktemp("model") / "base", "qwen3"))


class Counter(TrainerCallback, ExportableState):
    def __init__(self, name: str = "none") -> None:
        self.name, self.steps, self.epochs, self.saved = name, 0, 0, list[int]()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.epochs += 1

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved.append(state.global_step)

    def state(self) -> dict[str, Any]:
        return {"args": {"name": self.name}, "attributes": {"steps": self.steps}}


def test_events_of_several_updates_per_rollout(tmp_path: Path, base: str):
    """A rollout has two updates, of two micro-batches each, and what is said of both comes after the second."""
    seen: list[Any] = []

    class Note(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(("substep", state.global_step))

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            assert all(p.grad is not None for p in model.parameters())
            self.before = [p.detach().clone() for p in model.parameters()]
            seen.append(("clipped", state.global_step))

        def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            changed = any(not torch.equal(a, b) for a, b in zip(self.before, model.parameters(), strict=True))
            seen.append(("changed" if changed else "same", state.global_step))

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(("begin", state.global_step))

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(("end", state.global_step))

    counter = Counter()
    args = settings(
        tmp_path, num_iterations=2, max_steps=8, logging_steps=3, save_strategy="steps", save_steps=3, eval_steps=3
    )
    trainer = GRPOTrainer(base, varied, args, rows(), callbacks=[counter, Note()])
    trainer._built()._worker().engine.budget.tokens = 60  # a group's completions
    trainer.train()
    within = ["substep:0", "clipped:0", "changed:0", "substep:1", "clipped:1", "changed:1"]
    expected = ["begin:0", *within, "end:1", "begin:1", "end:2", "begin:2"]
    assert [f"{what}:{step}" for what, step in seen[: len(expected)]] == expected
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logs] == [3, 6, 8]  # the end
    assert [entry["epoch"] for entry in logs] == [0.25, 0.5, pytest.approx(2 / 3)]
    assert counter.saved == [4, 6, 8] and counter.steps == 8


def varied(completions: list[str], **kwargs: Any) -> list[float]:
    """No two rewards of a group are the same."""
    return [float(n) for n in range(len(completions))]


def test_an_epoch_that_a_callback_ends(tmp_path: Path, base: str):
    """The rest of its prompts is left out, and the run ends with its last epoch."""
    asked: list[list[str]] = []

    def reward(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        asked.append(prompts[::4])
        return digits(completions)

    class End(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_epoch_stop = state.global_step in (1, 5)

    counter = Counter()
    args = settings(tmp_path, max_steps=-1, num_train_epochs=3, shuffle_dataset=False, save_strategy="epoch")
    trainer = GRPOTrainer(base, reward, args, rows(6), callbacks=[counter, End()])
    assert trainer.train().global_step == 5 and counter.epochs == 3 and counter.saved == [1, 4, 5]
    names = [row["prompt"] for row in rows(6)]
    assert asked == [names[:2], names[:2], names[2:4], names[4:], names[:2]]
    epochs = [entry["epoch"] for entry in trainer.state.log_history if "loss" in entry]
    assert epochs == pytest.approx([1 / 3, 4 / 3, 5 / 3, 2, 7 / 3])
    again = GRPOTrainer(base, reward, args, rows(6))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert asked[5:] == [names[:2], names[2:4], names[4:]] * 2 and again.state.epoch == pytest.approx(3)


def test_a_failed_run_goes_on_after_an_epoch_that_a_callback_ended(tmp_path: Path, base: str):
    asked: list[list[str]] = []

    def reward(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        asked.append(prompts[::4])
        assert len(asked) != 4, "breaks once"
        return digits(completions)

    class End(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_epoch_stop = state.global_step == 1

    args = settings(
        tmp_path, max_steps=-1, num_train_epochs=2, shuffle_dataset=False, save_strategy="steps", save_steps=2
    )
    trainer = GRPOTrainer(base, reward, args, rows(6), callbacks=[End()])
    with pytest.raises(UserError, match="breaks once"):
        trainer.train()
    assert trainer.train().global_step == 4
    names = [row["prompt"] for row in rows(6)]
    assert asked[4:] == [names[2:4], names[4:]]
    epochs = [entry["epoch"] for entry in trainer.state.log_history if "loss" in entry]
    assert epochs == pytest.approx([1 / 3, 4 / 3, 5 / 3, 2])


@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_run_that_ends_within_an_epoch(tmp_path: Path, base: str, num_steps: int):
    counter = Counter()
    args = settings(tmp_path, max_steps=num_steps, save_strategy="epoch")
    GRPOTrainer(base, digits, args, rows(4), callbacks=[counter]).train()  # two steps are an epoch
    assert counter.saved == ([1] if num_steps == 1 else [2, 3]) and counter.epochs == len(counter.saved)


@pytest.mark.parametrize("restores", [True, False])
def test_states_of_callbacks_and_losses_of_a_resumed_run(tmp_path: Path, base: str, restores: bool):
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 2

    def make(*callbacks: TrainerCallback) -> GRPOTrainer:
        args = settings(
            tmp_path, save_strategy="steps", save_steps=2, beta=0.1, restore_callback_states_from_checkpoint=restores
        )
        return GRPOTrainer(base, digits, args, rows(), callbacks=list(callbacks))

    first = make(Counter("first"), Stop())
    first.train()
    first.beta = 0.3
    again = make(Counter("second"))
    output = again.train(resume_from_checkpoint=True)
    (counter,) = [c for c in again.callback_handler.callbacks if isinstance(c, Counter)]
    assert (counter.name, counter.steps) == (("first", 4) if restores else ("second", 2))
    losses = [entry["loss"] for entry in again.state.log_history if "loss" in entry]
    assert len(losses) == 4 and output.training_loss == pytest.approx(sum(losses[2:]) / 2)


def test_beta_after_resuming_is_that_of_the_checkpoint(tmp_path: Path, base: str):
    class Anneal(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer.beta = 0.5

    args = settings(tmp_path, beta=0.1, max_steps=2, save_strategy="steps", save_steps=1)
    trainer = GRPOTrainer(base, digits, args, rows(), callbacks=[Anneal()])
    trainer.train()
    trainer = GRPOTrainer(base, digits, args, rows())
    trainer.train(resume_from_checkpoint=str(Path(args.output_dir) / "checkpoint-1"))
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert trainer.beta == 0.5 == logs[-1]["kl_coef"]


def test_an_evaluation_with_another_prefix_leaves_the_metrics_of_training(tmp_path: Path, base: str):
    class Evaluate(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                trainer.evaluate(rows(2), metric_key_prefix="test")

    args = settings(tmp_path, max_steps=2, logging_steps=2)
    trainer = GRPOTrainer(base, digits, args, rows(), callbacks=[Evaluate()])
    trainer.train()
    tested, trained = trainer.state.log_history[:2]
    assert "test_reward" in tested and "reward" not in tested and {"reward", "loss"} <= trained.keys()


def test_a_step_after_which_a_callback_fails_is_in_the_log(tmp_path: Path, base: str):
    class FailOnce(TrainerCallback):
        failed = False

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2 and not self.failed:
                self.failed = True
                raise ValueError("once")

    trainer = GRPOTrainer(base, digits, settings(tmp_path, max_steps=3), rows(), callbacks=[FailOnce()])
    with pytest.raises(ValueError, match="once"):
        trainer.train()
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logs] == [1, 2, 3]
    assert [entry["reward"] for entry in logs] == metric(tmp_path / "cohort", "reward")


def test_a_loss_that_is_not_a_number_is_no_part_of_the_mean(tmp_path: Path, base: str):
    class Mine(GRPOTrainer):
        def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
            super().log({**logs, "loss": None} if self.state.global_step == 1 and "loss" in logs else logs)

    trainer = Mine(base, digits, settings(tmp_path, max_steps=2), rows())
    output = trainer.train()
    first, second = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert first is None and output.training_loss == second


def test_arguments_of_train(tmp_path: Path, base: str):
    trainer = GRPOTrainer(base, digits, settings(tmp_path, max_steps=1), rows())
    with pytest.raises(TypeError, match="resume_from"):
        trainer.train(resume_from="checkpoint-1")  # type: ignore[call-arg]
    trainer.train(trial=None, ignore_keys_for_eval=[])
