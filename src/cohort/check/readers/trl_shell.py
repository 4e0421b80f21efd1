"""Shell scripts that start TRL or Open-R1: `trl grpo`, `accelerate launch ... grpo.py --config recipe.yaml`."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from cohort.check.launch import Launch, Said, Unread
from cohort.check.readers import trl_yaml
from cohort.check.readers.argument_loop import own_arguments
from cohort.check.readers.files import read_text
from cohort.check.readers.launcher import OPEN_R1_GPUS_PER_NODE, read_launcher, sharding_of
from cohort.check.readers.options import Options, find_command, gpus_of, parse_options
from cohort.check.readers.shell import Command, parse_shell
from cohort.check.readers.shell_words import Word, why_unread
from cohort.errors import UserError

_LEVELS_UP = 2  # from a script to where it is started


def read(path: Path, text: str) -> Launch | None:
    """The training commands of a script, with their recipes, or None where there is none."""
    commands = parse_shell(text)
    runs = [command for command in commands if _starts_grpo(command)]
    if not runs:
        return _of_own_arguments(path, text)
    first, *others = (_launch_of(run, commands, path.parent, text) for run in runs)
    return replace(first, others=tuple(others))


def _launch_of(run: Command, commands: Sequence[Command], folder: Path, text: str) -> Launch:
    where = f"the command on line {run.line}"
    launcher = read_launcher(run, where, folder)
    options = parse_options(launcher.script, where)
    alone = launcher.processes is None and run.words[0].text.rsplit("/", 1)[-1].startswith("python")
    on_slurm = any(word.text.endswith("train.slurm") for word in run.words)
    named = _of_open_r1(options, run.words, where) if on_slurm else _named(options)
    settings, unread = dict(named.settings), [*named.unread, *launcher.unread]
    recipe = settings.pop("config", None)
    if recipe is not None and not isinstance(recipe.value, list):
        in_recipe, problem = _recipe(folder, str(recipe.value))
        settings = {**in_recipe, **settings}
        unread += [Unread("(recipe)", where, problem)] if problem else []
    servers = find_command(commands, ("trl", "vllm-serve"), ("vllm", "serve"))
    server_gpus = gpus_of(servers[0].env) if servers else None
    server = parse_options(servers[0].words, f"line {servers[0].line}").settings if servers else {}
    if on_slurm and "use_vllm" in settings and str(settings["use_vllm"].value).lower() == "true":
        launcher = read_launcher(run, where, folder, uses_vllm=True)
        server_gpus = tuple(map(str, range(OPEN_R1_GPUS_PER_NODE)))  # of the last node
        sizes = {"tensor_parallel_size": "tp", "data_parallel_size": "dp"}
        server = {name: options.settings.get(short, Said(1, where)) for name, short in sizes.items()}
    return Launch(
        framework=trl_yaml.framework_of(settings),
        form="shell",
        reason=f"a shell script that starts GRPO with TRL on line {run.line}",
        settings=settings,
        unread=tuple(unread),
        processes=Said(1, f"{where}, which uses no launcher") if alone else launcher.processes,
        processes_per_node=launcher.per_node,
        training_gpus=launcher.gpus,
        sharding=launcher.sharding or sharding_of(settings, folder),
        server_gpus=server_gpus,
        server=server,
        version=trl_yaml.pinned_version(text),
        findings=launcher.findings,
    )


def _named(options: Options) -> Options:
    """The options of a training script. A recipe whose name could not be resolved may hold anything."""
    unread = tuple(replace(entry, key="(recipe)") if entry.key == "config" else entry for entry in options.unread)
    return replace(options, unread=unread)


def _of_open_r1(options: Options, words: Sequence[Word], where: str) -> Options:
    """What Open-R1's slurm/train.slurm hands on: it names recipes in short, and has further options in `--args`."""
    missing = [entry.reason for entry in options.unread if entry.key in ("model", "task", "config")]
    lacking = [name for name in ("model", "task", "config") if name not in options.settings]
    # one quoted word, which looks like an option itself
    quoted = next((word for before, word in pairwise(words) if before.text == "--args"), Word(""))
    further = parse_options([Word(part) for part in quoted.text.split()], where)
    unread = [Unread("(options)", where, why_unread((name,))) for name in quoted.missing]
    if lacking:
        reason = "; ".join(missing) or f"--{', --'.join(lacking)} of train.slurm: not given"
        return Options(further.settings, (*unread, Unread("(recipe)", where, reason)))
    model, task, config = (options.settings[name].value for name in ("model", "task", "config"))
    recipe = Said(f"recipes/{model}/{task}/config_{config}.yaml", where)
    return Options({**further.settings, "config": recipe}, (*unread, *further.unread))


def _of_own_arguments(path: Path, text: str) -> Launch | None:
    """A script that launches what its own arguments name, such as Open-R1's slurm/train.slurm, or None."""
    options = own_arguments(text)
    commands = parse_shell(text)
    launched = find_command(commands, ("accelerate", "launch"), ("torchrun",))
    if not options or not _names_no_script(launched):
        return None
    hint = (
        f"the script's own arguments say which; name it in a file with `sbatch --nodes=2 {path.name} "
        f"{' '.join(f'{name} ...' for name in options)}`, or check the recipe with --launch"
    )
    return Launch(
        framework="open-r1" if "open_r1" in text else "trl",
        form="shell",
        reason=f"a shell script that starts what its own arguments name on line {launched[0].line}",
        settings={},
        unread=(
            *(
                Unread(name, f"line {line}", f"{option} of the script's own arguments")
                for option, (name, line) in options.items()
            ),
            Unread("(recipe)", f"line {launched[0].line}", hint),
        ),
        version=trl_yaml.pinned_version(text),
    )


def _starts_grpo(command: Command) -> bool:
    texts = [word.text.rsplit("/", 1)[-1] for word in command.words]
    if "trl" in texts and "grpo" in texts:
        return True
    launched = {"accelerate", "torchrun", "python", "python3", "sbatch", "deepspeed"} & set(texts[:3])
    script = any(name.endswith(".py") and ("grpo" in name or "gspo" in name) for name in texts)
    options = {word.text[2:].partition("=")[0].replace("-", "_") for word in command.words if word.text[:2] == "--"}
    by_name = script or "trl.scripts.grpo" in texts or ("train.slurm" in texts and "grpo" in texts)
    return bool(launched) and (by_name or bool(options & {*trl_yaml.SIGNS}))


def awaits_recipe(text: str) -> bool:
    """Whether a script launches what its own arguments name."""
    return _names_no_script(find_command(parse_shell(text), ("accelerate", "launch"), ("torchrun",)))


def _names_no_script(launched: Sequence[Command]) -> bool:
    words = [word.text.rsplit("/", 1)[-1] for command in launched for word in command.words]
    return ".py" in words  # nothing else is known of the script's name


def _recipe(folder: Path, name: str) -> tuple[dict[str, Said], str | None]:
    """The settings of the recipe that `--config` names, and why they could not be read.

    It is looked up beside the script, in the folders above it (where scripts are usually started), and here.
    """
    tries = [place / name for place in (folder, *folder.resolve().parents[:_LEVELS_UP], Path())]
    path = next((candidate for candidate in tries if candidate.is_file()), tries[0])
    try:
        tree = trl_yaml.cached_tree(read_text(path))
    except (UserError, ValueError) as error:
        return {}, str(error)
    if tree is None:
        return {}, f"{path} is not a recipe: it has no keys"
    settings = trl_yaml.nested_once(tree)
    return {key: Said(said.value, f"{path.name} {said.where}") for key, said in settings.items()}, None
