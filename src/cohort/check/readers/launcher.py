"""Options of command lines, their recipes, and the processes that accelerate, torchrun, deepspeed or Slurm start."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from cohort.check.launch import Framework, Launch, Setting, Sharding, Unread
from cohort.check.readers.shell import Command, Word
from cohort.check.readers.yaml_tree import find_yaml

# files of accelerate that TRL and Open-R1 have, for 8 processes; TRL's own command takes the short names
_ACCELERATE_FILE = re.compile(
    r"(?:.*\baccelerate_configs/)?(?:deepspeed_)?(zero[123]|fsdp[12]?|multi_gpu|ddp)(\.yaml)?"
)
_DECIDING = {"num_processes", "num_machines", "nproc_per_node", "nnodes", "num_gpus", "num_nodes", "config_file"}
_SERVERS = (("trl", "vllm-serve"), ("vllm", "serve"), ("swift", "rollout"))
_SBATCH = re.compile(r"#SBATCH[ \t]+(.+)")
_SBATCH_OPTION = re.compile(r"(--[a-z-]+|-[NG])(?:=|[ \t]+)?([^\s#]+)?")


@dataclass(frozen=True, slots=True)
class Options:
    """Parsed `--key value`, `--key=value` and flags (true). A key with several values has a list."""

    settings: dict[str, Setting] = field(default_factory=dict)
    unread: tuple[Unread, ...] = ()

    def whole(self, key: str, default: int | None = None) -> int | None:
        """A whole number; None if it could not be read."""
        if any(entry.key == key for entry in self.unread):
            return None
        value = self.text(key)
        return default if not value else int(value) if value.isdecimal() and len(value) < 7 else None

    def text(self, key: str) -> str:
        """The first value of a key as text; empty if there is none."""
        value = self.settings[key].value if key in self.settings else ""
        return str(value[0] if isinstance(value, list) else value)


def parse_options(words: Sequence[Word]) -> Options:
    """Parse the options of a command line."""
    parts: list[tuple[str, list[Word]]] = []  # the word of the option itself is the first
    unread: list[Unread] = []
    equals = ""
    for word in words:
        if word.text.startswith("--") and len(word.text) > 2:
            key, equals, value = word.text[2:].partition("=")
            option = replace(word, text=value)
            parts.append((key.replace("-", "_"), [option, option] if equals else [option]))
        elif word.missing and (word.text == "$@" or (not word.text and (not parts or len(parts[-1][1]) > 1))):
            unread.append(unknown_word(word))
        elif parts and not equals:
            parts[-1][1].append(word)
    settings: dict[str, Setting] = {}
    for key, found in parts:
        missing = dict.fromkeys(reason for word in found for reason in word.missing)
        texts = [word.text for word in found[1:]]
        if missing:
            settings.pop(key, None)  # the last one counts
            unread.append(Unread(key, found[0].where, "; ".join(missing)))
        else:
            settings[key] = Setting(True if not texts else texts[0] if len(texts) == 1 else texts, found[0].where)
    return Options(settings, tuple(entry for entry in unread if entry.key not in settings))


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
    file, problem = _accelerate_file(configured, command.where, folder)
    said = Options({**file, **own.settings}, own.unread)
    nodes: int | None = 1
    per_node: int | None = None
    processes: int | None = None
    if names & {"accelerate", "trl"}:
        visible = len(gpus) if gpus and "multi_gpu" in said.settings else None
        processes, nodes = said.whole("num_processes", visible), said.whole("num_machines", 1)
    elif names & {"torchrun", "torch.distributed.run", "torch.distributed.launch"}:
        per_node, nodes = said.whole("nproc_per_node", 1), said.whole("nnodes", 1)
    elif "deepspeed" in names:
        per_node, nodes = said.whole("num_gpus", len(gpus) if gpus else None), said.whole("num_nodes", 1)
    elif not names & {"srun", "sbatch", "mpirun", "ray"}:
        said = _environment(command)
        per_node, nodes = said.whole("NPROC_PER_NODE", 1), said.whole("NNODES", 1)
    if per_node is not None and nodes is not None:
        processes = per_node * nodes
    return Launch(
        framework=framework,
        form="shell",
        reason=f"the command at {command.where}",
        settings=options.settings,
        unread=(
            *options.unread,
            *(entry for entry in said.unread if entry.key in _DECIDING or entry.key.isupper()),
            *([Unread("config_file", command.where, problem)] if problem else []),
        ),
        processes=None if processes is None else Setting(processes, command.where),
        processes_per_node=None if processes is None or not nodes else processes // nodes,
        training_gpus=gpus,
        sharding=read_sharding({**options.settings, **said.settings}, folder),
        server_gpus=gpus_of(server) if server else None,
        server=parse_options(server.words).settings if server else {},
    )


def with_recipe(launch: Launch, folder: Path) -> Launch:
    """Add the settings of the recipe that `--config` names. One that cannot be read may hold any setting."""
    unread = [replace(entry, key="(recipe)") if entry.key == "config" else entry for entry in launch.unread]
    settings = dict(launch.settings)
    named = settings.pop("config", None)
    if named is not None:
        try:
            settings = {**find_yaml(str(named.value), folder).nested_once(), **settings}
        except ValueError as error:
            unread.append(Unread("(recipe)", named.where, str(error)))
    sharding = launch.sharding or read_sharding(settings, folder)
    return replace(launch, settings=settings, unread=tuple(unread), sharding=sharding)


def pinned_version(path: Path, text: str) -> Setting | None:
    """The version of the first `trl==0.18.0` in the text."""
    match = re.search(r"\btrl(?:\[[^\]\n]*\])?\s*==\s*(\d+(?:\.\d+)+)", text)
    return Setting(match[1], f"{path.name}:{text.count(chr(10), 0, match.start()) + 1}") if match else None


def find_server(commands: Sequence[Command]) -> Command | None:
    """The first command that starts a sampling server."""
    return next((command for command in commands for name in _SERVERS if command.has(*name)), None)


def _script_at(words: Sequence[Word]) -> int:
    """Index of the training script or subcommand, after the launcher's own options."""
    for at, (word, after) in enumerate(pairwise((*words, Word("")))):
        is_module = word.text in ("-m", "--module") and not after.text.startswith("torch.distributed")
        if is_module or word.name in ("trl", "swift", "megatron") or word.name.endswith(".py"):
            return at
    return len(words)


