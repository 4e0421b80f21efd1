"""Generate a Slurm batch script: one torchrun per training node, and servers on rollout nodes."""

import json
import math
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import jinja2

from cohort.config import Config, ServersConfig
from cohort.config.rollout import AutoRolloutConfig
from cohort.errors import UserError
from cohort.plan.rollout_engine import plan_engine, set_engine
from cohort.plan.split import check_server_size, count_processes, split_gpus, split_nodes_alike
from cohort.ranks.stopping import LAUNCHER_GRACE_S, SIGNALS
from cohort.run.files import SECRET_FILE

_TEMPLATE = Path(__file__).parent / "slurm.sh.j2"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutNodes:
    """The last nodes of an allocation, which run rollout servers."""

    num_nodes: int
    servers_per_node: int
    gpus_per_server: int
    first_gpu: int = 0  # number of GPUs of these nodes that train; 0: they only run servers

    @property
    def num_servers(self) -> int:
        """Servers on all rollout nodes."""
        return self.num_nodes * self.servers_per_node


def plan_rollout_nodes(config: Config, *, nodes: int, rollout_nodes: int, gpus_per_node: int) -> RolloutNodes | None:
    """Plan the servers of `--rollout-nodes`, or without such nodes those beside the ranks; None if there are none.

    Args:
        config: configuration of the run.
        nodes: number of training nodes.
        rollout_nodes: number of rollout nodes.
        gpus_per_node: GPUs of every node.

    Raises:
        UserError: it contradicts the configuration, or leaves the run without servers.
    """
    rollout = config.rollout
    if not rollout.uses_servers:
        if rollout_nodes > 0:
            raise UserError(
                f"--rollout-nodes: {rollout_nodes} with rollout.engine: {rollout.engine}, which samples on the "
                f"training nodes; use 0, or rollout.engine={AutoRolloutConfig.prefers}"
            )
        return None
    if rollout_nodes == 0 and (rollout.urls or not gpus_per_node):
        return None
    if not rollout.has_serve_command:
        raise UserError(
            f"--rollout-nodes: {rollout_nodes} with rollout.engine: {rollout.engine} is not supported, since `cohort "
            f"serve` cannot start a {rollout.server_name}; use rollout.urls, or rollout.engine="
            f"{AutoRolloutConfig.prefers}"
        )
    if rollout_nodes == 0:
        return _beside_ranks(config, rollout, nodes, gpus_per_node)
    for field, value, default in (
        ("rollout.urls", list(rollout.urls), []),
        ("rollout.secret_file", rollout.secret_file, None),
        ("hardware.rollout_gpus", config.hardware.rollout_gpus, "auto"),
    ):
        if value != default:
            raise UserError(
                f"{field}: {value} conflicts with --rollout-nodes: {rollout_nodes}, whose servers the run uses; remove "
                f"one"
            )
    return _servers_of(rollout, rollout_nodes, gpus_per_node)


def _beside_ranks(config: Config, rollout: ServersConfig, nodes: int, gpus_per_node: int) -> RolloutNodes:
    """Plan servers on the GPUs of every training node that have no rank.

    Raises:
        UserError: there are none, or servers and ranks would share them.
    """
    hardware = config.hardware
    if hardware.rollout_gpus == "auto" and hardware.processes in ("auto", gpus_per_node):
        raise UserError(
            f"--rollout-nodes: 0 leaves no GPUs for the servers of rollout.engine: {config.rollout.engine}, since the "
            f"ranks use all GPUs of the training nodes; use --rollout-nodes 1, hardware.rollout_gpus=1 (of every "
            f"node), rollout.urls, or --nodes 1, which splits the node's GPUs"
        )
    split = split_nodes_alike(config, nodes=nodes, gpus_per_node=gpus_per_node, shape=None, hardware=None)
    return RolloutNodes(
        num_nodes=nodes,
        servers_per_node=len(split.server_gpus),
        gpus_per_server=rollout.tensor_parallel,
        first_gpu=split.num_processes,
    )


def _servers_of(rollout: ServersConfig, num_nodes: int, gpus_per_node: int) -> RolloutNodes:
    size = rollout.tensor_parallel
    if gpus_per_node:
        check_server_size(size, gpus_per_node)
    if not gpus_per_node and size != 1:
        raise UserError(f"rollout.tensor_parallel: {size} requires GPUs, but there are none; use 1")
    nodes = RolloutNodes(
        num_nodes=num_nodes,
        servers_per_node=gpus_per_node // size if gpus_per_node else 1,
        gpus_per_server=size if gpus_per_node else 0,
    )
    if rollout.servers not in ("auto", nodes.num_servers):
        raise UserError(
            f"rollout.servers: {rollout.servers} does not match the {nodes.num_servers} servers of --rollout-nodes: "
            f"{num_nodes}; use auto"
        )
    return nodes


