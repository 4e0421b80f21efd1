"""Options of command lines, their recipes, and the processes that accelerate, torchrun, deepspeed or Slurm start."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from cohort_check.findings import load_table
from cohort_check.launch import Framework, Launch, Setting, Unread
from cohort_check.readers.files import find_yaml
from cohort_check.readers.shell import Command, Word

NAMES: Mapping[str, Any] = load_table("readers/names.yaml")["commands"]


@dataclass(frozen=True, slots=True)
class Options:
    """Parsed `--key value`, `--key=value` and flags (true). A key with several values has a list."""

    settings: dict[str, Setting] = field(default_factory=dict)
    unread: tuple[Unread, ...] = ()

    def whole(self, key: str | None, default: int | None = None) -> int | None:
        """A whole number; None if it could not be read."""
        if any(entry.key == key for entry in self.unread):
            return None
        value = self.text(key or "")
        return default if not value else int(value) if value.isdecimal() and len(value) < 7 else None

    def text(self, key: str) -> str:
        """The first value of a key as text; empty if there is none."""
        value = self.settings[key].value if key in self.settings else ""
        return str(value[0] if isinstance(value, list) else value)


def parse_options(words: Sequence[Word]) -> Options:
    """Parse the options of a command line."""
    parts: list[list[Word]] = []  # `--key` and its values
    unread: dict[str, Unread] = {}
    for word in words:
        if word.text.startswith("--") and len(word.text) > 2:
            parts.append([replace(word, text=text) for text in word.text.split("=", 1)])
        elif word.missing and (word.text == "$@" or (not word.text and (not parts or len(parts[-1]) > 1))):
            unread |= {word.where: unknown_word(word)}
        elif parts:
            parts[-1].append(word)
    settings: dict[str, Setting] = {}
    for option, *values in parts:
        key, texts = option.text[2:].replace("-", "_"), [word.text for word in values]
        missing = dict.fromkeys(reason for word in (option, *values) for reason in word.missing)
        if missing:
            settings.pop(key, None)  # the last one counts
            unread[key] = Unread(key, option.where, "; ".join(missing))
        else:
            unread.pop(key, None)
            settings[key] = Setting(True if not texts else texts[0] if len(texts) == 1 else texts, option.where)
    return Options(settings, tuple(unread.values()))


def unknown_word(word: Word) -> Unread:
    """A word that may hold any options: a variable from outside, or the script's own arguments."""
    return Unread("(arguments)" if word.text == "$@" else "(options)", word.where, "; ".join(word.missing))


def read_command(command: Command, framework: Framework, folder: Path, server: Command | None = None) -> Launch:
    """Read the options of a training command, and the processes that its launcher starts.

    `folder` is where a configuration file of accelerate is looked up; `server` is the command of the same file that
    starts the sampling server.
    """
    start = _script_at(command.words)
    names = {word.name for word in command.words[: start + 1]}
    options = parse_options(command.words[start:])
    own = options if "trl" in names else parse_options(command.words[:start])
    gpus = gpus_of(command)
    configured = own.text("config_file") or own.text("accelerate_config") or own.text("accelerator")
    said, problems = own, list[Unread]()
    if configured.endswith((".yaml", ".yml", ".json")):  # else one of TRL's own, such as zero3
        try:
            said = Options({**find_yaml(configured, folder).values, **own.settings}, own.unread)
        except ValueError as error:
            problems.append(Unread("config_file", command.where, str(error)))
    launcher = next((entry for entry in NAMES["launchers"] if names & {*entry["names"]}), None)
    if launcher is None:  # one of the framework's own
        launcher = NAMES["variables"]
        counts = [(key, command.env[key]) for key in launcher.values() if key in command.env]
        said = parse_options([replace(word, text=f"--{key}={word.text}") for key, word in counts])
    count, nodes = launcher.get("processes"), said.whole(launcher.get("nodes"), 1)
    visible = len(gpus) if gpus and (count == "num_gpus" or "multi_gpu" in said.settings) else None
    processes = said.whole(count, launcher.get("usual", visible))
    if processes is not None and count != "num_processes":  # which are those of all nodes
        processes = processes * nodes if nodes is not None else None
    return Launch(
        framework=framework,
        form="shell",
        reason=f"the command at {command.where}",
        settings=options.settings,
        unread=(*options.unread, *(entry for entry in said.unread if is_of_launcher(entry)), *problems),
        processes=None if processes is None else Setting(processes, command.where),
        processes_per_node=None if processes is None or not nodes else processes // nodes,
        training_gpus=gpus,
        server_gpus=gpus_of(server) if server else None,
        server=parse_options(server.words).settings if server else {},
    )


def is_of_launcher(entry: Unread) -> bool:
    """Whether an option or variable that could not be read says which processes start."""
    return entry.key in NAMES["deciding"] or entry.key.isupper()


def with_recipe(launch: Launch, folder: Path) -> Launch:
    """Add the settings of the recipe that `--config` names. One that cannot be read may hold any setting."""
    unread = [replace(entry, key="(recipe)") if entry.key == "config" else entry for entry in launch.unread]
    settings = dict(launch.settings)
    named = settings.pop("config", None)
    if named is not None:
        try:
            settings = {**find_yaml(str(named.value), folder).top, **settings}
        except ValueError as error:
            unread.append(Unread("(recipe)", named.where, str(error)))
    return replace(launch, settings=settings, unread=tuple(unread))


def find_server(commands: Sequence[Command]) -> Command | None:
    """The first command that starts a sampling server."""
    return next((command for command in commands for name in NAMES["servers"] if command.has(*name)), None)


def _script_at(words: Sequence[Word]) -> int:
    """Index of the training script or subcommand, after the launcher's own options."""
    for at, (word, after) in enumerate(pairwise((*words, Word("")))):
        is_module = word.text in ("-m", "--module") and not after.text.startswith("torch.distributed")
        if is_module or word.name in ("trl", "swift", "megatron") or word.name.endswith(".py"):
            return at
    gaps = (i for i, w in enumerate(words) if w.missing and not w.text and not re.match("--[^=]*$", words[i - 1].text))
    return next(gaps, len(words) - 1) + 1  # after a script whose name is not known


def gpus_of(command: Command) -> tuple[str, ...] | None:
    """GPUs of CUDA_VISIBLE_DEVICES; None if it is not set or cannot be read."""
    word = command.env.get("CUDA_VISIBLE_DEVICES", command.env.get("ASCEND_RT_VISIBLE_DEVICES"))
    if word is None or word.missing:
        return None
    return tuple(part.strip() for part in word.text.split(",") if part.strip())


def slurm_variables(text: str) -> tuple[tuple[str, str], ...]:
    """Environment variables that Slurm sets for the nodes and GPUs that a script asks for."""
    options = NAMES["slurm"].items()
    found = [(names, re.search(rf"^#SBATCH\b.*[ \t]{option}", text, re.MULTILINE)) for names, option in options]
    return tuple((name, match[1]) for names, match in found if match for name in names.split())