def gpus_of(command: Command) -> tuple[str, ...] | None:
    """GPUs of CUDA_VISIBLE_DEVICES; None if it is not set or cannot be read."""
    word = command.env.get("CUDA_VISIBLE_DEVICES", command.env.get("ASCEND_RT_VISIBLE_DEVICES"))
    if word is None or word.missing:
        return None
    return tuple(part.strip() for part in word.text.split(",") if part.strip())


def _environment(command: Command) -> Options:
    counts = {key: word for key, word in command.env.items() if key in ("NPROC_PER_NODE", "NNODES")}
    return parse_options([replace(word, text=f"--{key}={word.text}") for key, word in counts.items()])


def _accelerate_file(name: str, where: str, folder: Path) -> tuple[Mapping[str, Setting], str | None]:
    """Settings of an accelerate configuration, or why they could not be read."""
    if not name:
        return {}, None
    try:
        return find_yaml(name, folder).values, None
    except ValueError as error:
        known = _ACCELERATE_FILE.fullmatch(name)
        if known is None:
            return {}, str(error)
    kind = known[1]
    about = {"zero_stage": kind[-1]} if kind.startswith("zero") else {"distributed_type": "MULTI_GPU"}
    about |= {"distributed_type": "FSDP"} if kind.startswith("fsdp") else {}
    return {key: Setting(value, where) for key, value in {**about, "num_processes": 8}.items()}, None


