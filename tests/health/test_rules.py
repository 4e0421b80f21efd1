"""The rules on made-up curves: each fires on its curve, and not on a neighboring one."""

import re
from pathlib import Path

import numpy as np
import pytest

from cohort.health.facts import facts_of
from cohort.health.metrics_table import MetricsTable
from cohort.health.rules import RULES, judge
from cohort.health.trends import change_point, trend

ROOT = Path(__file__).parents[2]
NAN = np.nan


def noise(num, *, scale=0.03, seed=0):
    return scale * np.random.default_rng(seed).normal(size=num)


def ramp(start, end, num):
    return np.linspace(start, end, num)


def flat(value, num=40):
    return np.full(num, value, float)


def table(num=40, accuracy=(), every=10, num_prompts=1000, **metrics):
    """A healthy run without a trend, with some metrics replaced; `__` stands for a slash."""
    healthy = {
        "reward": 0.4 + noise(num),
        "reward_min": flat(0, num),
        "reward_max": flat(1, num),
        "reward_std": flat(0.4, num),
        "frac_reward_zero_std": flat(0.2, num),
        "frac_unscored": flat(0.0, num),
        "rewards/right/std": flat(0.45, num),
        "entropy": 0.5 + noise(num, seed=1),
        "completions/mean_length": 200 + noise(num, scale=5, seed=2),
        "completions/clipped_ratio": flat(0.01, num),
        "grad_norm": 0.5 + noise(num, scale=0.05, seed=3),
        "learning_rate": flat(1e-6, num),
        "out_of_memory": flat(0.0, num),
    }
    given = {name.replace("__", "/"): np.asarray(values, float) for name, values in metrics.items()}
    columns = {"rewards/right/mean": given.get("reward", healthy["reward"]), **healthy, **given}
    accuracies = np.array(accuracy, float)
    of_eval = {"eval/accuracy": accuracies, "eval/num_prompts": flat(num_prompts, len(accuracies))}
    evaluations = MetricsTable(every * np.arange(len(accuracies)), of_eval)
    return MetricsTable(np.arange(1, num + 1), columns, evaluations)


def found(run, config=None):
    return judge(run, facts_of(config))


def rules(run, config=None):
    return {finding.rule: finding.level for finding in found(run, config)}


def the(rule, run, config=None):
    (finding,) = [f for f in found(run, config) if f.rule == rule]
    return finding


def equal(num=40):
    return {"reward_std": flat(0, num), "frac_reward_zero_std": flat(1, num)}


RISING = ramp(0.2, 0.7, 40) + noise(40)
JUMP = np.r_[flat(0.5, 20), flat(0.03, 20)]

