"""Runs whose memory runs out, and the budget they find."""

from pathlib import Path

import numpy as np
import pytest
import torch

import cohort
from cohort.models import Policy
from runs import Notes, changed, make_inputs, metric, train, weights


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
    assert [note for note in notes.told if note.startswith("out of memory")] == [
        f"out of memory in {number} micro-batches; recomputed with train.micro_batch_tokens={budget}, which the run "
        f"keeps from now on"
        for number, budget in zip(events, budgets, strict=True)
        if number
    ]
    result = train(config)  # resumes with the reduced budget
    assert metric(result.run_dir, "micro_batch_tokens")[4:] == budgets[-1:] * 2
    assert metric(result.run_dir, "out_of_memory")[4:] == [0, 0]
    np.testing.assert_allclose(metric(result.run_dir, "loss"), metric(expected.run_dir, "loss"), rtol=1e-5, atol=1e-8)
    for name, tensor in weights(result.final_dir).items():
        torch.testing.assert_close(tensor, weights(expected.final_dir)[name], rtol=1e-5, atol=1e-7)


def test_gradients_in_forward_without_a_known_head_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = changed(make_inputs(tmp_path), train={"gradients_in_forward": True, "steps": 1})
    monkeypatch.setattr("cohort.models.policy.find_head", lambda model: None)
    with pytest.raises(cohort.UserError, match=r"train.gradients_in_forward: true has no effect on this model.*remove"):
        train(config)
    notes = Notes()
    cohort.train(changed(config, train={"gradients_in_forward": False}), display=notes)
    assert notes.told[:-1] == ["the model computes full logits, because its head is not a supported linear layer"]


@pytest.mark.parametrize("dropout", [True, False])
def test_a_run_says_why_its_rows_are_padded(tmp_path: Path, dropout: bool):
    inputs = make_inputs(tmp_path, attention_dropout=0.1)
    notes = Notes()
    result = cohort.train(changed(inputs, train={"steps": 1}, model={"dropout": dropout}), display=notes)
    reasons = [
        text for text in notes.told if text.startswith("the model runs on padded batches, because it has dropout")
    ]
    assert len(reasons) == dropout
    assert (metric(result.run_dir, "prompt_tokens_saved")[0] > 0) != dropout


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
        assert notes.told[:-1] == [f"using train.micro_batch_tokens={budget:.0f} (the largest that fits)"]
    else:
        assert notes.told[:-1] == [f"using train.micro_batch_tokens={budget:.0f} (one rank's share of a step fits)"]
        assert budget == 12 * (8 + 12 - 1)  # 12 sequences of the longest prompt and the longest completion
    assert metric(result.run_dir, "out_of_memory") == [0, 0]