def read_sharding(settings: Mapping[str, Setting], folder: Path) -> Sharding | None:
    """Sharding of the training state, from accelerate's keys or the trainer's `deepspeed` and `fsdp`."""
    values = {key.rpartition(".")[2]: str(said.value).lower() for key, said in settings.items()}
    name = values.get("deepspeed", "")
    if named := re.fullmatch(r"zero([0-3])(_offload)?", name):  # ms-swift's own files
        values |= {"zero_stage": named[1], "offload_optimizer_device": "cpu" if named[2] else "none"}
        values |= {"offload_param_device": "cpu" if named[2] and named[1] == "3" else "none"}
    elif name.endswith(".json"):
        with contextlib.suppress(KeyError, ValueError):
            for key, said in find_yaml(str(settings["deepspeed"].value), folder).values.items():
                own = key.removeprefix("zero_optimization.").replace(".device", "_device")
                values["zero_stage" if own == "stage" else own] = str(said.value).lower()
    kind = values.get("distributed_type", "")
    if "fsdp" in kind or "use_fsdp" in values or values.get("fsdp", "") not in ("", "false", "none", "[]"):
        offloads = values.get("fsdp_offload_params") == "true"
        return Sharding(3, "fsdp", offloads_optimizer=offloads, offloads_weights=offloads)
    stage = values.get("zero_stage", "")
    if stage in ("0", "1", "2", "3"):
        moved = {part for part in ("optimizer", "param") if values.get(f"offload_{part}_device") in ("cpu", "nvme")}
        return Sharding(
            int(stage), "deepspeed", offloads_optimizer="optimizer" in moved, offloads_weights="param" in moved
        )
    return Sharding(0, "ddp") if kind in ("multi_gpu", "no") or "multi_gpu" in values else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Nodes and GPUs requested in `#SBATCH` lines, which sbatch reads up to the first command."""

    nodes: int | None = None
    gpus_per_node: Setting | None = None

    def variables(self) -> tuple[tuple[str, str], ...]:
        """Environment variables that Slurm sets for the job."""
        gpus = self.gpus_per_node.value if self.gpus_per_node else None
        known = {"SLURM_NNODES": self.nodes, "SLURM_JOB_NUM_NODES": self.nodes}
        known |= {"SLURM_GPUS_ON_NODE": gpus, "SLURM_GPUS_PER_NODE": gpus}
        return tuple((name, str(value)) for name, value in known.items() if value is not None)


def read_job(text: str, name: str) -> Job:
    """Read the `#SBATCH` lines of a script."""
    said: dict[str, tuple[str, int]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.startswith("#"):
            break
        match = _SBATCH.match(line)
        for option, value in _SBATCH_OPTION.findall(match[1]) if match else ():
            said[{"-N": "--nodes", "-G": "--gpus"}.get(option, option)] = (value, number)
    nodes = _whole(said.get("--nodes", ("", 0))[0].partition("-")[0])
    found: Setting | None = None
    for option, share in (("--gpus", nodes or 1), ("--gres", 1), ("--gpus-per-node", 1)):
        value, number = said.get(option, ("", 0))
        wanted = next((part for part in value.split(",") if option != "--gres" or part.startswith("gpu:")), "")
        count = _whole(wanted.rpartition(":")[2])  # gpu:h100:8, h100:8 or 8
        if count is not None and count % share == 0:
            found = Setting(count // share, f"{name}:{number}")
    return Job(nodes=nodes, gpus_per_node=found)


def on_job(launch: Launch, job: Job) -> Launch:
    """Add the GPUs that the job requests, and its processes if the command does not set them."""
    if job.gpus_per_node is None:
        return launch
    processes = launch.processes
    lacks_recipe = any(unread.key == "(recipe)" for unread in launch.unread)  # which comes with the number of nodes
    if not lacks_recipe and processes is None and launch.framework in ("trl", "open-r1"):
        processes = Setting((job.nodes or 1) * job.gpus_per_node.value, job.gpus_per_node.where)
    return replace(launch, processes=processes, node_gpus=job.gpus_per_node)


def _whole(text: str) -> int | None:
    return int(text) if text.isdecimal() and 0 < int(text) < 100_000 else None