# Curves on which a rule fires and with which level, then neighbors on which it does not.
FIRES = [
    ("learning", "good", {"reward": RISING}),
    ("learning", "good", {"accuracy": [0.251, 0.5, 0.75]}),
    ("learned", "good", {"num": 80, "reward": np.r_[RISING, flat(0.7)] + noise(80, seed=4)}),
    ("solved", "good", {"reward": flat(0.97), "rewards__right__std": flat(0.1)}),
    ("solved", "good", {"accuracy": [0.25, 0.96875]}),
    ("too_early", "info", {"num": 5}),
    ("unclear", "info", {}),
    ("no_progress", "info", {"num": 60}),
    ("no_progress", "warning", {"num": 100}),
    ("reward_falls", "bad", {"num": 80, "reward": np.r_[flat(0.8), ramp(0.8, 0.2, 40)] + noise(80)}),
    (
        "reward_falls",
        "bad",
        {"num": 8, "reward": np.r_[0.2, 0.3, 0.25, flat(0, 5)], "reward_std": np.r_[flat(0.4, 3), flat(0, 5)]},
    ),
    (
        "objective_falls",
        "bad",
        {
            "num": 80,
            "rewards__exact__mean": np.r_[flat(0.8), ramp(0.8, 0.1, 40)] + noise(80),
            "rewards__right__mean": np.r_[flat(0.1), ramp(0.1, 0.9, 40)],
        },
    ),
    ("overfitting", "warning", {"reward": RISING, "accuracy": np.array([301, 701, 690, 500, 480]) / 1000}),
    (
        "all_zero",
        "warning",
        {"num": 4, "reward": flat(0, 4), "reward_std": flat(0, 4), "frac_reward_zero_std": flat(1, 4)},
    ),
    ("all_equal", "bad", {"reward": flat(0.5), "reward_std": flat(0), "frac_reward_zero_std": flat(1)}),
    ("all_one", "info", {"reward": flat(1), "rewards__right__std": flat(0), **equal()}),
    ("no_signal", "bad", {"frac_reward_zero_std": flat(0.92)}),
    ("no_signal", "warning", {"frac_reward_zero_std": flat(0.75)}),
    ("entropy_collapsed", "bad", {"entropy": JUMP}),
    ("entropy_collapsed", "warning", {"entropy": JUMP, "reward": RISING}),
    ("entropy_collapsed", "info", {"entropy": np.geomspace(0.5, 0.05, 40), "reward": RISING}),
    ("entropy_explodes", "warning", {"entropy": np.r_[flat(0.5, 20), flat(3.0, 20)]}),
    ("kl_grows", "info", {"kl": ramp(0, 0.3, 40) + noise(40, scale=0.01)}),
    ("kl_grows", "warning", {"kl": ramp(0, 0.9, 40) + noise(40, scale=0.01)}),
    ("kl_grows", "bad", {"kl": ramp(0, 4, 40) + noise(40, scale=0.01)}),
    ("truncated", "bad", {"completions__clipped_ratio": flat(0.87)}),
    ("truncated", "warning", {"completions__clipped_ratio": flat(0.6)}),
    ("truncated", "info", {"completions__clipped_ratio": flat(0.3)}),
    ("length_collapses", "warning", {"completions__mean_length": ramp(200, 60, 40)}),
    ("length_explodes", "info", {"completions__mean_length": ramp(200, 900, 40)}),
    ("reward_hacking", "warning", {"completions__mean_length": ramp(200, 20, 40), "reward": ramp(0.1, 0.6, 40)}),
    ("unscored", "warning", {"frac_unscored": flat(0.2)}),
    ("unscored", "bad", {"frac_unscored": flat(0.6)}),
    ("broken", "warning", {"ends__timeout": flat(0.1), "ends__environment_error": flat(0.1)}),
    ("broken", "bad", {"ends__timeout": flat(0.6)}),
    ("dropped", "warning", {"rollout__dropped_groups": flat(4)}),
    ("dropped", "bad", {"rollout__dropped_groups": flat(12)}),
    ("stale_dropped", "warning", {"rollout__stale_dropped": flat(4)}),
    ("malformed_calls", "warning", {"tools__malformed_ratio": flat(0.7)}),
    ("failing_calls", "warning", {"tools__failure_frequency": np.r_[flat(0.2, 30), flat(0.7, 10)]}),
    ("max_turns", "warning", {"ends__max_turns": flat(0.7)}),
    ("slow_environment", "info", {"turns__environment_s": flat(3.0), "turns__model_s": flat(1.0)}),
    ("sampler_differs", "warning", {"sampling__sampling_logp_difference__max": flat(0.5)}),
    ("one_reward_constant", "warning", {"rewards__form__mean": flat(1), "rewards__form__std": flat(0)}),
    ("reward_outweighed", "warning", {"rewards__wide__mean": flat(300), "rewards__wide__std": flat(250)}),
    ("not_finite", "bad", {"grad_norm": np.r_[flat(0.5, 39), NAN]}),
    ("no_gradient", "bad", {"grad_norm": flat(0)}),
    ("gradient_spikes", "info", {"grad_norm": np.r_[flat(0.5, 39), 20]}),
    ("gradient_spikes", "warning", {"grad_norm": np.r_[flat(0.5, 36), 20, 20, 0.5, 20]}),
    ("out_of_memory", "info", {"out_of_memory": np.r_[flat(0, 39), 2]}),
    ("out_of_memory", "warning", {"out_of_memory": flat(1)}),
]
IS_QUIET = [
    ("learning", {"reward": RISING[::-1]}),
    ("learning", {"reward": np.r_[flat(0.4, 39), 0.9] + noise(40)}),  # one point
    ("learning", {"accuracy": [0.25, 0.5], "num_prompts": 4}),
    ("learning", {"accuracy": [0.251, 0.5, 0.75], "num_prompts": NAN}),
    ("learned", {"reward": RISING}),
    ("solved", {"reward": flat(0.9), "rewards__right__std": flat(0.3)}),
    ("solved", {"reward": flat(0.97), "reward_max": flat(3)}),  # of a reward whose maximum is not 1
    ("solved", {"reward": flat(0.97), "reward_min": flat(-1)}),
    ("solved", {"reward": flat(0.97), "reward_min": flat(NAN)}),  # of a version without these metrics
    ("too_early", {"num": 10}),
    ("no_progress", {"num": 49}),
    ("no_progress", {"num": 100, "reward": ramp(0.2, 0.7, 100) + noise(100)}),
    ("reward_falls", {"num": 80, "reward": 0.5 + noise(80, scale=0.2)}),
    (
        "reward_falls",
        {"num": 7, "reward": np.r_[0.2, 0.3, 0.25, flat(0, 4)], "reward_std": np.r_[flat(0.4, 3), flat(0, 4)]},
    ),
    ("reward_falls", {"num": 6, "reward": np.r_[0.06, flat(0, 5)], "reward_std": np.r_[0.25, flat(0, 5)]}),  # by chance
    ("reward_falls", {"reward": np.r_[0.2, 0, 0.1, flat(0, 37)], "reward_std": np.r_[flat(0.1, 3), flat(0, 37)]}),
    (
        "objective_falls",  # and the other does not make up for it
        {
            "num": 80,
            "rewards__exact__mean": np.r_[flat(0.8), ramp(0.8, 0.1, 40)] + noise(80),
            "rewards__right__mean": flat(0.1, 80),
        },
    ),
    ("overfitting", {"reward": RISING, "accuracy": np.array([301, 701, 690, 660, 670]) / 1000}),
    ("overfitting", {"reward": ramp(0.7, 0.2, 40), "accuracy": np.array([301, 701, 690, 500, 480]) / 1000}),
    ("all_zero", {"num": 2, "reward": flat(0, 2), **equal(2)}),
    ("all_equal", {"frac_reward_zero_std": flat(1)}),
    ("no_signal", {"frac_reward_zero_std": flat(0.6)}),
    ("entropy_collapsed", {"entropy": np.r_[flat(0.5, 20), flat(0.15, 20)]}),
    ("entropy_collapsed", {"entropy": JUMP, "accuracy": [0.25, 0.96875]}),
    ("entropy_explodes", {"entropy": np.r_[flat(0.1, 20), flat(0.5, 20)]}),
    ("kl_grows", {"kl": flat(0.3) + noise(40, scale=0.01)}),
    ("kl_grows", {"kl": ramp(0, 0.08, 40)}),
    ("truncated", {"completions__clipped_ratio": flat(0.2)}),
    ("truncated", {"num": 2, "completions__clipped_ratio": flat(0.9, 2)}),
    ("length_collapses", {"completions__mean_length": ramp(200, 120, 40)}),
    ("length_explodes", {"completions__mean_length": ramp(9, 30, 40)}),  # twice as long, but short
    ("reward_hacking", {"completions__mean_length": ramp(200, 20, 40)}),
    ("unscored", {"frac_unscored": flat(0.05)}),
    ("broken", {"ends__timeout": flat(0.05)}),
    ("dropped", {"rollout__dropped_groups": flat(1)}),
    ("dropped", {"rollout__dropped_groups": flat(4), "ends__timeout": flat(0.3)}),  # explained by `broken`
    ("stale_dropped", {"rollout__stale_dropped": flat(1)}),
    ("malformed_calls", {"tools__malformed_ratio": flat(0.5)}),
    ("failing_calls", {"tools__failure_frequency": np.r_[flat(0.9, 30), flat(0.2, 10)]}),
    ("max_turns", {"ends__max_turns": flat(0.1)}),
    ("slow_environment", {"turns__environment_s": flat(3.0), "turns__model_s": flat(4.0)}),
    ("slow_environment", {"turns__environment_s": flat(0.9)}),
    ("not_finite", {"grad_norm": np.r_[NAN, flat(0.5, 39)]}),  # long ago
    ("no_gradient", {"grad_norm": np.r_[flat(0.5, 36), flat(0, 4)]}),
    ("no_gradient", {"grad_norm": flat(0), "frac_reward_zero_std": flat(0.95)}),  # explained by `no_signal`
    ("no_gradient", {"grad_norm": flat(0), "learning_rate": flat(0)}),  # only the critic is trained
    ("gradient_spikes", {"grad_norm": np.r_[flat(0.5, 39), 3]}),
    ("gradient_spikes", {"grad_norm": np.r_[flat(0.01, 39), 0.5]}),  # below the limit of clipping
    ("out_of_memory", {"out_of_memory": np.r_[2, flat(0, 39)]}),
    ("no_progress", {"num": 100, "reward": flat(0.97, 100)}),  # explained by `solved`
]
CONFIG = {"train": {"prompts_per_step": 16}, "eval": {"success_reward": "exact"}}


