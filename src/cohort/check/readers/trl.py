"""TRL and Open-R1: YAML recipes, and the shell commands that start them."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cohort.check.findings import Finding
from cohort.check.launch import Launch, Said, Unread
from cohort.check.readers.files import find_text
from cohort.check.readers.launcher import parse_options, read_command, read_sharding
from cohort.check.readers.shell import Command, Word, parse_shell
from cohort.check.readers.yaml_tree import YamlTree, read_yaml_tree
from cohort.errors import UserError

_SIGNS = (
    "num_generations reward_funcs max_completion_length generation_batch_size steps_per_generation reward_weights "
    "scale_rewards epsilon_high num_iterations vllm_mode"
)
SIGNS = frozenset(_SIGNS.split())  # keys that TRL has for GRPO and not for other ways of training
_OPEN_R1_ONLY = (
    "benchmarks callbacks chat_template code_eval_scoring_mode code_eval_test_batch_size code_language "
    "code_provider cosine_max_len cosine_max_value_correct cosine_max_value_wrong cosine_min_value_correct "
    "cosine_min_value_wrong dataset_mixture dataset_prompt_column e2b_router_url ioi_provider max_completion_len "
    "morph_router_url overwrite_hub_revision parallel_code_exec_per_proc push_to_hub_revision "
    "repetition_max_penalty repetition_n_grams soft_punish_cache system_prompt wandb_run_group"
)
OPEN_R1_ONLY = frozenset(_OPEN_R1_ONLY.split())  # keys of Open-R1 that TRL does not have
_OPEN_R1_GPUS = 8  # of each node, written into its slurm/train.slurm
_OWN_SCRIPTS = ("open_r1/grpo.py", "open_r1.grpo", "scripts/grpo.py", "scripts.grpo", "scripts/grpo_vlm.py", "/gspo.py")
_STARTERS = ("accelerate", "torchrun", "deepspeed", "python", "python3", "sbatch")


def read_yaml(path: Path, text: str, tree: YamlTree) -> Launch | None:
    """A recipe for GRPO, or None where it is none.

    Raises:
        UserError: it belongs to TRL, and is not for GRPO.
    """
    signs = sorted(SIGNS & set(tree.values))
    if signs and "rlhf_type" not in tree.values:  # of ms-swift
        special = sorted(OPEN_R1_ONLY & set(tree.values))
        return Launch(
            framework="open-r1" if special else "trl",
            form="yaml",
            reason=f"YAML with {special[0]}, a key of Open-R1" if special else f"YAML with {', '.join(signs)}",
            settings=tree.nested_once(),
            sharding=read_sharding(tree.values, path.parent),
            version=pinned_version(path, text),
            findings=tree.duplicates(),
        )
    if {"distributed_type", "compute_environment"} & set(tree.top):
        raise UserError(
            f"{path}: a configuration of accelerate, which trains nothing by itself; give it to the recipe's check: "
            f'--launch "accelerate launch --config_file {path}"'
        )
    if {"model_name_or_path", "per_device_train_batch_size"} & set(tree.top):
        raise UserError(f"{path}: a recipe without any key of GRPO (num_generations, reward_funcs, ...)")
    return None


def read_shell(path: Path, text: str, command: Command, server: Command | None) -> Launch | None:
    """What a command trains with TRL or Open-R1, with its recipe, or None where it does not."""
    texts = [word.name for word in command.words]
    launched = bool({*_STARTERS} & {*texts}) and texts[0] not in ("echo", "pip")
    options = {word.text[2:].partition("=")[0].replace("-", "_") for word in command.words if word.text[:2] == "--"}
    script = any(re.search(r"g[rs]po\w*\.py$", name) for name in texts) or "trl.scripts.grpo" in texts
    on_slurm = "train.slurm" in texts and "grpo" in texts
    scripts = [word for word in command.words if word.name.endswith(".py")]
    outside = next((word for word in scripts if word.missing and word.name == ".py"), None)
    serves = server is not None and server.has("trl", "vllm-serve") and bool(scripts)
    own = command.has("trl", "grpo") or on_slurm
    if not own and not (launched and (script or outside or serves or SIGNS & options)):
        return None
    launch = read_command(command, "trl", path.parent, server)
    if not own and not any(word.text.endswith(_OWN_SCRIPTS) for word in command.words):  # with options of its own
        launch = replace(launch, settings={key: replace(said, added=True) for key, said in launch.settings.items()})
    of_trl = own or any(word.text.endswith(_OWN_SCRIPTS) for word in command.words)
    if scripts and not (of_trl or launch.settings):
        launch = _with_script(launch, scripts[0], command, path.parent)
    launch = _open_r1_job(launch, command) if on_slurm else launch
    if outside:  # such as Open-R1's slurm/train.slurm
        told = f"the script's arguments name what it trains; check that recipe with --launch 'sbatch --nodes=2 {path}'"
        launch = replace(launch, unread=(Unread("(recipe)", outside.where, told),), processes=None)
    launch = with_recipe(launch, path.parent)
    launch = open_r1_nodes(launch, command) if on_slurm else launch
    if command.has("trl", "grpo"):
        launch = replace(launch, processes=launch.processes or starter_processes(launch.settings))
    special = OPEN_R1_ONLY & set(launch.settings) or on_slurm or (outside and "open_r1" in text)
    return replace(launch, framework="open-r1" if special else "trl", version=pinned_version(path, text))


def _with_script(launch: Launch, script: Word, command: Command, folder: Path) -> Launch:
    """The launch with what the script that it starts sets, if that is there and makes one configuration."""
    from cohort.check.readers import trl_python  # which reads commands with this module

    try:
        place, text = find_text(script.name, folder)
        (run,) = trl_python.read(place, text, command)
    except (UserError, ValueError):
        told = f"{script.name} sets what it trains; check that file"
        return replace(launch, unread=(*launch.unread, Unread("(recipe)", script.where, told)))
    unread = (*launch.unread, *run.unread)
    return replace(launch, settings=run.settings, unread=unread, todo=run.todo, not_checked=run.not_checked)


def with_recipe(launch: Launch, folder: Path) -> Launch:
    """The launch with the settings of the recipe that `--config` names. One that is not known may hold anything."""
    unread = [replace(entry, key="(recipe)") if entry.key == "config" else entry for entry in launch.unread]
    settings = dict(launch.settings)
    named = settings.pop("config", None)
    if named is not None:
        try:
            path, text = find_text(str(named.value), folder)
            tree = read_yaml_tree(text, path.name)
            settings = {**(tree.nested_once() if tree else {}), **settings}
        except (UserError, ValueError) as error:
            unread.append(Unread("(recipe)", named.where, str(error)))
    sharding = launch.sharding or read_sharding(settings, folder)
    return replace(launch, settings=settings, unread=tuple(unread), sharding=sharding)


def starter_processes(settings: Mapping[str, Said]) -> Said | None:
    """The processes that `trl grpo` starts where a recipe says so."""
    said = settings.get("num_processes")
    return replace(said, value=int(said.value)) if said and str(said.value).isdecimal() else None


def _open_r1_job(launch: Launch, command: Command) -> Launch:
    """What Open-R1's slurm/train.slurm hands on: it names recipes in short, and has further options in `--args`."""
    at = next((i for i, word in enumerate(command.words) if word.text == "--args"), len(command.words))
    quoted = next(iter(command.words[at + 1 :]), Word(""))  # one word, which looks like an option itself
    options = parse_options(command.words[:at] + command.words[at + 2 :])
    inner = parse_shell(f"grpo {quoted.text}", command.where)
    further = parse_options([replace(word, where=quoted.where) for word in inner[0].words] if inner else [])
    unread = [Unread("(options)", quoted.where, "; ".join(quoted.missing))] if quoted.missing else []
    settings = dict(further.settings)
    names = {name: options.text(name) for name in ("model", "task", "config")}
    if all(names.values()):
        recipe = "recipes/{model}/{task}/config_{config}.yaml".format(**names)
        settings["config"] = Said(recipe, command.where)
    else:
        missing = [entry.reason for entry in options.unread if entry.key in names]
        lacking = [f"--{name}" for name, value in names.items() if not value]
        reason = "; ".join(missing) or f"{', '.join(lacking)} of train.slurm: not given"
        unread.append(Unread("(recipe)", command.where, reason))
    return replace(launch, settings=settings, unread=(*unread, *further.unread))


