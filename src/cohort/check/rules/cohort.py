"""A configuration of Cohort: its own validation is the rule, and any number of processes starts."""

import re
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from cohort.check.findings import Finding
from cohort.check.launch import Launch, Setting, Settings
from cohort.check.rules.start import BatchSizes, RunRules, Start, refused
from cohort.config import ENGINES, AutoRolloutConfig, config_from_dict
from cohort.errors import UserError
from cohort.plan.dataset import missing_files

_GENERATIONS, _MOST_GENERATIONS = "rollout.num_generations", 64


def cohort_rules(launch: Launch) -> RunRules:
    """Validate a configuration as `cohort train` does."""
    settings = Settings(launch)
    problem: str | None = None
    prompts = generations = 0
    try:
        config = config_from_dict(nested(launch))
    except UserError as error:
        problem = str(error)
    else:
        prompts, generations = config.train.prompts_per_step, config.rollout.num_generations

    def start(world_size: int, changed: BatchSizes) -> Start:
        if problem is not None:
            return refused(problem)
        size = prompts * generations
        return Start(
            starts=True,
            generation_batch_size=size,
            steps_per_generation=1,
            global_batch_size=size,
            prompts=prompts,
        )

    engine = ENGINES.get(settings.text("rollout.engine", "auto"), AutoRolloutConfig)
    return RunRules(
        version=_installed(),
        version_reason="installed",
        sizes={},
        decides=frozenset(),
        start=start,
        sampling=engine.sampled_by,
        findings=() if problem is None else (_refusal(launch, problem),),
        blocked=problem,
    )


def _refusal(launch: Launch, problem: str) -> Finding:
    field = _field(problem)
    nearest: list[str] = []
    if field == _GENERATIONS:  # what is proposed was tried
        more = ((_GENERATIONS, n) for n in range(2, _MOST_GENERATIONS + 1))
        ways = (more, iter([("algorithm.name", "reinforce_pp")]))
        firsts = (next((change for change in way if _accepts(launch, *change)), None) for way in ways)
        nearest = [f"{first[0]}={first[1]}" for first in firsts if first is not None]
    return Finding("CHK002", field, problem, tuple(nearest))


def _accepts(launch: Launch, key: str, value: int | str) -> bool:
    changed = replace(launch, settings={**launch.settings, key: Setting(value, "")})
    try:
        config_from_dict(nested(changed))
    except UserError:
        return False
    return True


def missing_file_findings(launch: Launch, base_dir: Path) -> list[Finding]:
    """The files of a configuration in `base_dir` that are not there."""
    config = config_from_dict(nested(launch), base_dir=base_dir)
    return [Finding("CHK021", field, message) for field, message in missing_files(config, base_dir)]


def _field(problem: str) -> str | None:
    """The key that a message begins with."""
    match = re.match(r"([a-z_]+(?:\.\w+)*): ", problem)
    return match[1] if match else None


def _installed() -> str:
    # `cohort.__version__` would pull in the whole package
    try:
        return metadata.version("cohort-rl")
    except metadata.PackageNotFoundError:
        return "from source"


def nested(launch: Launch) -> dict[str, Any]:
    """Return the settings of a launch as a nested mapping."""
    tree: dict[str, Any] = {}
    for key, said in launch.settings.items():
        *parents, last = key.split(".")
        node = tree
        for part in parents:
            inner = node.setdefault(part, {})
            node = inner if isinstance(inner, dict) else {}  # a value in place of a section has its own finding
        node[last] = said.value
    return tree