@pytest.mark.parametrize(("rule", "level", "curves"), FIRES)
def test_a_rule_fires(rule, level, curves):
    assert rules(table(**curves), CONFIG).get(rule) == level


@pytest.mark.parametrize(("rule", "curves"), IS_QUIET)
def test_a_rule_is_quiet_on_a_neighbor(rule, curves):
    assert rule not in rules(table(**curves), CONFIG)


def test_missing_rewards_hide_no_progress():
    reward = np.r_[flat(0.2, 20), flat(0.75, 40)] + noise(60)
    reward[[2, 9, 51, 55]] = NAN
    spread = np.sqrt(reward * (1 - reward))
    assert rules(table(60, reward=reward, rewards__right__std=spread)) == {"learned": "good"}
    reward[-20:] = NAN
    assert the("unclear", table(60, reward=reward)).text == "No clear trend yet: the reward is not known"


def test_no_progress_says_that_the_reward_stayed_only_if_it_did():
    assert "stayed near 0.4" in the("no_progress", table(60, reward=flat(0.4, 60))).text
    assert "stayed near 0 " in the("no_progress", table(60, reward=flat(0, 60))).text
    wide = 0.4 * np.sin(np.linspace(0, 1.5, 60)) + noise(60, scale=1.5)
    assert "stayed" not in the("no_progress", table(60, reward=wide)).text


