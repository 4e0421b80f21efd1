"""Propose a whole configuration for a model and GPUs (`cohort plan --model` without a file)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import yaml

from cohort.config import config_from_dict
from cohort.config.load import read_yaml
from cohort.errors import UserError
from cohort.plan.advice import Advice, advise, replan
from cohort.plan.hardware import Hardware
from cohort.plan.predict import Plan, predict_wanted
from cohort.plan.shape import HUB_IDS, find_shape

_TEMPLATE = Template(Path(__file__).with_name("template.yaml").read_text(encoding="utf-8"))
_ON_HOST = {"optim.offload", "model.parameter_offload"}
_RAISED_RATE = 1.0e-5  # for an adapter, or weights in bfloat16


def propose(model: str, machines: Hardware, overrides: Sequence[str]) -> tuple[Plan, str]:
    """Plan the template with the first changes that `advise` finds, and write it as YAML.

    Args:
        model: preset, size, Hugging Face id or folder.
        machines: GPUs to plan for.
        overrides: keys of the template to change.

    Raises:
        UserError: an unknown model, or overrides that contradict the template or the GPUs.
    """
    shape = find_shape(model)
    path = str(Path(model).resolve()) if Path(model).is_dir() else model if "/" in model else HUB_IDS[shape.name]
    text = _TEMPLATE.substitute(path=path, dir=f"runs/{shape.name}")
    config = config_from_dict(read_yaml(text), overrides)
    if config.hardware.device == "cpu":
        raise UserError("hardware.device: cpu: configurations are proposed for GPUs; plan a file for a CPU")
    plan = predict_wanted(config, shape, machines)
    best = _choose(plan)
    changes: dict[str, Any] = {} if best is None else {**best.changes}
    if "model.adapter" in changes or "model.dtype" in changes:
        changes["train.learning_rate"] = _RAISED_RATE
    if changes:
        plan = replan(plan, changes)
    given: dict[str, Any] = {
        key: read_yaml(value) for key, _, value in (override.partition("=") for override in overrides)
    }
    costs = "" if best is None else f"# gives up {best.costs}\n"
    return plan, costs + _with_keys(text, {**given, **changes})


def _choose(plan: Plan) -> Advice | None:
    """The first change for these GPUs that updates on them, if there is one; none if the run fits as fast without."""
    lines = [line for line in advise(plan) if not any(key.startswith("--") for key in line.changes)]
    if plan.fits:
        return next((line for line in lines if line.costs.startswith("nothing")), None)
    return next((line for line in lines if not _ON_HOST & line.changes.keys()), lines[0] if lines else None)


def _with_keys(text: str, changes: Mapping[str, Any]) -> str:
    """Set keys of a YAML text with one key per line, and keep its comments."""
    lines = text.splitlines()
    for key, value in changes.items():
        section, _, name = key.partition(".")
        written = f"{name}: {yaml.safe_dump(value, default_flow_style=True, width=1000).partition('...')[0].strip()}"
        if f"{section}:" not in lines:
            lines.append(f"{section}:")
        start = lines.index(f"{section}:") + 1
        end = next((i for i in range(start, len(lines)) if not lines[i].startswith(" ")), len(lines))
        place = next((i for i in range(start, end) if lines[i].startswith(f"  {name}:")), None)
        lines[slice(end, end) if place is None else slice(place, place + 1)] = [f"  {written}"]
    return "\n".join(lines) + "\n"
