"""The catalogue for people: writes `docs/algorithms.md`, and the table of algorithms in `README.md`.

`python -m cohort.config.algorithm_docs docs/algorithms.md README.md`
"""

import sys
from pathlib import Path
from typing import Any

from cohort.config.algorithm import AlgorithmConfig, not_one_of
from cohort.config.catalogue import ALGORITHMS, COMPONENTS

__all__ = ["described", "described_component", "not_one_of", "readme_table", "render", "with_table"]

BEGIN, END = "<!-- algorithms: made by `make docs` -->", "<!-- end of algorithms -->"
_INTRO = """# Algorithms

Made from `src/cohort/config/catalogue.py` by `make docs`; do not edit it here. `cohort algorithms` prints
the same; `cohort algorithms NAME` one algorithm or component, and `--json` either for programs.

An algorithm is three pure functions: an *advantage* makes numbers of a step's rewards, a *policy loss* makes a loss
of each token, and a *loss weight* says how these are summed over the step. A name stands for three of them and their
numbers; any of them can be replaced: `algorithm: {name: dapo, policy_loss: gspo}`. A key that none of the three reads
is an error. What goes around them (KL divergence, entropy, masks) and functions of your own are in
[algorithm-terms.md](algorithm-terms.md); the critic of PPO is in [critic.md](critic.md).

In the formulas `r` is a completion's reward, `A` its advantage, `p` a token's probability under the current policy,
`ratio` that to the old policy's, and `N` the number of completions of the step that have a loss. A completion that no
reward judged counts nowhere. A truncated one has no loss where those are masked (`mask_truncated_completions`) and does
not count in `N` or in lengths, but its reward is in the means and deviations of the advantages. A group in which
nothing can be compared has advantage 0.
"""
_NOTES = """## Notes

- **The weights are of the whole step**, before it is split over micro-batches and processes, so the gradient does not
  depend on the split. `bnpo` elsewhere is the mean over the tokens of one process's micro-batch, which does. Here it
  is the mean over the step's tokens: the same where a step is one micro-batch of one process.
- **Dual clip**: the loss of a token with a negative advantage grows with its ratio without bound; `delta` caps it.
  TRL's formula, min(min(ratio, delta) * A, clip(ratio) * A), and that of the dual-clip paper, max(..., delta * A)
  where A < 0, are one and the same for `delta` above 1 + `clip_high`, and anything else is refused.
- **CISPO's cap** is 1 + `clip_high`, so the weight of an on-policy token is 1 whatever the cap. In TRL `epsilon_high`
  is the cap itself, and its default of 0.2 multiplies every on-policy gradient by 0.2; `cohort convert` says so. The
  default here, a cap of 5, is that of arXiv:2510.13786.
- **The token mean of DAPO, CISPO and VESPO** is over the tokens of the optimizer step. TRL before 1.16 counts those of
  all steps on a generation batch, where `steps_per_generation` and `gradient_accumulation_steps` differ; `cohort check`
  says so.
- **LUSPO** is GSPO's loss of a completion times its length: GSPO with `loss_weight: sequence_sum`. Versions of TRL
  before its pull request 6654 divide by the padded length and count padding wherever the loss is per token, as with
  `beta` above 0, so the gradient depends on the padding and on the processes.
- **`top_entropy_quantile`** selects among the tokens of the step. In TRL it selects among those of a micro-batch, so
  that with DAPO the gradient depends on `gradient_accumulation_steps`.
- **`entropy_coef`** is a term of each token's loss and weighted as that is. In TRL, with GRPO's and Dr. GRPO's loss,
  the gradient of the bonus depends on how the step is split over micro-batches and processes.
- **GSPO and GMPO** have one ratio for a completion, so that advantages of its tokens come to their mean. Where these
  differ (`gae`, `top_entropy_quantile`, `kl_in: reward` with REINFORCE++), they are refused; GSPO-token takes them.
- **GSPO, VESPO and GMPO** look at whole completions, and so are refused with `train.gradients_in_forward`.
- **GMPO** bounds the logarithm of a token's ratio, by -`clip_low` where the advantage is negative and by `clip_high`
  where it is positive, before the mean is taken.
- **VESPO**'s ratio is that to the old policy; what the sampler adds to it is `sampling_correction`'s, on the outside.
- **MaxRL and PKPO** are sums over completions in their papers, so their loss weight is the one that knows no length.
  PKPO's advantages are never negative: a completion is pushed up as far as it alone raises the best of `at_k`. They
  are multiplied by the size of the group, since the loss is a mean. MaxRL divides by a rate of success, so a negative
  reward is an error.
- **REINFORCE++** sums the token rewards from each token on. It has no need of peers: with `num_generations: 1` its
  baseline is the mean over the step. Its form with a baseline takes the group's mean away first.
  `group_mean_batch_std` is something else: TRL's `scale_rewards: batch` divides by the deviation of the raw rewards.
- **GDPO** whitens each reward in its group before the weights are applied, so that a weight says how much a reward
  counts and not how large its numbers are; the sum is whitened over the step.
- **Large ratios**: the logarithm of a ratio is bounded at ±20, so nothing overflows; beyond it a token has no
  gradient.
"""