SAMPLING = "sampling__sampling_logp_difference__"
FLOAT32 = {"model": {"dtype": "float32", "compute_dtype": "float32"}}


@pytest.mark.parametrize(
    ("largest", "mean", "config", "staleness", "level"),
    [
        (0.01, 1e-4, FLOAT32, 0, "warning"),
        (0.01, 1e-4, {}, 0, None),  # within bfloat16's rounding
        (0.5, 0.02, {}, 0, "warning"),
        (0.5, 0.1, {}, 0, "bad"),
        (0.5, 0.1, {"rollout": {"top_p": 0.9}}, 0, None),
        (0.5, 0.1, {"rollout": {"top_k": 20}}, 0, None),
        (0.5, 0.1, {"rollout": {"min_p": 0.1}}, 0, None),
        (0.5, 0.1, {"rollout": {"repetition_penalty": 1.2}}, 0, None),
        (0.5, 0.1, {}, 2, None),
    ],
)
def test_sampler_and_trainer_differ(largest, mean, config, staleness, level):
    curves = {f"{SAMPLING}max": flat(largest), f"{SAMPLING}mean": flat(mean), "rollout__staleness_max": flat(staleness)}
    assert rules(table(**curves), config).get("sampler_differs") == level


def test_rules_that_read_the_configuration():
    equal = {"frac_reward_zero_std": flat(0.95)}
    assert "no_signal" not in rules(table(**equal), {"rollout": {"num_generations": 1}})
    assert "no_signal" not in rules(table(**equal), {"algorithm": {"name": "reinforce_pp"}})  # learns from equal groups
    assert "no_signal" not in rules(table(**equal), {"algorithm": {"name": "grpo", "kl_in": "reward"}})
    stale = table(rollout__stale_dropped=flat(4))
    assert rules(stale, {"train": {"prompts_per_step": 16}})["stale_dropped"] == "warning"
    assert "stale_dropped" not in rules(stale, {"train": {"prompts_per_step": 64}})
    top = {"reward": flat(2), "rewards__right__mean": flat(1), "reward_std": flat(0), "rewards__right__std": flat(0)}
    top["reward_max"] = flat(2)
    weighted = {"rewards": [{"use": "exact", "name": "right", "weight": 2.0}]}
    assert rules(table(**top, frac_reward_zero_std=flat(1)), weighted)["solved"] == "good"
    assert "max_turns: 5" in the("max_turns", table(ends__max_turns=flat(0.7)), {"rollout": {"max_turns": 5}}).text


