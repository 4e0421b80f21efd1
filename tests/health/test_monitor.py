"""The monitor reports what changed, and warns once about each finding."""

import math
from typing import Any

import pytest

from cohort.config import config_from_dict
from cohort.health.facts import RunFacts, facts_of
from cohort.health.findings import Finding, findings_in
from cohort.health.monitor import HealthMonitor
from configs import MINIMAL

FINE = {"reward": 0.4, "reward_std": 0.3, "frac_reward_zero_std": 0.2, "tools/malformed_ratio": 0.1}
MALFORMED = {**FINE, "tools/malformed_ratio": 1.0}


class Watched:
    def __init__(self, **past: Any):
        self.changes: list[list[str]] = []
        self.warnings: list[tuple[int, str]] = []
        self.findings: list[list[Finding]] = []
        self.monitor = HealthMonitor(RunFacts(), on_change=self._change, on_notable=self._warn, **past)

    def _change(self, findings):
        self.findings.append(list(findings))
        self.changes.append([finding.rule for finding in findings])

    def _warn(self, step, finding):
        self.warnings.append((step, finding.text))


def test_each_change_is_reported_and_each_warning_once():
    watched = Watched()
    for step in range(1, 12):
        watched.monitor.add(step, MALFORMED if step in (2, 3, 9, 10, 11) else FINE)
    assert watched.changes[:3] == [["too_early"], ["malformed_calls", "too_early"], ["malformed_calls", "too_early"]]
    assert watched.warnings == [(2, "55% of the tool calls cannot be parsed")]
    num = len(watched.changes)
    watched.monitor.report(11)  # nothing is new
    assert len(watched.changes) == num


def test_nothing_is_said_before_the_first_step_and_an_evaluation_counts():
    watched = Watched()
    watched.monitor.add(0, {"eval/accuracy": 0.99}, kind="eval")
    assert watched.changes == []
    watched.monitor.add(1, FINE)
    watched.monitor.add(1, {"eval/accuracy": 0.5}, kind="eval")
    assert watched.changes == [["solved"], ["too_early"]]


def test_a_resumed_run_repeats_nothing():
    before = Watched()
    rows = [{"step": step, "kind": "train", **MALFORMED} for step in (1, 2, 3)]
    for row in rows:
        before.monitor.add(row["step"], MALFORMED)
    assert before.warnings == [(1, "100% of the tool calls cannot be parsed")]
    events = [{"event": "health", "findings": [finding.as_json() for finding in found]} for found in before.findings]
    after = Watched(rows=rows[:2], past=[findings_in(event) for event in events])
    after.monitor.report(2)
    assert (after.changes, after.warnings) == ([["malformed_calls", "too_early"]], [])  # 2 steps, not 3
    after.monitor.add(3, {**MALFORMED, "frac_unscored": 0.2})
    assert [text for _, text in after.warnings] == ["20% of completions are scored by no reward"]


def test_some_information_is_shown_too():
    watched = Watched()
    for step in (1, 2):
        watched.monitor.add(step, {**FINE, "turns/environment_s": 3.0, "turns/model_s": 0.2})
    ((step, text),) = watched.warnings
    assert (step, text[:64]) == (1, "A trajectory spends 3.0 s in tools and environments and 0.2 s in")


def test_metrics_that_are_no_numbers():
    watched = Watched()
    watched.monitor.add(1, dict.fromkeys(FINE, math.nan) | {"learning_rate": 1e-6, "grad_norm": math.inf})
    assert watched.warnings == [(1, "The gradient norm is not a number (step 1)")]


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"findings": None},
        {"findings": [1, {}, {"rule": "x", "level": "worst", "text": "t", "advice": None, "step": 1, "evidence": []}]},
    ],
)
def test_events_that_cannot_be_read(event):
    assert findings_in(event) == []


def facts(**sections: Any) -> RunFacts:
    return facts_of(config_from_dict({**MINIMAL, **sections}).model_dump(mode="json"))


def test_facts_of_a_configuration():
    shaping = {"use": "overlong", "buffer_tokens": 4}
    usual = facts(rewards=[{"use": "r.py:good", "weight": 2.0}, {"use": "math", "name": "m"}, shaping])
    assert usual.weights == {"good": 2.0, "m": 1.0, "overlong": 1.0}
    assert usual.shaping == {"overlong"}
    assert usual.compares_groups and usual.adds_rewards and usual.samples_from_policy
    assert usual.logprob_tolerance == 0.3
    assert not facts(algorithm={"name": "reinforce_pp"}).compares_groups
    assert not facts(algorithm={"name": "gdpo"}).adds_rewards
    for key, value in {"top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}.items():
        assert not facts(rollout={key: value}).samples_from_policy
    assert facts(hardware={"device": "cpu"}).logprob_tolerance == 1e-3
    assert facts(train={"prompts_per_step": 7, "max_grad_norm": 3}).prompts_per_step == 7
