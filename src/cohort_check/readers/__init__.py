"""Readers of launch files."""

import re
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path

from cohort.errors import UserError
from cohort_check.findings import Finding, load_table
from cohort_check.launch import Launch, Setting
from cohort_check.readers import trl, trl_python, verl
from cohort_check.readers.files import YamlTree, count_of, find_text, notebook_code, read_text, read_yaml_tree
from cohort_check.readers.launcher import find_server, is_of_launcher, read_command, slurm_variables
from cohort_check.readers.pins import pinned_version
from cohort_check.readers.shell import Arms, Command, Known, exported, parse_shell, variants

__all__ = ["FORMATS", "read_launch", "read_variants"]

FORMATS: str = load_table("readers/names.yaml")["formats"]
_OF_COMMANDS = (verl.read_shell, trl.read_swift_shell, trl.read_shell)


def read_launch(path: Path, *, launched_with: str | None = None, arms: Arms = ()) -> Launch:
    """Read the runs of a file. `launched_with` is the launch command, if the file does not contain it.

    `arms` are those that branches of a shell script take.

    Raises:
        UserError: the file cannot be read, or has an unknown format.
    """
    text = read_text(path)
    try:
        code = notebook_code(text) if path.suffix == ".ipynb" else text
        commands = parse_shell(launched_with, "--launch") if launched_with else ()
        if launched_with and len(commands) != 1:
            raise UserError(f"--launch {launched_with!r}: must be one command, such as 'torchrun --nproc_per_node 8'")
        command = commands[0] if commands else None
        launches = list(_read(path, code, command, arms))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    except RecursionError:
        raise UserError(f"{path}: nested too deeply") from None
    if not launches:
        raise UserError(f"{path}: none of the formats that are known: {FORMATS}")
    if command is not None and path.suffix not in (".py", ".ipynb"):
        launches = [_launched(launch, command) for launch in launches]
    launches = [replace(one, version=one.version or pinned_version(one.framework, path, text)) for one in launches]
    return replace(launches[0], others=tuple(launches[1:]))


def read_variants(path: Path, launch: Launch, keys: Set[str]) -> Iterator[tuple[str, Launch]]:
    """Yield a run of a shell script for each way through the branches that decide `keys`, after their values there."""
    deciding = [entry for entry in launch.unread if entry.key in keys or is_of_launcher(entry)]
    named = [entry for entry in deciding if not entry.key.startswith("(")]
    names = {name for entry in deciding for name in re.findall(r"\$(\w+)", entry.reason)}
    text = read_text(path) if names and launch.form == "shell" else ""
    for arms in variants(text, path.name, names, known=slurm_variables(text)) if text else ():
        first = read_launch(path, arms=arms)
        for run in [run for run in (first, *first.others) if run.reason == launch.reason]:
            said = {entry.key.rpartition(".")[2]: run.settings.get(entry.key) for entry in named}
            yield ", ".join(f"{key}={one.value if one else ''}" for key, one in said.items()) or "one", run


def read_arguments(launched_with: str, script: Path) -> tuple[int, list[str]]:
    """Read the processes that a launch command starts, and the arguments that it gives a script.

    Raises:
        UserError: it does not start the script, or its words are only known when it runs.
    """
    for command in parse_shell(launched_with, "--launch"):
        names = [word.name for word in command.words]
        if script.name in names and not any(word.missing for word in command.words):
            launched = read_command(command, "trl", Path.cwd())
            arguments = [word.text for word in command.words[names.index(script.name) + 1 :]]
            return int(launched.processes.value) if launched.processes else 1, arguments
    raise UserError(f"--launch {launched_with!r}: must start {script.name}, such as 'python {script.name} --lr 1e-6'")


def _started(path: Path, text: str, commands: Sequence[Command]) -> Iterator[Launch]:
    """Yield the runs of the scripts that a shell script starts."""
    for command in commands:
        scripts = [word.text for word in command.words if word.text.endswith(".sh") and not word.missing]
        if scripts and command.words[0].name in ("bash", "sh", "source", "."):
            with suppress(UserError, ValueError):
                place, inner = find_text(scripts[0], path.parent)
                yield from _read(place, inner, None, (), exported(text, path.name))


def _read(path: Path, text: str, command: Command | None, arms: Arms, known: Known = ()) -> Iterator[Launch]:
    """Yield every run of a file."""
    suffix = path.suffix.lower()
    if suffix in (".py", ".ipynb"):
        yield from trl_python.read(path, text, command)
    elif suffix == ".toml":
        yield from filter(None, [_recognize(path, text)])
    elif suffix in (".sh", ".bash", ".slurm", ".sbatch", ".zsh") or text.startswith("#!"):
        commands = parse_shell(text, path.name, known=(*slurm_variables(text), *known), arms=arms)
        server = find_server(commands)
        found = [next(filter(None, (read(path, text, one, server) for read in _OF_COMMANDS)), None) for one in commands]
        runs = [_with_lost(run, commands[i + 1 :]) for i, run in enumerate(found) if run]
        sure = [run for run in runs if run.framework not in ("trl", "open-r1") or trl.SIGNS & run.settings.keys()]
        yield from sure or runs or [*_started(path, text, commands)] or filter(None, [_recognize(path, text)])
    elif tree := read_yaml_tree(text, path.name):
        formats = (_read_cohort, verl.read_yaml, trl.read_swift_yaml, trl.read_yaml)
        yield from islice(filter(None, (read(path, text, tree) for read in formats)), 1)


def _with_lost(run: Launch, below: Sequence[Command]) -> Launch:
    """Add the options on the lines below a command that a comment or a blank keeps from it."""
    lost = [command.words[0] for command in takewhile(lambda one: one.words[0].text.startswith("--"), below)]
    told = "{} is no part of the command, which ends on a line before: a comment or an empty line ends it too"
    found = [Finding("CHK005", None, told.format(word.text), where=word.where) for word in lost]
    left = [Setting(str(finding.message), str(finding.where)) for finding in found]
    return replace(run, findings=(*run.findings, *found), todo=(*run.todo, *left))


def _launched(launch: Launch, command: Command) -> Launch:
    """Apply the processes and options of a launch command to a run."""
    if launch.not_checked is not None:
        return launch
    launched = read_command(command, launch.framework, Path.cwd())
    own = command.has("trl", "grpo")
    return replace(
        launch,
        settings={**launch.settings, **{key: said for key, said in launched.settings.items() if key != "config"}},
        processes=launched.processes or (count_of(launch.settings, "num_processes") if own else launch.processes),
        processes_per_node=launched.processes_per_node or launch.processes_per_node,
        training_gpus=launched.training_gpus or launch.training_gpus,
        unread=(*launch.unread, *launched.unread),
    )


def _read_cohort(path: Path, text: str, tree: YamlTree) -> Launch | None:
    """Read a configuration of Cohort; None for any other file."""
    if not {"model", "data", "rewards"} <= tree.top.keys() or "model" in tree.values:
        return None
    processes = count_of(tree.values, "hardware.processes")
    return tree.launch("cohort", "YAML with the sections model, data and rewards", tree.values, processes=processes)


def _recognize(path: Path, text: str) -> Launch | None:
    """Recognize a TOML file or a script of prime-rl or OpenRLHF; None for any other file."""
    for framework, entry in load_table("recognized.toml").items():
        if found := re.search(entry["pattern"], text):
            reason, told = f"it has {found[0]!r}", entry["not_checked"]
            launch = Launch(framework=framework, form="shell", reason=reason, settings={}, not_checked=told)
            return replace(launch, form="toml") if path.suffix == ".toml" else launch
    return None