@pytest.mark.parametrize(
    ("right", "wrong", "advice"),
    [
        (0.74, 0.01, "74% of the groups are all right: use harder prompts"),
        (0.1, 0.65, "65% of the groups are all wrong: use easier prompts"),
        (0.0, 1.0, "Use easier or harder prompts"),  # the reward may define no success
        (NAN, NAN, "Use easier or harder prompts"),  # of a version without these metrics
    ],
)
def test_what_equal_groups_need(right, wrong, advice):
    shares = {"frac_all_right": flat(right), "frac_all_wrong": flat(wrong), "frac_reward_zero_std": flat(0.75)}
    assert the("no_signal", table(**shares)).advice.startswith(advice)


def test_a_cause_mutes_its_symptoms_and_all_that_is_good():
    fell = np.r_[0.2, 0.3, 0.25, flat(0)]
    run = table(
        43,
        reward=fell,
        reward_std=0.4 * (fell > 0),
        frac_reward_zero_std=flat(1, 43),
        completions__clipped_ratio=flat(1, 43),
        rewards__right__std=0.4 * (fell > 0),
        accuracy=[0.2, 0.5, 0.8],
        out_of_memory=flat(1, 43),
    )
    assert [finding.rule for finding in found(run)] == ["reward_falls", "out_of_memory"]


def test_a_run_that_is_done_is_not_learning_any_more():
    said = {steps: found(table(reward=RISING), {"train": {"steps": steps}})[0].text for steps in (40, 41)}
    assert said[41].startswith("Learning: the reward rose")
    assert said[40] == said[41].replace("Learning", "Learned")


def test_a_maximum_with_penalties():
    """A penalty that only shapes adds nothing to the largest reward, and reaches below 0."""
    columns = {"reward": flat(0.97), "rewards__right__std": flat(0.1), "reward_min": flat(-0.5)}
    columns |= {"rewards__overlong__mean": flat(-0.01), "rewards__overlong__std": flat(0.1)}
    config = {"rewards": [{"use": "exact", "name": "right"}, {"use": "overlong"}]}
    assert rules(table(**columns), config)["solved"] == "good"


def test_sentences_and_evidence():
    run = table(num=60, entropy=np.r_[flat(0.5, 40), flat(0.03, 20)], frac_reward_zero_std=flat(0.92, 60))
    collapsed, no_signal = found(run)
    assert no_signal.text == "No signal: 92% of groups have equal rewards"
    assert collapsed.text == "Entropy collapsed at step 41: from 0.5 to 0.03 nats per token"
    assert (collapsed.step, no_signal.step) == (41, 60)
    assert no_signal.evidence == ("frac_reward_zero_std",)  # the run has no `completions/trained_ratio`
    assert no_signal.sentence == f"{no_signal.text}. {no_signal.advice}"
    falls = np.r_[flat(0.8), ramp(0.8, 0.2, 40)] + noise(80)
    assert the("reward_falls", table(num=80, reward=falls)).text.startswith("The reward fell from 0.808 to 0.281")
    rises = the("learning", table(reward=RISING, accuracy=[0.25, 0.5, 0.75]))
    assert rises.text == "Learning: the reward rose from 0.255 to 0.664 in 40 steps (held-out accuracy from 25% to 75%)"