def open_r1_nodes(launch: Launch, command: Command) -> Launch:
    """The GPUs that slurm/train.slurm trains on: 8 of every node, but for the last one, which samples with vLLM."""
    options = parse_options(command.words)
    nodes = options.whole("nodes", options.whole("N", 1)) or 1
    vllm = launch.settings.get("use_vllm")
    server, findings = dict(launch.server), list(launch.findings)
    if vllm is not None and str(vllm.value).lower() in ("true", "1", "yes"):
        nodes -= 1
        sizes = {"tensor_parallel_size": "tp", "data_parallel_size": "dp"}
        server = {name: options.settings.get(short, Said(1, command.where)) for name, short in sizes.items()}
    if nodes == 0:
        message = (
            "sbatch --nodes=1 with use_vllm: the only node runs the sampling server, so 0 nodes and 0 processes are "
            "left to train"
        )
        nearest = ("--nodes=2", "vllm_mode=colocate without the server")
        findings.append(Finding("CHK002", "--nodes", message, nearest))
    return replace(
        launch,
        processes=Said(nodes * _OPEN_R1_GPUS, command.where),
        processes_per_node=_OPEN_R1_GPUS,
        server=server,
        server_gpus=tuple(map(str, range(_OPEN_R1_GPUS))) if server else None,
        findings=tuple(findings),
    )


def pinned_version(path: Path, text: str) -> Said | None:
    """`trl==0.18.0`, anywhere in the text."""
    match = re.search(r"\btrl(?:\[[^\]\n]*\])?\s*==\s*(\d+(?:\.\d+)+)", text)
    return Said(match[1], f"{path.name}:{text.count(chr(10), 0, match.start()) + 1}") if match else None
