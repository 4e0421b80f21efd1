"""How many processes a launcher starts: accelerate, torchrun, ms-swift's environment, Open-R1's Slurm script."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cohort.check.findings import Finding
from cohort.check.launch import Said, Sharding, Unread
from cohort.check.readers.files import read_text
from cohort.check.readers.options import Options, env_count, gpus_of, parse_options
from cohort.check.readers.shell import Command
from cohort.check.readers.shell_words import Word
from cohort.check.readers.yaml_tree import read_yaml_tree
from cohort.errors import UserError

OPEN_R1_GPUS_PER_NODE = 8  # written into its slurm/train.slurm
_COUNTS = frozenset(("num_processes", "nproc_per_node", "nnodes", "nodes"))
# options of launchers that decide something here
_READ = frozenset(("num_processes", "num_machines", "nproc_per_node", "nnodes", "config_file", "nodes", "accelerator"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """What a command says about where the run runs."""

    processes: Said | None
    per_node: int | None = None  # processes of one machine
    gpus: tuple[str, ...] | None = None
    sharding: Sharding | None = None
    script: tuple[Word, ...] = ()  # the words from the script on, or all where no launcher is known
    unread: tuple[Unread, ...] = ()  # options that decide and could not be resolved
    findings: tuple[Finding, ...] = ()


def _launcher(
    count: int | None,
    nodes: int,
    where: str,
    *,
    gpus: tuple[str, ...] | None,
    script: tuple[Word, ...],
    sharding: Sharding | None = None,
    unread: tuple[Unread, ...] = (),
    findings: tuple[Finding, ...] = (),
) -> Launcher:
    """A launcher of `count` processes on all nodes together. Where an option that counts is not read, nobody knows."""
    if {entry.key for entry in unread} & _COUNTS:
        count = None
    return Launcher(
        processes=None if count is None else Said(count, where),
        per_node=None if count is None else count // max(nodes, 1),
        gpus=gpus,
        script=script,
        sharding=sharding,
        unread=tuple(entry for entry in unread if entry.key in _READ),
        findings=findings,
    )


def read_launcher(command: Command, where: str, folder: Path, *, uses_vllm: bool = False) -> Launcher:
    """Reads the part of a command before the training script.

    `folder` is where a configuration file of accelerate is looked up; `uses_vllm` matters for Open-R1's Slurm script,
    which keeps the last node for the sampling server.
    """
    names = [word.text.rsplit("/", 1)[-1] for word in command.words]
    gpus = gpus_of(command.env)
    if "sbatch" in names:
        options = parse_options(command.words[names.index("sbatch") + 1 :], where)
        count, findings = _slurm(options, uses_vllm)
        nodes = (count or 0) // OPEN_R1_GPUS_PER_NODE
        sharding = _sharding(_named_file(folder, options.settings.get("accelerator")))
        about: dict[str, Any] = {"gpus": gpus, "sharding": sharding, "unread": options.unread}
        return _launcher(count, nodes, where, script=command.words, findings=findings, **about)
    if "trl" in names and "accelerate" not in names:  # its command line starts accelerate itself
        options = parse_options(command.words, where)
        in_file = _named_file(folder, options.settings.get("accelerate_config"))
        count = _whole(options.settings, "num_processes", _whole(in_file, "num_processes", None))
        nodes = _whole(options.settings, "num_machines", 1) or 1
        sharding = _sharding({**in_file, **options.settings})
        return _launcher(count, nodes, where, gpus=gpus, script=command.words, sharding=sharding, unread=options.unread)
    if "accelerate" in names and "launch" in names:
        own, script = _before_script(command.words[names.index("launch") + 1 :])
        options = parse_options(own, where)
        count, sharding, findings = _accelerate(options, gpus, folder)
        nodes = _whole(options.settings, "num_machines", 1) or 1
        about = {"gpus": gpus, "sharding": sharding, "unread": options.unread}
        return _launcher(count, nodes, where, script=script, findings=findings, **about)
    if "torchrun" in names:
        own, script = _before_script(command.words[names.index("torchrun") + 1 :])
        options = parse_options(own, where)
        per_node = _whole(options.settings, "nproc_per_node", len(gpus or ()) or None)
        per_node = per_node if "nproc_per_node" in options.settings else 1
        nodes = _whole(options.settings, "nnodes", 1) or 1
        return _launcher(per_node and per_node * nodes, nodes, where, gpus=gpus, script=script, unread=options.unread)
    per_node = env_count(command.env, "NPROC_PER_NODE")
    nodes = env_count(command.env, "NNODES") or 1
    return _launcher(per_node and per_node * nodes, nodes, where, gpus=gpus, script=command.words)


def _before_script(words: Sequence[Word]) -> tuple[tuple[Word, ...], tuple[Word, ...]]:
    """A launcher's own options, and the script with its own."""
    for i, word in enumerate(words):
        name = word.text.rsplit("/", 1)[-1]
        if name.endswith(".py") or word.text in ("-m", "--module") or name in ("trl", "swift"):
            return tuple(words[:i]), tuple(words[i:])
    return tuple(words), ()


def _whole(options: Mapping[str, Said], key: str, default: int | None) -> int | None:
    value = options[key].value if key in options else None
    value = value[0] if isinstance(value, list) else value
    return int(str(value)) if str(value).isdecimal() else default


