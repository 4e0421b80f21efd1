"""A configuration of another trainer as one of Cohort's, with what has no equivalent in comments."""

from pathlib import Path

import yaml

from cohort.check.convert.draft import Draft
from cohort.check.convert.swift import from_swift
from cohort.check.convert.trl import from_trl
from cohort.check.convert.verl import from_verl
from cohort.check.launch import ANY_SETTING, Launch
from cohort.check.readers import read_launch
from cohort.check.rules import judge
from cohort.check.rules.cohort import nested
from cohort.check.rules.gpus import counted
from cohort.check.rules.start import EVALUATION, Start
from cohort.check.rules.trl import parse_version
from cohort.check.rules.trl_run import trl_version
from cohort.check.rules.verl_run import BATCH_KEYS
from cohort.config import config_from_dict
from cohort.errors import UserError

__all__ = ["convert_file"]

_SECTIONS = ("model", "data", "rewards", "rollout", "algorithm", "train", "optim", "eval", "hardware", "run")


def convert_file(path: Path, *, version: str | None = None, launched_with: str | None = None) -> str:
    """The YAML of a Cohort configuration that does what the file says, as far as Cohort can.

    `version` is TRL's, where the file is for TRL. What has no equivalent, and what has to be filled in, stands in
    comments at the top; so does what Cohort refuses.

    Raises:
        UserError: the file cannot be read.
    """
    launch = read_launch(path, launched_with=launched_with)
    if launch.framework == "cohort":
        config, notes = nested(launch), ["this is a configuration of Cohort already"]
    else:
        draft = _draft(launch, version)
        config, notes = {name: draft.config[name] for name in _SECTIONS if name in draft.config}, draft.notes
    try:
        config_from_dict(config)
    except UserError as error:
        notes = [f"to change, as it is not valid here: {error}", *notes]
    comments = [f"# Converted from {path.name} ({launch.framework}) by cohort convert.", *(f"# - {n}" for n in notes)]
    head = "\n".join(" ".join(line.split()) for line in comments)
    return f"{head}\n{yaml.safe_dump(config, sort_keys=False, allow_unicode=True)}"


def _draft(launch: Launch, version: str | None) -> Draft:
    draft = Draft(launch)
    start = _start(draft, launch, version)
    if launch.framework == "ms-swift":
        from_swift(draft, start)
    elif launch.framework == "verl":
        from_verl(draft, start)
    else:
        from_trl(draft, start, parse_version(trl_version(launch, version)[0]))
    if launch.others:
        draft.note(f"the file starts {len(launch.others)} more; this is the first one")
    draft.tell_the_rest()
    return draft


def _start(draft: Draft, launch: Launch, version: str | None) -> Start | None:
    """What a batch comes to, with the processes of the file or the fewest with which it starts."""
    judged = judge(launch, trl_version=version)
    unread = {unread.key for unread in launch.unread} - EVALUATION | {
        f.field for f in judged.findings if f.code == "CHK010"
    }
    said = [draft.processes] if draft.processes else []
    for size in [*said, *range(1, 65)] if not unread & (judged.decides | ANY_SETTING) else ():
        start = judged.start(size, judged.knobs)
        if start.starts:
            if size not in said:
                processes = counted(size, "training process")
                draft.note(f"train.prompts_per_step is that of {processes}, the fewest that start there")
            return start
    sizes = set(BATCH_KEYS)
    if launch.framework == "verl" and not unread & sizes:  # whose batches do not depend on the GPUs
        prompts, generations, trained = (judged.knobs[key] for key in BATCH_KEYS)
        return Start(starts=False, generation_batch_size=prompts * generations, global_batch_size=trained * generations)
    draft.note("to fill in: train.prompts_per_step, which could not be worked out")
    return None
