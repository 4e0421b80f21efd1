"""What the page says first of real runs that go wrong, as `record_runs.py` made them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cohort.health.facts import facts_of
from cohort.health.findings import HEALTH, Finding
from cohort.health.metrics_table import MetricsBuilder
from cohort.health.rules import judge
from cohort_view.now import now
from cohort_view.run import ViewedRun

RECORDED = Path(__file__).with_name("recorded")


def findings(name: str, folder: Path) -> list[Finding]:
    """What the page says of a recorded run, with the event `health` of what the rules find in its metrics."""
    run: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())
    rows = [
        {"kind": kind, **dict(zip(run[kind], values, strict=True))}
        for kind in ("train", "eval")
        for values in zip(*run[kind].values(), strict=True)
    ]
    builder = MetricsBuilder()
    builder.append(rows)
    judged = [finding.as_json() for finding in judge(builder.table(), facts_of(run["config"]))]
    health = {"timestamp": 2.0, "event": HEALTH, "findings": judged}
    events = [{"timestamp": 1.0, "step": 0, "event": "start"}, health, {"timestamp": 2.0, **run["end"]}]
    (folder / "config.yaml").write_text(yaml.safe_dump(run["config"]))
    for file, lines in (("events.jsonl", events), ("metrics.jsonl", rows)):
        (folder / file).write_text("".join(json.dumps(line) + "\n" for line in lines))
    viewed = ViewedRun(folder, name)
    viewed.refresh()
    return list(now(viewed)["banners"])


# Of each run the sentence that must come first, and all rules that fire.
HEADLINES = {
    "crash": (
        "Died after step 10: reward 'fails' raised ValueError: the table of answers has no row 31 (at rewards.py:22). "
        "There is no checkpoint to resume from: the same command starts over",
        ["died"],
    ),
    "diverge": (  # at a learning rate of 0.3
        "The reward fell from 0.188 to 0, around step 2, and no completion has had another one since. Start again, or "
        "from a checkpoint before step 2, with a lower train.learning_rate (it was up to 0.3), or with algorithm.beta "
        "above 0; see docs/resuming.md and docs/algorithms.md#notes",
        ["reward_falls"],
    ),
    "hack2": (  # which first learns to be right, then that length pays more
        "Reward hacking: 'long' rose from 0.586 to 0.995 while 'right', which defines success, fell from 0.195 to 0, "
        "around step 18; held-out accuracy fell from 92% to 0%. Start again from a checkpoint before step 18, and "
        "lower the weight of 'long', cap it, or give it only where 'right' is earned; see "
        "docs/rewards.md#reward-hacking",
        ["objective_falls"],
    ),
    "collapse": (  # whose reward is 1 / (1 + length): all completions are equal now
        "Reward 'short' went from 0.204 to 0.333 while completions shrank from 6 to 2 tokens. Read some completions: "
        "it may reward short texts; see docs/rewards.md#reward-hacking",
        ["reward_hacking"],
    ),
    "shrink": (  # with a reward for right answers beside it
        "Reward 'short' went from 0.17 to 0.332 while completions shrank from 8 to 2 tokens. Read some completions: it "
        "may reward short texts; see docs/rewards.md#reward-hacking",
        ["reward_hacking"],
    ),
    "hack": (  # of whose two rewards one saturates, far below its weight
        "Learned: the reward rose from 0.289 to 0.476 in 40 steps (held-out accuracy from 22% to 94%)",
        ["learned", "entropy_collapsed"],
    ),
    "learns": (
        "Learned: the reward rose from 0.323 to 0.865 in 30 steps (held-out accuracy from 22% to 94%)",
        ["learned"],
    ),
}


@pytest.mark.parametrize("name", HEADLINES)
def test_the_cause_comes_first(name, tmp_path):
    sentence, rules = HEADLINES[name]
    found = findings(name, tmp_path)
    assert found[0].sentence == sentence
    assert [finding.rule for finding in found] == rules
