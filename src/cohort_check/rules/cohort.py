"""A configuration of Cohort: its own validation is the rule, and any number of processes starts."""

import re
from importlib import metadata
from pathlib import Path
from typing import Any

from cohort.config import ENGINES, AutoRolloutConfig, config_from_dict
from cohort.errors import UserError
from cohort.plan.dataset import missing_files
from cohort_check.findings import Finding
from cohort_check.launch import Launch, Settings, put
from cohort_check.rules.common import RunRules, Start, refused


def cohort_rules(launch: Launch) -> RunRules:
    """Validate a configuration as `cohort train` does."""
    findings: tuple[Finding, ...] = ()
    try:
        config = config_from_dict(nested(launch))
        config.check_settled()
    except UserError as error:
        key = re.match(r"([a-z_]+(?:\.\w+)*): ", str(error))  # a message begins with its key, and names what works
        start, findings = refused(str(error)), (Finding("CHK002", key[1] if key else None, str(error)),)
    else:
        prompts = config.train.prompts_per_step
        size = prompts * config.rollout.num_generations
        start = Start(
            starts=True, generation_batch_size=size, steps_per_generation=1, global_batch_size=size, prompts=prompts
        )
    return RunRules(
        version=next((found.version for found in metadata.distributions(name="cohort-rl")), "from source"),
        version_reason="installed",
        sizes={},
        decides=frozenset(),
        start=lambda world_size, sizes: start,
        sampling=ENGINES.get(Settings(launch).text("rollout.engine", "auto"), AutoRolloutConfig).sampled_by,
        findings=findings,
        blocked=start.message,
    )


def missing_file_findings(launch: Launch, base_dir: Path) -> list[Finding]:
    """The files of a configuration in `base_dir` that are not there."""
    config = config_from_dict(nested(launch), base_dir=base_dir)
    return [Finding("CHK021", field, message) for field, message in missing_files(config, base_dir)]


def nested(launch: Launch) -> dict[str, Any]:
    """Return the settings of a launch as a nested mapping. A value in the place of a section has its own finding."""
    tree: dict[str, Any] = {}
    for key, said in launch.settings.items():
        put(tree, key, said.value)
    return tree
