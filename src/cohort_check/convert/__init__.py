"""Convert configurations of other trainers to Cohort; everything without an equivalent becomes a comment."""

from dataclasses import replace
from pathlib import Path

import yaml

from cohort.config import Config, config_from_dict
from cohort.errors import UserError
from cohort_check.convert.draft import Draft
from cohort_check.convert.swift import from_swift
from cohort_check.convert.trl import BATCH, TrlDraft, from_trl
from cohort_check.convert.verl import from_verl
from cohort_check.launch import ANY_SETTING, Launch
from cohort_check.readers import read_launch
from cohort_check.rules import run_rules
from cohort_check.rules.common import EVALUATION, FRAMEWORK_NAMES, RunRules, Start, counted, parse_version
from cohort_check.rules.verl import BATCH_KEYS

__all__ = ["convert_file"]


def convert_file(path: Path, *, framework_version: str | None = None, launched_with: str | None = None) -> str:
    """Convert the first run of a file to the YAML of a Cohort configuration that does the same, as far as Cohort can.

    Comments at the top list what is left to do, with the source's file and line, what Cohort does differently, and
    which settings are not needed and why. What changes the training and could not be carried over is listed in
    `decide_first`, a key with which `cohort train` refuses. No setting of the source is dropped silently.

    Args:
        path: the file.
        framework_version: version of the framework whose defaults apply (for Open-R1: of TRL).
        launched_with: the launch command, if the file does not contain it.

    Raises:
        UserError: the file cannot be read, or is of a framework that is only recognized.
    """
    launch = read_launch(path, launched_with=launched_with)
    config, comments = convert_launch(launch, path.parent, framework_version=framework_version)
    lines = [f"Converted from {path.name} ({launch.framework}) by cohort convert."]
    if launch.framework == "trl" and path.suffix == ".py":
        lines.append("Or run the script with `from cohort.trl import GRPOConfig, GRPOTrainer` (docs/from-trl.md).")
    for heading, entries in comments.items():
        lines += [f"{heading}:", *(f"- {entry}" for entry in entries)] if entries else []
    head = "\n".join("# " + " ".join(line.split()) for line in lines)
    return f"{head}\n{yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=10_000)}"


def convert_launch(
    launch: Launch, folder: Path, *, framework_version: str | None = None
) -> tuple[dict[str, object], dict[str, list[str]]]:
    """Convert a run to a configuration and comments by heading. `folder` is where the files that it names are.

    Raises:
        UserError: the framework is only recognized.
    """
    if launch.framework == "cohort" or (launch.not_checked and not launch.settings):
        why = f": {launch.not_checked}" if launch.not_checked else ""
        raise UserError(f"{launch.reason}{why}; only TRL, Open-R1, ms-swift and verl are converted")
    rules = run_rules(launch, framework_version=framework_version)
    draft, name = _draft(launch, folder, rules), FRAMEWORK_NAMES.get(launch.framework, launch.framework)
    raised = [f for f in rules.findings if launch.framework == "unsloth" and (f.code, f.field) == ("CHK005", BATCH[0])]
    draft.differences += [finding.message for finding in raised]
    draft.decide += [f"program: {why}" for why in (launch.not_checked, rules.foreign) if why]
    comments = {"Defaults": [f"those of {name} {rules.version}: {rules.version_reason}"], **draft.comments()}
    config = {key: draft.config[key] for key in ("decide_first", *Config.model_fields) if draft.config.get(key)}
    try:
        config_from_dict(config)
    except UserError as error:
        first = f"change this, which is not valid here: {error}"
        config = {"decide_first": [], **config}
        config["decide_first"] = [first, *config["decide_first"]]
    return config, comments


def _draft(launch: Launch, folder: Path, rules: RunRules) -> Draft:
    version = parse_version(rules.version)
    draft: Draft
    if launch.framework == "verl":
        draft = Draft(launch, folder, version)
        from_verl(draft, _start(draft, rules), version)
    else:
        draft = trl_draft = TrlDraft(_flat(launch), folder, version)
        convert = from_swift if launch.framework == "ms-swift" else from_trl
        convert(trl_draft, _start(draft, rules), version)
    if launch.others:
        draft.todo.append(f"the file starts {len(launch.others)} more; this is the first one")
    return draft


def _flat(launch: Launch) -> Launch:
    """The launch with each of the arguments in TRL's `model_init_kwargs` and `generation_kwargs` as its own setting."""
    settings = dict(launch.settings)
    for name in ("model_init_kwargs", "generation_kwargs"):
        given = settings.get(name)
        if given is not None and isinstance(given.value, dict):
            del settings[name]
            settings |= {f"{name}.{key}": replace(given, value=value) for key, value in given.value.items()}
    return replace(launch, settings=settings)


def _start(draft: Draft, rules: RunRules) -> Start | None:
    """The batches with the processes of the file, or with the fewest with which it starts."""
    launch = draft.launch
    unread = {unread.key for unread in launch.unread} - EVALUATION
    unread |= {f.field or "" for f in rules.findings if f.code == "CHK010"}
    if launch.framework == "verl":  # whose batches do not depend on the GPUs
        if not unread & set(BATCH_KEYS):
            prompts, generations, trained = (rules.sizes[key] for key in BATCH_KEYS)
            sampled, size = prompts * generations, trained * generations
            return Start(starts=True, generation_batch_size=sampled, global_batch_size=size)
    elif not unread & (rules.decides | ANY_SETTING):
        for size in (draft.processes or 1, *range(1, 65)):
            start = rules.start(size, rules.sizes)
            if start.starts:
                if size != draft.processes:
                    processes = counted(size, "training process")
                    draft.differs(f"train.prompts_per_step is that of {processes}, the fewest that start there")
                return start
    keys = BATCH_KEYS if launch.framework == "verl" else BATCH
    said = ", ".join(f"{key} is {draft.settings.said(key)}" for key in keys if key in draft.settings)
    text = "train.prompts_per_step: fill it in; the source's batch is only known at run time"
    draft.decide.append(f"{text} ({said})" if said else text)
    return None
