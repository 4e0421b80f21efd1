"""What a metric is: its group on the page, its unit and a short description."""

import re
import tomllib
from functools import cache
from importlib import resources

_GROUPS = (  # the first pattern that matches a name
    ("Held-out", r"eval/"),
    ("Reward", r"reward(_std)?$|rewards/|frac_"),
    ("Completions", r"completions/"),
    ("Turns and tools", r"(turns|ends|tools|environment)/"),
    ("Throughput", r"(rollout/)?tokens_per_second$|num_tokens$|padding_fraction$|prompt_tokens_saved$|mfu$|processes$"),
    ("Throughput", r"model_tflops_per_second$|micro_batches$|micro_batch_tokens$|sequences_over_budget$"),
    ("Memory", r"memory/|out_of_memory$"),
    ("Time", r"time/|step_time$"),
    ("Sampler", r"(sampling|rollout)/"),
    ("Optimizer", r"grad_norm$|learning_rate$|value/|value_loss$"),
    ("Policy", r"loss$|entropy|kl(_|$)|(clip_ratio|policy_weight|moe)/"),
)
_UNITS = (
    ("bytes", r"_bytes$"),
    ("TFLOP/s", r"tflops_per_second$"),
    ("tokens/s", r"tokens_per_second$"),
    ("s", r"_s$|(^|/)step_time$|seconds_per_verdict$"),
    ("nats", r"entropy$|kl$|sampling_logp_difference/|parity/"),
    ("tokens", r"(^|_)length$|num_tokens$|micro_batch_tokens$|masked_tokens$"),
    ("steps", r"staleness_"),
    ("share", r"(^|/)frac_|_ratio$|^clip_ratio/|ends/|failure_frequency$|padding_fraction$|prompt_tokens_saved$|mfu$"),
    ("share", r"^eval/(accuracy|mean@|pass@)"),
    ("calls", r"call_frequency$|model_calls$"),
    ("turns", r"turns/(mean|max)$"),
)


def group_of(name: str) -> str:
    """Return the group of a metric; "Other" for a name that is not Cohort's."""
    return next((group for group, pattern in _GROUPS if re.match(pattern, name)), "Other")


def unit_of(name: str) -> str:
    """Return the unit of a metric; empty for plain numbers. "share" is a number from 0 to 1."""
    return next((unit for unit, pattern in _UNITS if re.search(pattern, name)), "")


def description_of(name: str) -> str:
    """Return what docs/metrics.md says about a metric, in short; empty for a name that is not in it."""
    descriptions = _descriptions()
    if name in descriptions:
        return descriptions[name]
    patterns = sorted(descriptions, key=lambda pattern: pattern.endswith("..."))  # the widest last
    found = next((pattern for pattern in patterns if re.fullmatch(_expression(pattern), name)), None)
    if found == "eval/...":  # those of training, over held-out prompts
        inner = description_of(name.removeprefix("eval/"))
        return f"Held-out: {inner[:1].lower()}{inner[1:]}" if inner else ""
    return "" if found is None else descriptions[found]


@cache
def _descriptions() -> dict[str, str]:
    text = resources.files("cohort.metrics").joinpath("metrics.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def _expression(pattern: str) -> str:
    """Return the regular expression of a name with placeholders: `{name}`, `@k` and a final `...`."""
    expression = re.escape(pattern)
    expression = re.sub(r"\\\{\w+\\\}", "[^/]+", expression)
    return re.sub(r"\\\.\\\.\\\.$", ".+", re.sub(r"@k$", r"@\\d+", expression))
