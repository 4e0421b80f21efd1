"""Propose a whole configuration for a model and GPUs (`cohort plan --model` without a file)."""

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from string import Template
from typing import Any

import yaml

from cohort.config import config_from_dict
from cohort.config.load import apply_override, read_yaml
from cohort.errors import UserError
from cohort.plan.advice import Advice, advise, replan
from cohort.plan.hardware import Hardware
from cohort.plan.predict import Plan, predict_wanted
from cohort.plan.shape import HUB_IDS, find_shape

_TEMPLATE = Template(Path(__file__).with_name("template.yaml").read_text(encoding="utf-8"))
_UNTIMED = {"model.quantization", "reference.quantization"}  # slower than predicted
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
    text = _TEMPLATE.substitute(path=_flow(path_of(model)), dir=_flow(f"runs/{shape.name}"))
    raw = read_yaml(text)
    for override in overrides:
        apply_override(raw, override)
    config = config_from_dict(raw)
    if config.hardware.device == "cpu":
        raise UserError("hardware.device: cpu: configurations are proposed for GPUs; plan a file for a CPU")
    plan = predict_wanted(config, shape, machines)
    given = {override.partition("=")[0] for override in overrides}
    best = _choose(plan, given)
    if best is None:
        return plan, _written(text, raw)
    changes = dict(best.changes)
    if changes.keys() & {"model.adapter", "model.dtype"} and not _is_out("train.learning_rate", given):
        changes["train.learning_rate"] = _RAISED_RATE
    for key, value in changes.items():
        section, _, name = key.partition(".")
        raw.setdefault(section, {})[name] = value
    costs = "" if best.costs == "same gradient" else f"# {best.costs}\n"
    return replan(plan, changes), costs + _written(text, raw)


def path_of(model: str) -> str:
    """Return `model.path` for a preset, size, Hugging Face id or folder."""
    if Path(model).is_dir():
        return str(Path(model).resolve())
    return model if "/" in model else HUB_IDS[find_shape(model).name]


def _choose(plan: Plan, given: Set[str]) -> Advice | None:
    """The first change for these GPUs whose time is predicted best; none if the run fits as fast without.

    Changes of keys that are `given` are left out.
    """
    lines = [line for line in advise(plan) if not any(_is_out(key, given) for key in line.changes)]
    if plan.fits:
        return next((line for line in lines if line.keeps_experiment), None)
    return min(lines, key=lambda line: (line.updates_on_host, bool(_UNTIMED & line.changes.keys())), default=None)


def _is_out(key: str, given: Set[str]) -> bool:
    return key.startswith("--") or any(f"{key}.".startswith(f"{g}.") or g.startswith(f"{key}.") for g in given)


def _written(text: str, raw: Mapping[str, Any]) -> str:
    """Write the values of `raw` as `text` has its own, with its comments."""
    before, lines, section = read_yaml(text), {}, ""
    for line in text.splitlines():
        name = line.partition(":")[0]
        section = section if line.startswith(" ") else name
        lines[f"{section}.{name.strip()}" if line.startswith(" ") else name] = line
    written = []
    for section, value in raw.items():
        is_block = isinstance(value, dict) and lines.get(section, ":").endswith(":")
        if is_block:
            written.append(f"{section}:")
        for key, entry in {f"{section}.{k}": v for k, v in value.items()}.items() if is_block else [(section, value)]:
            name = key.rpartition(".")[2]
            own = before.get(section, {}).get(name) if is_block else before.get(section)
            line = lines.get(key, "")
            if not line or entry != own:
                line = f"{'  ' * is_block}{name}: {_flow(entry)}" + "".join(line.partition("  # ")[1:])
            written.append(line)
    return "\n".join(written) + "\n"


def _flow(value: Any) -> str:
    """Write a value in one line of YAML."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).partition("\n...")[0].strip()