# Rewards (of 256) and held-out accuracies (of 256, every 5 steps) of `cohort demo`, seed 0.
DEMO_REWARDS = """
34 53 52 59 61 99 111 122 130 98 144 113 150 153 158 166 161 149 161 143 178 195 170 170 182 179 199
182 193 182 215 215 205 203 196 186 212 202 204 200 184 205 216 195 190 212 184 209 215 198"""
DEMO_ACCURACIES = [51, 192, 232, 236, 240, 241, 241, 241, 243, 244, 244]


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (5, "Learning: held-out accuracy is 75%, up from 20%"),
        (20, "Learning: the reward rose from 0.193 to 0.6 in 20 steps (held-out accuracy from 20% to 94%)"),
        (50, "Solved: held-out accuracy is 95%, up from 20%"),
    ],
)
def test_the_demo_learns(steps, text):
    rewards = np.array(DEMO_REWARDS.split()[:steps], float) / 256
    entropy = np.geomspace(0.49, 0.06, 50)[:steps]
    accuracy = np.array(DEMO_ACCURACIES[: steps // 5 + 1]) / 256
    run = table(steps, accuracy, every=5, num_prompts=256, reward=rewards, entropy=entropy)
    assert [finding.text for finding in found(run)] == [text]


def test_levels_come_in_order():
    bad, warning, info = flat(0.95), flat(0.6), np.r_[flat(0, 39), 2]
    run = table(reward=RISING, completions__clipped_ratio=warning, frac_reward_zero_std=bad, out_of_memory=info)
    assert [finding.level for finding in found(run)] == ["bad", "warning", "good", "info"]


def test_noise_is_not_learning():
    rng = np.random.default_rng(0)
    curves = [0.5 + scale * rng.normal(size=num) for scale in (0.02, 0.2) for num in (10, 30, 100) for _ in range(30)]
    assert not any(trend(curve).is_rising or trend(curve).is_falling for curve in curves)
    walks = [np.cumsum(rng.normal(size=100)) for _ in range(60)]
    assert sum(trend(walk).is_rising for walk in walks) <= 3


def test_rises_at_any_noise_and_offset():
    for scale in (1e-6, 1.0, 1e6):
        rising = trend(scale * (RISING - 5))
        assert rising.is_rising
        assert rising.rise == pytest.approx(0.375 * scale, rel=0.1)
    assert not trend(flat(0.5)).is_rising
    assert not trend(np.r_[RISING[:7], [NAN] * 9]).is_rising  # 7 points
    assert change_point(np.r_[flat(1, 7), flat(2, 5)]) == 7


@pytest.mark.parametrize(
    "config", [None, {}, {"rewards": [3], "rollout": None, "algorithm": []}, {"train": {"prompts_per_step": 0}}]
)
def test_damaged_runs_are_judged(config):
    nothing = MetricsTable(np.empty(0, np.int64), {})
    assert found(nothing, config) == []
    missing = MetricsTable(np.arange(1, 31), {"reward": flat(NAN, 30)})
    huge = table(
        reward=flat(1e300), entropy=-flat(1e300), completions__mean_length=flat(0), rewards__right__mean=flat(-1e300)
    )
    for run in (missing, huge, MetricsTable(np.array([7]), {"reward": np.array([0.5])})):
        assert found(run, config)


def test_every_rule_has_a_case_and_is_documented():
    assert RULES.keys() == {rule for rule, _, _ in FIRES}
    docs = (ROOT / "docs/view.md").read_text()
    assert {rule for rule in RULES if f"| `{rule}` |" not in docs} == set()
    assert {name for rule in RULES.values() for name in rule.explains} <= RULES.keys()


def test_advice_links_to_docs_that_exist():
    for file in (ROOT / "src/cohort/health").glob("*.py"):
        joined = re.sub(r'"\s*\n\s*f?"', "", file.read_text())
        for name, anchor in re.findall(r"docs/([\w-]+\.md)(?:#([\w-]+))?", joined):
            headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / name).read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
            assert not anchor or anchor in anchors, (name, anchor)


def test_advice_names_keys_that_exist():
    written = "".join(f.read_text() for f in (ROOT / "src/cohort/health").glob("*.py"))
    named = set(re.findall(r"\b(?:algorithm|rollout|train|model)\.([a-z]\w+)\b", written))
    docs = (ROOT / "docs/config.md").read_text()
    assert len(named) > 15
    assert {key for key in named if f"`{key}`" not in docs} == set()


# Of a reward `form` beside `right`: what the steps that it scored have in common.
EVERY_OTHER = np.where(np.arange(40) % 2, 1.0, NAN)  # `where` leaves it out of the other steps


def form(mean, std, unscored=0.0):
    return {
        "rewards__form__mean": mean,
        "rewards__form__std": std,
        "rewards__form__frac_unscored": flat(unscored) if np.isscalar(unscored) else unscored,
    }


def test_a_constant_reward():
    constant = the("one_reward_constant", table(**form(flat(0.5), flat(0))))
    assert (constant.level, constant.evidence) == ("warning", ("rewards/form/mean", "rewards/form/std"))
    assert constant.text == (
        "Reward 'form' has been 0.5 for every completion of the last 10 steps, so it gives no signal"
    )
    learned = form(np.r_[flat(0.5, 20), flat(1, 20)], np.r_[flat(0.5, 20), flat(0, 20)])
    assert rules(table(**learned))["one_reward_constant"] == "info"
    penalty = {"rewards": [{"use": "regex", "name": "form", "weight": -1.0}]}
    assert rules(table(**learned), penalty)["one_reward_constant"] == "warning"
    assert "one_reward_constant" not in rules(table(**learned), {"rewards": [{"use": "overlong", "name": "form"}]})
    assert "one_reward_constant" not in rules(table(**learned), {"rewards": [{"use": "x.py:form", "weight": 0}]})
    zero = {"reward": flat(0), **equal(), "rewards__right__std": flat(0), **form(flat(0), flat(0))}
    assert rules(table(**zero)) == {"all_zero": "bad"}


def test_a_reward_of_which_most_completions_were_not_scored_is_not_judged():
    assert "one_reward_constant" not in rules(table(**form(flat(1), flat(0), 0.8)))
    assert "one_reward_constant" not in rules(table(**form(flat(1), flat(0), np.resize([0.4, 0.8], 40))))
    assert "one_reward_constant" in rules(table(**form(flat(1), flat(0), 0.5)))


def test_a_reward_that_applies_to_some_steps_only():
    constant = the("one_reward_constant", table(**form(EVERY_OTHER, 0 * EVERY_OTHER, np.isnan(EVERY_OTHER))))
    assert "of the last 10 steps that it scored, so" in constant.text
    rises = form(EVERY_OTHER * ramp(0.2, 0.9, 40), 0.2 * EVERY_OTHER)
    hacked = the("reward_hacking", table(**rises, completions__mean_length=np.r_[flat(100, 20), flat(20, 20)]))
    assert hacked.text == "Reward 'form' went from 0.254 to 0.738 while completions shrank from 100 to 20 tokens"
    assert hacked.evidence == ("rewards/form/mean", "completions/mean_length")
    falls = {"rewards": [{"use": "regex", "name": "form", "weight": -1.0}]}
    shrinking = table(**rises, completions__mean_length=np.r_[flat(100, 20), flat(20, 20)])
    assert "reward_hacking" not in rules(shrinking, falls)  # a penalty that grows is no gain
    wide = the("reward_outweighed", table(**form(EVERY_OTHER * 300, EVERY_OTHER * 225)))
    assert wide.text.startswith("Reward 'form' varies 500 times as much as 'right' (standard deviations times weights)")


def test_a_rise_too_small_for_the_rewards_spread_is_no_hacking():
    shrinking = {"completions__mean_length": np.r_[flat(100, 20), flat(20, 20)]}
    assert "reward_hacking" not in rules(table(**shrinking, **form(np.r_[flat(0, 39), 9e-7], flat(1e-3))))
    hacked = table(
        17, completions__mean_length=np.r_[flat(100, 10), flat(20, 7)], reward=np.r_[flat(0.5, 10), flat(0.9, 7)]
    )
    assert the("reward_hacking", hacked).text.endswith(
        "went from 0.5 to 0.78 while completions shrank from 100 to 44 tokens"
    )


def test_two_rewards_have_findings_of_their_own():
    run = table(**form(flat(0), flat(0)), rewards__style__mean=flat(1), rewards__style__std=flat(0))
    constant = [finding for finding in found(run) if finding.rule == "one_reward_constant"]
    assert [finding.key[1] for finding in constant] == ["rewards/form/mean", "rewards/style/mean"]


def test_rewards_that_outweigh_others():
    wide = form(flat(300), flat(225))
    assert "reward_outweighed" in rules(table(**wide))
    small = {"rewards": [{"use": "x.py:form", "weight": 0.01}, {"use": "x.py:right"}]}
    assert "reward_outweighed" not in rules(table(**wide), small)  # 5 times
    assert "reward_outweighed" not in rules(table(**wide), {"algorithm": {"name": "gdpo"}})  # normalizes each
    constant = form(flat(300), flat(0))
    assert "reward_outweighed" not in rules(table(**constant))  # it has a rule of its own