def _reset_servers(config: Config) -> list[str]:
    """Return overrides that reset the keys of the run's own servers, which have no effect with `rollout.urls`."""
    rollout = config.rollout
    assert rollout.uses_servers
    fields = type(rollout).model_fields
    defaults = {key: fields[key].get_default(call_default_factory=True) for key in rollout.managed_server_keys}
    changed = {key: default for key, default in defaults.items() if getattr(rollout, key) != default}
    overrides = [f"rollout.{key}={'null' if default is None else default}" for key, default in changed.items()]
    return [*overrides, *(["hardware.rollout_gpus=auto"] if config.hardware.rollout_gpus != "auto" else [])]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """Options of `cohort launch slurm`, by name."""

    nodes: int
    gpus_per_node: int | None = None  # None: 8, or 0 with hardware.device: cpu
    time: str = "24:00:00"
    partition: str | None = None
    account: str | None = None
    job_name: str = "cohort"
    max_restarts: int = 3  # of all ranks, after one failed
    min_nodes: int | None = None  # None: all nodes; fewer: a restart continues without lost nodes
    rollout_nodes: int = 0  # nodes for servers, in addition to `nodes`
    port: int = 29500
    setup: Path | None = None  # bash to run first
    container: str | None = None  # image in which everything runs
    mounts: Sequence[str] = ()  # of the container, besides the folders of the run
    sbatch: Sequence[str] = ()  # more options of sbatch, which come last and win

    @property
    def least_nodes(self) -> int:
        """Training nodes with which the run goes on."""
        return self.nodes if self.min_nodes is None else self.min_nodes


def slurm_script(config: Config, *, config_path: Path, overrides: Sequence[str], options: SlurmOptions) -> str:
    """Return the text of an sbatch script that trains as configured.

    It uses this Python's environment and the current working directory.

    Args:
        config: the configuration in `config_path` with `overrides`.
        config_path: YAML file, read by every rank.
        overrides: `key.sub=value` arguments, passed to every rank.
        options: resources to request.

    Raises:
        UserError: an option is invalid, by itself or with the configuration.
    """
    _check_words(options)
    gpus, arguments = _gpus_per_node(config, options), list(overrides)
    if config.rollout.engine == "auto" and (options.nodes > 1 or options.rollout_nodes > 0):
        # fixed here, so that it does not depend on the nodes of a start
        has_servers = options.rollout_nodes > 0 or config.hardware.rollout_gpus != "auto"
        engine = AutoRolloutConfig.prefers if has_servers else "local"
        config = set_engine(config, engine)
        arguments.append(f"rollout.engine={engine}")
    rollout, server_words, training_words = None, arguments, arguments
    if is_split := _splits_its_gpus(config, options, gpus):
        _check_split(config, gpus)
        ranks_per_node = gpus
    else:
        ranks_per_node = count_processes(config, gpus)
        rollout = plan_rollout_nodes(
            config, nodes=options.nodes, rollout_nodes=options.rollout_nodes, gpus_per_node=gpus
        )
    _check_restarts(config, options, beside_servers=rollout is not None and rollout.first_gpu > 0)
    if rollout is not None:
        ranks_per_node = rollout.first_gpu or ranks_per_node
        secret = f"rollout.secret_file={json.dumps(str(Path(config.run.dir).absolute() / SECRET_FILE))}"
        server_words = [*arguments, secret]
        training_words = [*arguments, *_reset_servers(config), secret]
    folders = [Path.cwd(), config_path.absolute().parent, Path(config.run.dir).absolute()]
    return _template().render(
        config=config,
        options=options,
        gpus=gpus,
        ranks_per_node=ranks_per_node,
        is_split=is_split,
        is_elastic=options.least_nodes < options.nodes,
        rollout=rollout,
        server_words=server_words,
        training_words=training_words,
        config_path=config_path.absolute(),
        bin=Path(sys.executable).parent,
        cwd=Path.cwd(),
        setup=None if options.setup is None else _read_setup(options.setup),
        mounts=[m if ":" in m else f"{m}:{m}" for m in (*dict.fromkeys(map(str, folders)), *options.mounts)],
        secret_file=SECRET_FILE,
        launcher_grace_s=LAUNCHER_GRACE_S,
        signals=[number.name for number in SIGNALS],
    )