def described(name: str) -> dict[str, Any]:
    """A named algorithm with its components, their formulas and the values that their keys have in it."""
    algorithm, config = ALGORITHMS[name], AlgorithmConfig(name=name)
    parts: dict[str, Any] = {}
    for kind in COMPONENTS:
        part = described_component(kind, getattr(algorithm, kind))
        parts[kind] = {**part, "defaults": {key: getattr(config, key) for key in part["defaults"]}}
    texts = {"name": name, "title": algorithm.title, "source": algorithm.source, "when": algorithm.when}
    return {**texts, **parts, "min_generations": config.min_generations}


def described_component(kind: str, name: str) -> dict[str, Any]:
    """A component with its formula and the defaults of the keys that it reads."""
    component = COMPONENTS[kind][name]
    return {
        "name": name,
        "formula": component.formula,
        "source": component.source,
        "defaults": dict(component.keys),
    }


def render() -> str:
    """The page of all algorithms and components."""
    parts = [_INTRO, "## By name", "", *_table(), ""]
    for kind, title in (("advantage", "Advantages"), ("policy_loss", "Policy losses"), ("loss_weight", "Loss weights")):
        parts += [
            f"## {title} (`{kind}`)",
            "",
            "| name | formula | keys and defaults | source |",
            "| --- | --- | --- | --- |",
        ]
        for name, component in COMPONENTS[kind].items():
            formula = component.formula.replace("|", "\\|")
            parts.append(f"| `{name}` | `{formula}` | {_keys(component.keys)} | {_link(component.source)} |")
        parts.append("")
    return "\n".join([*parts, _NOTES])


def readme_table() -> str:
    """The table of algorithms between its markers."""
    rows = ["| `name` | algorithm | when |", "| --- | --- | --- |"]
    rows += [f"| `{name}` | {a.title} ({_link(a.source)}) | {a.when} |" for name, a in ALGORITHMS.items()]
    return "\n".join([BEGIN, *rows, END])


def with_table(page: str) -> str:
    """`page` with the table between its markers brought up to date."""
    before, rest = page.split(BEGIN)
    return before + readme_table() + rest.split(END)[1]


def _table() -> list[str]:
    rows = ["| name | algorithm | advantage | policy loss | loss weight | defaults | when |"]
    rows.append("| --- | --- | --- | --- | --- | --- | --- |")
    for name in ALGORITHMS:
        it = described(name)
        kinds = [it[kind] for kind in COMPONENTS]
        defaults = _keys({key: value for part in kinds for key, value in part["defaults"].items()})
        parts = " | ".join(f"`{part['name']}`" for part in kinds)
        rows.append(f"| `{name}` | {it['title']} ({_link(it['source'])}) | {parts} | {defaults} | {it['when']} |")
    return rows


def _keys(keys: Any) -> str:
    return ", ".join(f"`{key}: {'null' if value is None else value}`" for key, value in keys.items())


def _link(sources: str) -> str:
    """Numbers of papers as links."""
    linked = []
    for source in sources.split("; "):
        label, is_paper, number = source.partition("arXiv:")
        if is_paper:
            linked.append(f"{label}[arXiv:{number}](https://arxiv.org/abs/{number})")
        elif source.startswith("doi:"):
            linked.append(f"[{source}](https://doi.org/{source.removeprefix('doi:')})")
        else:
            linked.append(source)
    return "; ".join(linked)


if __name__ == "__main__":
    page, readme = map(Path, sys.argv[1:])
    page.write_text(render(), encoding="utf-8")
    readme.write_text(with_table(readme.read_text(encoding="utf-8")), encoding="utf-8")
