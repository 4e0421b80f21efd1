"""Files of the user's functions: their hashes, which a run records at each start, and which of them have changed."""

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from cohort.config import Config
from cohort.config.algorithm import CustomFunction
from cohort.display.run_log import EVENTS
from cohort.user_code import is_user_code


def user_files(config: Config) -> dict[str, str]:
    """Return file -> SHA-256 of the files with the run's own rewards, tools, environments, agent and algorithm.

    Of functions named by module, only those that this process has loaded are found; installed packages are left out.
    """
    hashes = {}
    for use in _uses(config):
        where = use.rpartition(":")[0]
        file = where if where.endswith(".py") else getattr(sys.modules.get(where), "__file__", None)
        if file and is_user_code(file):
            with suppress(OSError):  # an error when the function is loaded
                hashes[file] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return hashes


def _uses(config: Config) -> Iterator[str]:
    yield from (reward.use for reward in config.rewards)
    yield from (tool.use for tool in config.rollout.tools)
    yield from (spec.use for spec in config.rollout.environments.values())
    yield config.rollout.agent or ""
    yield from (choice.use for choice in dict(config.algorithm).values() if isinstance(choice, CustomFunction))


def changed_files(folder: Path, files: Mapping[str, str], *, steps_done: int) -> list[str]:
    """Return a warning for each file that is another than when the run last started.

    Args:
        folder: run folder, whose last start is compared.
        files: hashes of the files now.
        steps_done: steps of the checkpoint from which the run resumes.
    """
    before: Mapping[str, str] = {}
    with suppress(OSError):
        for line in (folder / EVENTS).read_bytes().splitlines():
            with suppress(ValueError, AttributeError):  # a line that was cut off
                before = json.loads(line).get("files", before)
    return [
        f"warning: {file} has changed since the run last started: from step {steps_done + 1} on, its functions may "
        f"mean something else than in the steps before"
        for file, found in files.items()
        if before.get(file, found) != found
    ]
