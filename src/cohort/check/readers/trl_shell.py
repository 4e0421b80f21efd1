"""Shell scripts that start TRL or Open-R1: `trl grpo`, `accelerate launch ... grpo.py --config recipe.yaml`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cohort.check.findings import Finding
from cohort.check.launch import Launch, Said
from cohort.check.readers import trl_yaml
from cohort.check.readers.files import read_text
from cohort.check.readers.launcher import read_launcher
from cohort.check.readers.options import find_command, gpus_of, parse_options
from cohort.check.readers.shell import Command, parse_shell
from cohort.errors import UserError


def read(path: Path, text: str) -> Launch | None:
    """The training commands of a script, with their recipes, or None where there is none."""
    commands = parse_shell(text)
    runs = [command for command in commands if _starts_grpo(command)]
    if not runs:
        return None
    first, *others = (_launch_of(run, commands, path.parent, text) for run in runs)
    return replace(first, others=tuple(others))


def _launch_of(run: Command, commands: Sequence[Command], folder: Path, text: str) -> Launch:
    where = f"the command on line {run.line}"
    launcher = read_launcher(run, where, folder)
    options = parse_options(launcher.script, where)
    alone = launcher.processes is None and run.words[0].text.rsplit("/", 1)[-1].startswith("python")
    settings, findings = dict(options.settings), list[Finding]()
    recipe = settings.pop("config", None)
    on_slurm = any(word.text.endswith("train.slurm") for word in run.words)
    if on_slurm and recipe is not None:  # the script of Open-R1 has options of its own and names recipes in short
        model, task = (str(settings[key].value) if key in settings else "" for key in ("model", "task"))
        recipe, settings = Said(f"recipes/{model}/{task}/config_{recipe.value}.yaml", recipe.where), {}
    if recipe is not None and not isinstance(recipe.value, list):
        in_recipe, problem = _recipe(folder, str(recipe.value))
        settings = {**in_recipe, **settings}
        findings += [problem] if problem else []
    if on_slurm and "use_vllm" in settings and str(settings["use_vllm"].value).lower() == "true":
        launcher = read_launcher(run, where, folder, uses_vllm=True)
    findings += launcher.findings
    servers = find_command(commands, ("trl", "vllm-serve"), ("vllm", "serve"))
    return Launch(
        framework=trl_yaml.framework_of(settings),
        form="shell",
        reason=f"a shell script that starts GRPO with TRL on line {run.line}",
        settings=settings,
        unread=options.unread,
        processes=Said(1, f"{where}, which uses no launcher") if alone else launcher.processes,
        processes_per_node=launcher.per_node,
        training_gpus=launcher.gpus,
        sharding=launcher.sharding,
        server_gpus=gpus_of(servers[0].env) if servers else None,
        server=parse_options(servers[0].words, f"line {servers[0].line}").settings if servers else {},
        version=trl_yaml.pinned_version(text),
        findings=tuple(findings),
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
    """Whether a script launches what its own arguments name, as Open-R1's slurm/train.slurm does."""
    launched = find_command(parse_shell(text), ("accelerate", "launch"), ("torchrun",))
    words = [word.text.rsplit("/", 1)[-1] for command in launched for word in command.words]
    return ".py" in words  # nothing else is known of the script's name


def _recipe(folder: Path, name: str) -> tuple[dict[str, Said], Finding | None]:
    """The settings of the recipe that `--config` names, looked up beside the script and in the working directory."""
    tries = [folder / name, Path(name)]
    path = next((candidate for candidate in tries if candidate.is_file()), tries[0])
    try:
        tree = trl_yaml.cached_tree(read_text(path))
    except (UserError, ValueError) as error:
        return {}, Finding("CHK004", "--config", f"the recipe was not read: {error}")
    if tree is None:
        return {}, Finding("CHK004", "--config", f"{path} is not a recipe: it has no keys")
    settings = trl_yaml.nested_once(tree)
    return {key: Said(said.value, f"{path.name} {said.where}") for key, said in settings.items()}, None
