"""The banner: every rule that fires, most important first."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from cohort_view.health import policy, progress, signal
from cohort_view.health.observed import Observed
from cohort_view.metrics_table import MetricsTable
from cohort_view.records import Banner

Rule = Callable[[Observed], Banner | None]

# Within a level, earlier rules are more important.
RULES: tuple[Rule, ...] = (
    policy.not_finite,
    signal.all_rewards_equal,
    signal.no_signal,
    progress.reward_falls,
    signal.broken,
    signal.unscored,
    policy.sampler_differs,
    policy.truncated,
    policy.entropy_collapsed,
    policy.entropy_explodes,
    progress.overfitting,
    signal.reward_hacking,
    policy.kl_grows,
    policy.no_gradient,
    policy.stale_dropped,
    signal.turns,
    policy.gradient_spikes,
    policy.length_changes,
    signal.one_reward_constant,
    policy.out_of_memory,
    progress.solved,
    progress.learning,
    progress.learned,
    progress.no_progress,
    progress.too_early,
    progress.unclear,
)
_LEVELS = ("bad", "warning", "good", "info")

# What a rule explains makes others superfluous.
_EXPLAINS = {
    "solved": {"learning", "learned", "no_signal", "too_early"},
    "learning": {"too_early"},
    "learned": {"too_early"},
    "all_zero": {"no_signal", "no_progress", "unclear", "one_reward_constant"},
    "all_one": {"no_signal", "no_progress", "unclear", "one_reward_constant"},
    "all_equal": {"no_signal", "no_progress", "unclear", "one_reward_constant"},
    "no_signal": {"no_progress", "unclear"},
}


def banners(table: MetricsTable, config: Mapping[str, Any] | None, run_id: str | None = None) -> list[Banner]:
    """Return the banners of a run, most important first; none before the first step.

    Args:
        table: the metrics so far.
        config: the run's configuration; None if it cannot be read.
        run_id: makes links to the curves of the evidence.
    """
    if not len(table.steps):
        return []
    observed = Observed(table, config)
    found = [banner for rule in RULES if (banner := rule(observed)) is not None]
    explained = set().union(*(_EXPLAINS.get(banner.rule, ()) for banner in found))
    found = [banner for banner in found if banner.rule not in explained]
    found.sort(key=lambda banner: _LEVELS.index(banner.level))
    return found if run_id is None else [replace(banner, link=_link(banner, run_id)) for banner in found]


def _link(banner: Banner, run_id: str) -> str | None:
    """Link to the curves of a banner's evidence."""
    if not banner.evidence:
        return None
    names = ",".join(dict.fromkeys(evidence.metric for evidence in banner.evidence))
    return f"#/run/{quote(run_id, safe='')}/curves?names={quote(names, safe=',/@')}"
