from pathlib import Path

import pytest

from cohort.metrics.catalogue import METRICS, Metric, describe
from metric_table import with_metrics

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_has_the_tables_of_the_catalogue():
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_metrics(page), "run `make docs`"
    assert "| `rewards/{name}/frac_unscored` | share | share of completions that this reward did not score |" in page
    assert all(f"| `{metric.name}` |" in page for metric in METRICS)


@pytest.mark.parametrize(
    ("name", "group", "unit", "begins"),
    [
        ("reward", "Reward", "", "Mean weighted sum"),
        ("rewards/math/mean", "Reward", "", "Mean of one reward"),
        ("rewards/math/timeout", "Reward", "", "Counters of a reward"),
        ("rewards/math/seconds_per_verdict", "Reward", "s", "code, judge and model"),
        ("eval/completions/mean_length", "Held-out", "tokens", "Held-out: tokens per completion"),
        ("eval/rewards/math/length_correlation", "Held-out", "", "Held-out: Pearson's correlation"),
        ("eval/mean@16", "Held-out", "share", "Share of held-out completions"),
        ("eval/pass@8", "Held-out", "share", "Share of held-out prompts"),
        ("ends/max_turns", "Turns and tools", "share", "Share of the trajectories"),
        ("turns/max", "Turns and tools", "turns", "Turns per trajectory"),
        ("memory/train_peak_bytes", "Memory", "bytes", "Peak memory within this phase"),
        ("rollout/tokens_per_second", "Throughput", "tokens/s", "Completion tokens"),
        ("rollout/staleness_max", "Sampler", "steps", "Steps between the weights"),
        ("time/pack_s", "Time", "s", "Seconds of the step"),
        ("value_loss", "Optimizer", "", "The critic's loss"),
        ("kl", "Policy", "nats", "Mean of the estimate"),
    ],
)
def test_group_unit_and_description(name, group, unit, begins):
    metric = describe(name)
    assert (metric.group, metric.unit) == (group, unit)
    assert metric.description.startswith(begins)


def test_a_name_that_is_not_in_the_catalogue():
    assert describe("mine/length") == Metric(name="mine/length", group="Other")
    assert describe("rewardx").group == describe("time/pack_sx").group == "Other"
    assert (describe("eval/mine/x").group, describe("eval/mine/x").description) == ("Held-out", "")
