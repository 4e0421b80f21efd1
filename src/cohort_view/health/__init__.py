"""How a run goes, in sentences: the rules behind the banner, and why a step learned something or nothing."""

from cohort_view.health.banners import RULES, banners
from cohort_view.health.explain import explain_step
from cohort_view.health.observed import maximum_reward

__all__ = ["RULES", "banners", "explain_step", "maximum_reward"]
