"""Runs that sample prompts by their success: the same after a resume and for any number of ranks (laws 3 and 4)."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cohort
from cohort.data import PromptSet, PromptStream, Successes
from cohort.errors import UserError
from cohort.records import Prompt
from cohort.rollout import Prefetcher, RolloutCollector, SamplingParams
from engines import ScriptedEngine
from runs import assert_same_weights, changed, make_inputs, metric, stop_after, train
from selection import slow
from tiny import copy_task_rows, make_tokenizer, write_jsonl


def inputs(folder: Path, **data: Any) -> dict[str, Any]:
    """Several epochs of few prompts, of which some are passed over."""
    config = make_inputs(folder)
    rates = (0, 0.5, 1, None, "0.25", "")
    rows = [{**row, "pass_rate": rate} for row, rate in zip(copy_task_rows(6), rates, strict=True)]
    write_jsonl(folder / "train.jsonl", rows)
    return changed(config, data={"sampling": "by_success", "pass_rate": "pass_rate", **data}, train={"steps": 8})


def outcomes_of(run: Path) -> list[list[float]]:
    """Prompts that are never, sometimes and always right, and those not sampled yet, of each step."""
    names = ("never_right", "sometimes_right", "always_right", "not_sampled")
    return [metric(run, f"prompts/{name}") for name in names]


def test_a_run_goes_on_with_the_same_prompts_bit_for_bit(tmp_path: Path):
    config = inputs(tmp_path)
    whole = train(changed(config, run={"dir": str(tmp_path / "whole")}))
    with pytest.raises(KeyboardInterrupt):
        cohort.train(config, display=stop_after(5))
    assert_same_weights(train(config, resume=True).final_dir, whole.final_dir)
    counts = outcomes_of(whole.run_dir)
    assert counts == outcomes_of(tmp_path / "run")
    assert [sum(of_step) for of_step in zip(*counts, strict=True)] == [6.0] * 8
    assert (counts[3][0], counts[3][-1]) == (3.0, 0.0)
    state = json.loads((whole.run_dir / "checkpoints" / "step-8" / "trainer_state.json").read_text())["data"]
    assert 6 * state["epoch"] + state["position"] > 3 * 8, "none was passed over: this test would show nothing"


@slow("two runs of real processes")
def test_two_ranks_sample_the_prompts_of_one(tmp_path: Path):
    config = changed(inputs(tmp_path), model={"dtype": "float64"}, train={"steps": 4})
    for processes in (1, 2):
        hardware = {"processes": processes, "device": "cpu"}
        cohort.train(changed(config, run={"dir": str(tmp_path / f"run-{processes}")}, hardware=hardware))
    states = [
        json.loads((tmp_path / f"run-{n}" / "checkpoints" / "step-4" / "trainer_state.json").read_text())["data"]
        for n in (1, 2)
    ]
    assert states[0] == states[1]
    assert outcomes_of(tmp_path / "run-1") == outcomes_of(tmp_path / "run-2")


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_sampling_ahead_goes_on_with_the_same_prompts_after_any_step(max_staleness: int):
    """What is sampled in a step depends on the results of the steps before it alone."""

    def start(state: dict[str, Any] | None = None) -> tuple[PromptStream, Prefetcher]:
        prompts = (Prompt(id=n, epoch=0, content="?", token_ids=np.array([5 + n]), columns={}) for n in range(9))
        successes = Successes(9, num_generations=2, exploration=0.1)
        stream = PromptStream(PromptSet(prompts=tuple(prompts), num_dropped_overlong=0), seed=1, successes=successes)
        collector = RolloutCollector(ScriptedEngine(lambda: 1), make_tokenizer())
        sampling = SamplingParams(num_generations=2, max_completion_tokens=6, temperature=1.0)
        options: dict[str, Any] = {"prompts_per_step": 3, "num_steps": 12, "updates_per_step": 1}
        prefetcher = Prefetcher(collector, stream, sampling, seed=7, max_staleness=max_staleness, **options)
        if state is not None:
            stream.restore(state["data"])
            prefetcher.restore(state["pending"])
        return stream, prefetcher

    def play(stream: PromptStream, prefetcher: Prefetcher, steps: range) -> tuple[list[Any], list[str]]:
        found, states = [], []
        with closing(prefetcher.collector):
            for step in steps:
                groups = [*prefetcher.take(step, 3), *prefetcher.take(step, 1)]  # one group was replaced
                stream.record((group.prompt.id, group.prompt.id % 3, 2) for group in groups)
                found.append([(group.prompt.id, group.prompt.epoch) for group in groups])
                states.append(json.dumps({"data": stream.state(), "pending": prefetcher.state()}))
        return found, states

    expected, states = play(*start(), range(12))
    assert json.loads(states[-1])["data"]["epoch"] > 12 * 4 // 9, "none was passed over: this test would show nothing"
    for done in (1, 4, 9):
        assert play(*start(json.loads(states[done - 1])), range(done, 12)) == (expected[done:], states[done:])


@pytest.mark.parametrize(
    ("rate", "message"),
    [
        (1.5, r"data.pass_rate='pass_rate': row 7: must be a share of right answers, 0 to 1, not 1.5"),
        ("half", r"row 7: must be a share of right answers, 0 to 1, not 'half'"),
    ],
)
def test_a_pass_rate_that_is_no_share_is_refused(tmp_path: Path, rate: Any, message: str):
    config = inputs(tmp_path)
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(json.dumps({**copy_task_rows(1)[0], "pass_rate": rate}) + "\n")
    with pytest.raises(UserError, match=message):
        train(config)
    with pytest.raises(UserError, match=r"data.pass_rate='pass_rat': the data has no such column; did you mean"):
        train(changed(config, data={"pass_rate": "pass_rat"}))