def _check_words(options: SlurmOptions) -> None:
    """Check the options that go into comments and lists of the script, where quoting does not help.

    Raises:
        UserError: one contains a character that would end its line or its entry, or is an override.
    """
    named = {name: getattr(options, name) for name in ("time", "partition", "account", "job_name", "setup")}
    in_comments = [(f"--{name.replace('_', '-')}", str(value)) for name, value in named.items()]
    for option, value in (*in_comments, *(("options of sbatch", word) for word in options.sbatch)):
        if "\n" in value or "\r" in value:
            raise UserError(
                f"{option}: {value!r} contains a newline, which would end its line of the script; remove it"
            )
    for before, word in pairwise(options.sbatch):
        if re.match(r"--[^=]+=", before) and re.match(r"[A-Za-z_]\w*(\.\w+)+=", word):
            raise UserError(f"options of sbatch: {word!r} is an override of the configuration; put it before --")
    for mount in options.mounts:
        if not all(path.startswith("/") for path in mount.split(":")[:2]) or re.search(r"[,\n\r]", mount):
            raise UserError(
                f"--mount: {mount!r} is invalid; use /HERE or /HERE:/THERE, absolute and without commas or newlines"
            )


def _read_setup(file: Path) -> str:
    """Return the text of `--setup`.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--setup: {str(file)!r} cannot be read: {getattr(error, 'strerror', error)}") from error


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {
        "quote": lambda value: shlex.quote(str(value)),
        "words": lambda values: "".join(f" {shlex.quote(value)}" for value in values),
        "ceil": math.ceil,
    }
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))


def _splits_its_gpus(config: Config, options: SlurmOptions, gpus: int) -> bool:
    """Whether the run is on one node, whose GPUs `cohort train` may split between training and servers."""
    rollout = config.rollout
    may_have_servers = rollout.engine == "auto" or (rollout.uses_servers and not rollout.urls)
    return may_have_servers and gpus > 0 and options.nodes == 1 and options.rollout_nodes == 0


def _check_split(config: Config, gpus: int) -> None:
    """Check that the node's GPUs suffice for the configured split.

    Raises:
        UserError: they do not.
    """
    planned, _ = plan_engine(config)
    if planned.rollout.uses_servers:
        split_gpus(planned, num_gpus=gpus, shape=None, hardware=None)
    else:
        count_processes(planned, gpus)


def _gpus_per_node(config: Config, options: SlurmOptions) -> int:
    """Return the GPUs per node.

    Raises:
        UserError: it contradicts `hardware.device`.
    """
    device, gpus = config.hardware.device, options.gpus_per_node
    if gpus is None:
        gpus = 0 if device == "cpu" else 8
    if gpus > 0 and device == "cpu":
        raise UserError(
            f"--gpus-per-node: {gpus} has no effect with hardware.device: cpu; use 0, or hardware.device=cuda"
        )
    if gpus == 0 and device.startswith("cuda"):
        raise UserError(
            f"--gpus-per-node: 0 with hardware.device: {device}, which needs GPUs; use at least 1, or "
            f"hardware.device=cpu"
        )
    if ":" in device:
        raise UserError(
            f"hardware.device: {device!r} names one GPU, but each rank needs its own; use hardware.device=cuda"
        )
    return gpus


def _check_restarts(config: Config, options: SlurmOptions, *, beside_servers: bool) -> None:
    """Reject restarts without checkpoints, and a minimum of nodes that never holds."""
    if beside_servers and options.least_nodes < options.nodes:
        raise UserError(
            f"--min-nodes: {options.min_nodes} with servers on the training nodes, which end with their node; use "
            f"--min-nodes {options.nodes}, or --rollout-nodes 1"
        )
    if options.least_nodes > options.nodes:
        raise UserError(f"--min-nodes: {options.min_nodes} exceeds --nodes: {options.nodes}; use {options.nodes}")
    if options.max_restarts > 0 and config.run.checkpoint_every == 0:
        raise UserError(
            f"run.checkpoint_every: 0 leaves no checkpoint to restart from with --max-restarts: "
            f"{options.max_restarts}; use run.checkpoint_every=50, or --max-restarts 0"
        )
    if options.max_restarts == 0 and options.least_nodes < options.nodes:
        raise UserError(
            f"--min-nodes: {options.min_nodes} has no effect with --max-restarts: 0, since continuing with fewer "
            f"nodes takes a restart; use --max-restarts 3, or --min-nodes {options.nodes}"
        )
