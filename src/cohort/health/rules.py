"""The table of rules on how a run goes. Console, page and trackers show what it finds."""

from dataclasses import dataclass

import numpy as np

from cohort.health import policy_rules as policy
from cohort.health import progress_rules as progress
from cohort.health import signal_rules as signal
from cohort.health.facts import RunFacts
from cohort.health.findings import LEVELS, Finding, Sign
from cohort.health.history import Condition, History
from cohort.health.metrics_table import MetricsTable
from cohort.health.signal_rules import FEW_STEPS, MOST, share_above


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A condition, and the sentence that says that it holds.

    The sign of the condition gives the level, and the values with which `text`, `evidence` and `advice` are formatted,
    beside the `facts` of the run.
    """

    condition: Condition
    text: str
    evidence: tuple[str, ...]  # metrics that show it
    advice: str = ""
    explains: tuple[str, ...] = ()  # rules that have nothing to add if this one holds
    is_cause: bool = False  # whether it comes before all others and leaves nothing good to say
    is_notable: bool = False  # whether console and trackers show it as information, too

    def finding(self, name: str, sign: Sign, h: History) -> Finding:
        """Return what the rule of this name finds in a history, which shows its sign."""
        templates = (self.text, self.advice, *self.evidence)
        text, advice, *evidence = (template.format(facts=h.facts, **sign.values) for template in templates)
        step = int(h.steps[-1]) if sign.step is None else sign.step
        known = h.known(*evidence)
        return Finding(rule=name, level=sign.level, text=text, advice=advice or None, step=step, evidence=known)


_NOTHING_TO_LEARN = ("no_signal", "no_progress", "unclear", "one_reward_constant", "no_gradient")
_SYMPTOMS = (  # of a policy that collapsed, or that games a reward
    *_NOTHING_TO_LEARN,
    *("all_zero", "all_one", "all_equal", "truncated", "too_early"),
    *("length_collapses", "length_explodes"),
)
_TURNS = "docs/tool-formats.md#when-a-call-goes-wrong"

# Causes come first, in this order; then the others by level, and within a level in this order.
RULES = {
    "not_finite": Rule(
        condition=policy.not_finite,
        text="The gradient norm is not a number (step {at})",
        advice="Lower train.learning_rate, or train with model.dtype: float32; see docs/memory.md",
        evidence=("grad_norm", "loss"),
        is_cause=True,
        explains=("no_gradient", "too_early", "unclear"),
    ),
    "reward_falls": Rule(
        condition=progress.reward_falls,
        text="The reward fell from {before} to {now}, around step {around}{since}",
        advice="Start again, or from a checkpoint before step {around}, with a lower train.learning_rate (it was up to "
        "{rate}), or with algorithm.beta above 0; see docs/resuming.md and docs/algorithms.md#notes",
        evidence=("reward", "entropy", "grad_norm"),
        is_cause=True,
        explains=_SYMPTOMS,
    ),
    "objective_falls": Rule(
        condition=progress.objective_falls,
        text="Reward hacking: {gamed!r} rose from {was} to {became} while {objective!r}, which defines success, fell "
        "from {before} to {now}, around step {around}{accuracy}",
        advice="Start again from a checkpoint before step {around}, and lower the weight of {gamed!r}, cap it, or give "
        "it only where {objective!r} is earned; see docs/rewards.md#reward-hacking",
        evidence=("rewards/{objective}/mean", "rewards/{gamed}/mean", "eval/accuracy"),
        is_cause=True,
        explains=(*_SYMPTOMS, "entropy_collapsed", "overfitting"),
    ),
    "reward_hacking": Rule(
        condition=signal.reward_hacking,
        text="Reward {reward!r} went from {before} to {now} while completions shrank from {length_before:.0f} to "
        "{length:.0f} tokens",
        advice="Read some completions: it may reward short texts; see docs/rewards.md#reward-hacking",
        evidence=("rewards/{reward}/mean", "completions/mean_length"),
        is_cause=True,
        explains=(*_SYMPTOMS, "entropy_collapsed", "overfitting"),
    ),
    "overfitting": Rule(
        condition=progress.overfitting,
        text="Held-out accuracy fell from {before:.0%} (step {best}) to {now:.0%} while the training reward did not "
        "fall",
        advice="Use the checkpoint closest to step {best}, and read recent completions for reward hacking; see "
        "docs/rewards.md#reward-hacking",
        evidence=("eval/accuracy", "reward"),
        is_cause=True,
        explains=("no_signal", "no_progress", "unclear", "one_reward_constant"),
    ),
    "entropy_explodes": Rule(
        condition=policy.entropy_explodes,
        text="Entropy exploded{when}: from {before} to {now} nats per token",
        advice="Lower train.learning_rate or algorithm.entropy_coef, and read recent completions; see "
        "docs/algorithms.md#notes",
        evidence=("entropy", "reward"),
    ),
    "entropy_collapsed": Rule(
        condition=policy.entropy_collapsed,
        text="Entropy {what}: from {before} to {now} nats per token",
        advice="{advice}",
        evidence=("entropy", "frac_reward_zero_std"),
    ),
    "all_zero": Rule(
        condition=signal.all_zero,
        text="All rewards are 0 in the last {num} steps: there is nothing to learn from",
        advice="Check on a few completions that the reward can be earned, with `cohort reward`; then use easier "
        "prompts or more generations; see docs/rewards.md",
        evidence=("reward", "frac_reward_zero_std"),
        explains=(*_NOTHING_TO_LEARN, "all_equal"),
    ),
    "all_one": Rule(
        condition=signal.all_maximum,
        text="All rewards are {reward}, the maximum, in the last {num} steps: nothing is left to learn",
        advice="Use harder prompts, or stop here; see docs/rollouts.md#dynamic-sampling",
        evidence=("reward", "frac_reward_zero_std"),
        is_notable=True,
        explains=(*_NOTHING_TO_LEARN, "all_equal"),
    ),
    "all_equal": Rule(
        condition=signal.all_equal,
        text="All rewards are {reward} in the last {num} steps: there is nothing to learn from",
        advice="Check that the reward can tell completions apart; see docs/rewards.md#writing-a-reward",
        evidence=("reward", "frac_reward_zero_std"),
        explains=_NOTHING_TO_LEARN,
    ),
    "no_signal": Rule(
        condition=signal.no_signal,
        text="{start} signal: {share:.0%} of groups have equal rewards",
        advice="{advice}; see docs/rollouts.md#dynamic-sampling",
        evidence=("frac_reward_zero_std", "completions/trained_ratio"),
        explains=("no_progress", "unclear", "no_gradient"),
    ),
    "broken": Rule(
        condition=share_above("ends/timeout", "ends/environment_error", warning=0.1, bad=MOST),
        text="{share:.0%} of trajectories break: they time out or their environment fails",
        advice="Read the errors of a step's broken trajectories; see docs/environments.md#when-an-environment-fails",
        evidence=("ends/timeout", "ends/environment_error"),
        explains=("dropped",),
    ),
    "dropped": Rule(
        condition=share_above("rollout/dropped_groups", warning=0.1, bad=MOST, of_groups=True),
        text="{share:.0%} of a step's groups are dropped because their trajectories broke",
        advice="Read the errors of a step's broken trajectories; see docs/environments.md#when-an-environment-fails",
        evidence=("rollout/dropped_groups",),
    ),
    "unscored": Rule(
        condition=share_above("frac_unscored", warning=0.1, bad=MOST),
        text="{share:.0%} of completions are scored by no reward",
        advice="Look for errors and missing columns in the step's completions; see docs/rewards.md#writing-a-reward",
        evidence=("frac_unscored",),
    ),
    "sampler_differs": Rule(
        condition=policy.sampler_differs,
        text="Sampler and trainer differ: logprobs by up to {largest} nats ({mean} on average)",
        advice="Rounding explains at most {facts.logprob_tolerance:g} nats; check the sampler's model, dtype and "
        "temperature; see docs/rollouts.md#the-parity-gate",
        evidence=("sampling/sampling_logp_difference/max", "sampling/sampling_logp_difference/mean"),
    ),
    "truncated": Rule(
        condition=share_above("completions/clipped_ratio", info=0.25, warning=MOST, bad=0.8, steps=FEW_STEPS),
        text="{share:.0%} of completions are cut at {facts.token_limit}, mostly before their answer",
        advice="Raise it, add the reward overlong, which teaches shorter ones, or set "
        "algorithm.mask_truncated_completions; see docs/rewards.md#overlong",
        evidence=("completions/clipped_ratio", "completions/mean_length"),
    ),
    "reward_outweighed": Rule(
        condition=signal.outweighed,
        text="Reward {wide!r} varies {ratio:,.0f} times as much as {narrow!r} (standard deviations times weights), so "
        "{narrow!r} has next to no effect",
        advice="Lower the weight of {wide!r}, use its scale or clip, or algorithm.name: gdpo, which normalizes each "
        "reward; see docs/rewards.md#combining-rewards",
        evidence=("rewards/{wide}/std", "rewards/{narrow}/std"),
    ),
    "kl_grows": Rule(
        condition=policy.kl_grows,
        text="KL grows: the policy is {now} nats per token from the reference",
        advice="Raise algorithm.beta, or set algorithm.kl_target; see docs/config.md",
        evidence=("kl", "reward"),
    ),
    "no_gradient": Rule(
        condition=policy.no_gradient,
        text="The gradient is 0 in {share:.0%} of the last {num} steps",
        advice="Open one of these steps: the page says why it learned nothing; see docs/view.md#what-the-banner-says",
        evidence=("grad_norm", "completions/trained_ratio", "learning_rate"),
    ),
    "stale_dropped": Rule(
        condition=share_above("rollout/stale_dropped", warning=0.1, of_groups=True),
        text="{share:.0%} of a step's groups are dropped because they are too old",
        advice="Use rollout.stale_completions: correct, or more rollout GPUs; see "
        "docs/rollouts.md#sampling-ahead-of-training",
        evidence=("rollout/stale_dropped", "rollout/staleness_max"),
    ),
    "malformed_calls": Rule(
        condition=share_above("tools/malformed_ratio", warning=MOST),
        text="{share:.0%} of the tool calls cannot be parsed",
        advice=f"See with `cohort rollout` what the model writes; see {_TURNS}",
        evidence=("tools/malformed_ratio",),
    ),
    "failing_calls": Rule(
        condition=share_above("tools/failure_frequency", warning=MOST),
        text="{share:.0%} of the tool calls fail",
        advice=f"See with `cohort rollout` what the tools return; see {_TURNS}",
        evidence=("tools/failure_frequency",),
    ),
    "max_turns": Rule(
        condition=share_above("ends/max_turns", warning=MOST),
        text="{share:.0%} of the trajectories end by rollout.max_turns: {facts.max_turns}",
        advice=f"Raise it, or make the task end earlier; see {_TURNS}",
        evidence=("ends/max_turns",),
    ),
    "slow_environment": Rule(
        condition=signal.slow_environment,
        text="A trajectory spends {environment_s:.1f} s in tools and environments and {model_s:.1f} s in the model, so "
        "environments limit the rollout's speed",
        advice=f"Make slow calls faster, or lower rollout.tool_timeout_s; see {_TURNS}",
        evidence=("turns/environment_s", "turns/model_s"),
        is_notable=True,
    ),
    "gradient_spikes": Rule(
        condition=policy.gradient_spikes,
        text="Gradient norm spikes: {largest}, {ratio:.0f} times the median (last at step {last})",
        advice="Clipping bounds the update; if they go on, lower train.learning_rate; see docs/config.md",
        evidence=("grad_norm", "learning_rate"),
    ),
    "length_collapses": Rule(
        condition=policy.length_changes(shrinks=True),
        text="Completions shrank{when} from {before:.0f} to {now:.0f} tokens",
        advice="Compare completions of an early and a recent step; see docs/rewards.md#reward-hacking",
        evidence=("completions/mean_length", "completions/clipped_ratio", "reward"),
    ),
    "length_explodes": Rule(
        condition=policy.length_changes(shrinks=False),
        text="Completions grew{when} from {before:.0f} to {now:.0f} tokens",
        advice="Compare completions of an early and a recent step; see docs/rewards.md#reward-hacking",
        evidence=("completions/mean_length", "completions/clipped_ratio", "reward"),
    ),
    "one_reward_constant": Rule(
        condition=signal.reward_constant,
        text="Reward {reward!r} has been {value} for every completion of the last {num} steps{which}, so it gives no "
        "signal",
        advice="Check that it can tell completions apart, or remove it; see docs/rewards.md#combining-rewards",
        evidence=("rewards/{reward}/mean", "rewards/{reward}/std"),
        is_notable=True,
    ),
    "out_of_memory": Rule(
        condition=policy.out_of_memory,
        text="{total} micro-batches ran out of memory in the last {num} steps and were repeated{now}",
        advice="Set a lower train.micro_batch_tokens; see docs/memory.md",
        evidence=("out_of_memory", "micro_batch_tokens"),
    ),
    "solved": Rule(
        condition=progress.solved,
        text="Solved: {what}",
        evidence=("{metric}", "reward"),
        explains=(
            *("learning", "learned", "too_early", "no_progress", "unclear"),
            *("no_signal", "no_gradient", "entropy_collapsed"),
        ),
    ),
    "learning": Rule(
        condition=progress.learning,
        text="Learning: {what}",
        evidence=("{metric}",),
        explains=("learned", "too_early", "no_progress", "unclear"),
    ),
    "learned": Rule(
        condition=progress.learned,
        text="Learned: {what}{now}",
        evidence=("reward",),
        explains=("too_early", "no_progress", "unclear"),
    ),
    "no_progress": Rule(
        condition=progress.no_progress,
        text="{what}",
        advice="Read some groups first; then try a higher train.learning_rate or easier prompts; see "
        "docs/algorithms.md#notes",
        evidence=("reward", "frac_reward_zero_std"),
        explains=("unclear",),
    ),
    "too_early": Rule(
        condition=progress.too_early,
        text="Too early to say: {num} of the {needed} steps that a verdict needs",
        evidence=("reward",),
    ),
    "unclear": Rule(
        condition=progress.unclear,
        text="No clear trend yet: the reward is {reward}",
        evidence=("reward",),
    ),
}


def is_notable(finding: Finding) -> bool:
    """Whether console and trackers show a finding."""
    return finding.is_warning or (finding.rule in RULES and RULES[finding.rule].is_notable)


def judge(table: MetricsTable, facts: RunFacts) -> list[Finding]:
    """Return what the rules find in a run, most important first; nothing before the first step.

    Args:
        table: the metrics so far.
        facts: what rules need to know of its configuration.
    """
    if not len(table.steps):
        return []
    h = History(table, facts)
    with np.errstate(all="ignore"):  # values of a failing run overflow
        found = [rule.finding(name, sign, h) for name, rule in RULES.items() for sign in h.signs(rule.condition)]
    muted = {name for finding in found for name in RULES[finding.rule].explains}
    has_cause = any(RULES[f.rule].is_cause for f in found)
    kept = (f for f in found if f.rule not in muted and not (has_cause and f.level == "good"))
    return sorted(kept, key=lambda f: -1 if RULES[f.rule].is_cause else LEVELS.index(f.level))
