from pathlib import Path

import pytest

from cohort.metrics.catalogue import description_of, group_of, unit_of
from metric_table import names_in, render, short_description

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
TABLE = Path(__file__).parents[2] / "src" / "cohort" / "metrics" / "metrics.toml"


def test_the_page_says_what_docs_metrics_says():
    assert TABLE.read_text(encoding="utf-8") == render(PAGE.read_text(encoding="utf-8")), "run `make docs`"


def test_names_in_a_cell_of_the_table():
    assert list(names_in("`a/{x,y}_s`, `step_time`")) == ["a/x_s", "a/y_s", "step_time"]
    assert list(names_in("`moe/load/max`, `/min`")) == ["moe/load/max", "moe/load/min"]
    assert list(names_in("`rewards/{name}/mean`")) == ["rewards/{name}/mean"]


def test_a_short_description_is_the_first_clause_without_markup():
    assert short_description("share of groups (`x: 1`) left out; they count.") == "Share of groups (x: 1) left out"
    assert short_description("mean of 0.5 to 1 (only with `beta` above 0)") == "Mean of 0.5 to 1"


@pytest.mark.parametrize(
    ("name", "group", "unit", "begins"),
    [
        ("reward", "Reward", "", "Mean weighted sum"),
        ("rewards/math/mean", "Reward", "", "Mean of one reward"),
        ("rewards/math/timeout", "Reward", "", "Counters of a reward"),
        ("rewards/math/seconds_per_verdict", "Reward", "s", "code, judge and model"),
        ("eval/completions/mean_length", "Held-out", "tokens", "Held-out: tokens per completion"),
        ("eval/pass@8", "Held-out", "share", "Share of held-out prompts"),
        ("ends/max_turns", "Turns and tools", "share", "Share of the trajectories"),
        ("memory/train_peak_bytes", "Memory", "bytes", "Peak memory within this phase"),
        ("rollout/tokens_per_second", "Throughput", "tokens/s", "Completion tokens"),
        ("rollout/staleness_max", "Sampler", "steps", "Steps between the weights"),
        ("time/pack_s", "Time", "s", "Seconds of the step"),
        ("value_loss", "Optimizer", "", "The critic's loss"),
        ("kl", "Policy", "nats", "Mean of the estimate"),
    ],
)
def test_group_unit_and_description(name, group, unit, begins):
    assert (group_of(name), unit_of(name)) == (group, unit)
    assert description_of(name).startswith(begins)


def test_a_name_that_is_not_cohorts_has_no_description():
    assert (group_of("mine/x"), unit_of("mine/x"), description_of("mine/x")) == ("Other", "", "")