def _accelerate(
    options: Options, gpus: tuple[str, ...] | None, folder: Path
) -> tuple[int | None, Sharding | None, tuple[Finding, ...]]:
    """The number of processes and how they share the state: of the command line, else of the configuration file.

    Where neither says, there are as many processes as visible GPUs.
    """
    in_file: Mapping[str, Said] = {}
    findings: list[Finding] = []
    name = options.settings.get("config_file")
    if name is not None:
        try:
            in_file = _accelerate_file(folder, str(name.value))
        except UserError as error:
            findings.append(Finding("CHK004", "--config_file", f"the accelerate file was not read: {error}"))
    default = _whole(in_file, "num_processes", None)
    default = default if default is not None else len(gpus) if gpus and "multi_gpu" in options.settings else None
    said = {**in_file, **options.settings}
    return _whole(options.settings, "num_processes", default), _sharding(said), tuple(findings)


def _sharding(said: Mapping[str, Said]) -> Sharding | None:
    """How processes share the state, by accelerate's keys; None where they do not say."""

    def on_host(*names: str) -> bool:
        values = [str(entry.value).lower() for key, entry in said.items() if key.rpartition(".")[2] in names]
        return bool({"cpu", "nvme", "true"} & set(values))

    kind = str(said["distributed_type"].value).upper() if "distributed_type" in said else ""
    if "FSDP" in kind or "use_fsdp" in said:
        offloads = on_host("fsdp_offload_params")
        return Sharding(3, "fsdp", offloads_optimizer=offloads, offloads_weights=offloads)
    stage = _whole(said, "zero_stage", _whole(said, "deepspeed_config.zero_stage", None))
    if stage is None:
        return Sharding(0, "ddp") if "MULTI_GPU" in kind or kind == "NO" or "multi_gpu" in said else None
    return Sharding(
        stage,
        "deepspeed",
        offloads_optimizer=on_host("offload_optimizer_device"),
        offloads_weights=on_host("offload_param_device"),
    )


def sharding_of(settings: Mapping[str, Said], folder: Path) -> Sharding | None:
    """Of `deepspeed` and `fsdp` among a trainer's own settings: names of ms-swift's files, or files on this machine."""
    fsdp = settings.get("fsdp")
    if fsdp is not None and str(fsdp.value).lower() not in ("", "false", "none", "[]"):
        return Sharding(3, "fsdp")
    name = str(settings["deepspeed"].value) if "deepspeed" in settings else ""
    named = re.fullmatch(r"zero([0-3])(_offload)?", name)
    if named:
        stage, offloads = int(named[1]), named[2] is not None
        return Sharding(stage, "deepspeed", offloads_optimizer=offloads, offloads_weights=offloads and stage == 3)
    try:
        tree = read_yaml_tree(read_text(folder / name)) if name.endswith(".json") else None
    except ValueError:
        return None
    said = (
        {key.removeprefix("zero_optimization."): str(entry.value) for key, entry in tree.values.items()} if tree else {}
    )
    in_file = said.get("stage", "")
    if not in_file.isdecimal():
        return None
    optimizer, weights = (said.get(f"offload_{part}.device", "none") != "none" for part in ("optimizer", "param"))
    return Sharding(int(in_file), "deepspeed", offloads_optimizer=optimizer, offloads_weights=weights)


def _named_file(folder: Path, name: Said | None) -> Mapping[str, Said]:
    """A configuration of accelerate by the short name that TRL and Open-R1 have for it, or by its path."""
    text = str(name.value) if name else ""
    match = re.fullmatch(r"zero([1-3])", text)
    if match:
        return {"zero_stage": Said(match[1], name.where)} if name else {}
    kinds = {"fsdp": "FSDP", "fsdp1": "FSDP", "fsdp2": "FSDP", "ddp": "MULTI_GPU", "multi_gpu": "MULTI_GPU"}
    if name and text in kinds:
        return {"distributed_type": Said(kinds[text], name.where)}
    try:
        return _accelerate_file(folder, text) if text.endswith((".yaml", ".yml")) else {}
    except UserError:
        return {}


def _accelerate_file(folder: Path, name: str) -> Mapping[str, Said]:
    """The settings of an accelerate configuration.

    Raises:
        UserError: the file cannot be read.
    """
    tries = [folder / name, Path(name)]
    path = next((candidate for candidate in tries if candidate.is_file()), tries[0])
    try:
        tree = read_yaml_tree(read_text(path))
    except ValueError as error:
        raise UserError(str(error)) from error
    return tree.values if tree else {}


def _slurm(options: Options, uses_vllm: bool) -> tuple[int | None, tuple[Finding, ...]]:
    """Open-R1's script: 8 GPUs on every node, and the last node samples where vLLM is used."""
    nodes = _whole(options.settings, "nodes", _whole(options.settings, "N", 1)) or 1
    training = nodes - 1 if uses_vllm else nodes
    if training == 0:
        message = (
            "sbatch --nodes=1 with use_vllm: the only node runs the sampling server, so 0 nodes and 0 processes are "
            "left to train"
        )
        return 0, (Finding("CHK002", "--nodes", message, ("--nodes=2", "vllm_mode=colocate without the server")),)
    return training * OPEN_R1_GPUS_PER_NODE, ()
