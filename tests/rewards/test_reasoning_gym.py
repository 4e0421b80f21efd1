"""The reward reasoning_gym: the library's own scores, computed in the sandbox, where answers that are programs run."""

import json
import sys

import pytest

from builtin_rewards import Builtin, load_builtin
from cohort.config.hardware import SandboxConfig
from cohort.errors import UserError
from cohort.rewards.reasoning_gym import answer_in_tags
from cohort.rollout.environments.libraries.reasoning_gym import Answer, SandboxScorer
from cohort.sandbox import Job, JobResult, SharedSandbox
from cohort.sandbox.process import Limits

COUNTDOWN = {"source_dataset": "countdown", "numbers": [1, 2], "target": 3}


def reward(*packages: str) -> Builtin:
    """With any sandbox, or a plain process."""
    config = SandboxConfig(packages=packages, confinement="none", max_concurrent=1)
    return Builtin("reasoning_gym", sandbox=SharedSandbox(config))


@pytest.mark.extras
def test_it_scores_as_the_dataset_does():
    reasoning_gym = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed", exc_type=ImportError)
    rows = [*reasoning_gym.create_dataset("chain_sum", size=2, seed=1)]
    rows += [*reasoning_gym.create_dataset("leg_counting", size=1, seed=1)]
    columns = {key: [row[key] for row in rows] for key in ("question", "answer", "metadata")}
    columns["metadata"][1] = json.dumps(columns["metadata"][1])
    f = reward("reasoning-gym")
    f.check()
    assert f.required_columns() == ("answer", "metadata")
    right = [f"<think>so</think><answer> {row['answer']} </answer>" for row in rows]
    assert f(right, **columns) == [1.0, 1.0, 1.0]
    assert f(right[:2], **{key: values[:2] for key, values in columns.items()}, dataset="chain_sum") == [1.0, 1.0]
    assert f(["<answer>no</answer>", "no tags", "<answer></answer>"], **columns) == [0.0, 0.0, 0.0]
    assert f([row["answer"] for row in rows], **columns, answer_tags=False) == [1.0, 1.0, 1.0]
    assert f.last_counts == {}
    with pytest.raises(ValueError, match=r"no dataset 'chain_sun'; did you mean chain_sum\?"):
        load_builtin("reasoning_gym", {"dataset": "chain_sun"}, sandbox=f.context.sandbox).check()
    with pytest.raises(UserError, match="the column 'metadata' holds 'x'"):
        f(["1"], answer=["1"], metadata=["x"])


def test_the_answer_is_in_the_last_tags():
    cases = {
        "<answer> 1 </answer> or <answer>\n2\n</answer>": "2",
        "<answer>1<answer>2</answer>": "1<answer>2",
        "<answer>1</answer> 2</answer> <answer>3": "1",
        "<answer></answer>": "",
        "<answer>1": None,
        "1</answer>": None,
        "": None,
    }
    assert {text: answer_in_tags(text) for text in cases} == cases


@pytest.mark.extras
def test_an_answer_that_is_a_program_does_not_run_in_this_process(monkeypatch):
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed", exc_type=ImportError)
    monkeypatch.setenv("COHORT_TEST_SECRET", "secret")
    answers = [
        "__import__('sys').modules.update(written_by_an_answer=1)",
        "__import__('os').kill(__import__('os').getppid(), 9)",
        "1+2",
        "__import__('os')._exit(0)",
        "3 if 'COHORT_TEST_SECRET' in __import__('os').environ else 1+2",
        "1+2",
    ]
    f = reward("reasoning-gym")
    number = len(answers)
    scores = f(
        [f"<answer>{answer}</answer>" for answer in answers], answer=["1+2"] * number, metadata=[COUNTDOWN] * number
    )
    assert "written_by_an_answer" not in sys.modules
    assert scores[1:4] == [None, 1.0, None] and scores[5] == 1.0, "the others are scored"
    assert f.last_counts == {"not_judged": 2}
    with pytest.raises(ValueError, match=r"No module named 'reasoning_gym'\); set sandbox.packages: \[reasoning-gym\]"):
        reward().check()


class Scripted:
    """A sandbox that gives the outcomes of a list."""

    limits = Limits.of(SandboxConfig())
    max_concurrent = 1

    def __init__(self, *outcomes: JobResult | None) -> None:
        self.outcomes = list(outcomes)
        self.asked: list[list[str]] = []

    def run_all(self, jobs: list[Job], *, budget_s: float) -> list[JobResult | None]:
        [job] = jobs
        assert job.limits is not None and job.limits.wall_s <= job.limits.cpu_s <= 9
        self.asked.append([case["arguments"][1] for case in job.request["cases"]])
        outcome = self.outcomes.pop(0)
        if outcome is None:
            return [None]
        records = [{**record, "token": job.request["token"]} for record in outcome.records[1:]]
        return [JobResult(started=outcome.started, records=(*outcome.records[:1], *records))]


def test_the_answer_that_ends_the_process_is_not_judged_and_those_behind_it_are_scored_in_another():
    begun = {"begun": True}
    sandbox = Scripted(
        JobResult(started=True, records=(begun, {"value": 1.0})),
        JobResult(
            started=True, records=(begun, {"value": 7.0}, {"value": None}, {"error": "ValueError"}, {"value": 0})
        ),
    )
    scorer = SandboxScorer(sandbox)  # type: ignore[arg-type]
    answers = [Answer("countdown", text, {}) for text in "abcdef"]
    assert scorer.score_all(answers, budget_s=9.0) == [1.0, None, None, None, None, 0.0]
    assert sandbox.asked == [[*"abcdef"], [*"cdef"]]
    for failed in (None, JobResult(started=False), JobResult(started=True, records=({"in": "before", "error": "no"},))):
        assert SandboxScorer(Scripted(failed)).score_all(answers, budget_s=9.0) == [None] * 6  # type: ignore[arg-type]
