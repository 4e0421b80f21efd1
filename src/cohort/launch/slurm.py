"""Generate a Slurm batch script: one torchrun per training node, and servers on rollout nodes."""

import json
import math
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cohort.config import Config, ServersConfig
from cohort.config.rollout import AutoRolloutConfig
from cohort.errors import UserError
from cohort.plan.rollout_engine import plan_engine, set_engine
from cohort.plan.split import count_processes, split_gpus
from cohort.ranks.stopping import LAUNCHER_GRACE_S, SIGNALS
from cohort.run.files import SECRET_FILE

_FIRST_PORT = 8000
_PAUSE_S = 10  # between the end of a server and its next start


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutNodes:
    """The last nodes of an allocation, which only run rollout servers."""

    num_nodes: int
    servers_per_node: int
    gpus_per_server: int
    server_name: str

    @property
    def num_servers(self) -> int:
        """Servers on all rollout nodes."""
        return self.num_nodes * self.servers_per_node

    def header(self, gpus_per_node: int) -> str:
        """Return a comment line that describes the nodes."""
        each = f"{gpus_per_node} GPUs" if gpus_per_node else "no GPUs"
        return (
            f"Rollout nodes: {self.num_nodes}, with {each} and {self.servers_per_node} {self.server_name}s each: "
            f"{self.num_servers} servers."
        )


def plan_rollout_nodes(config: Config, *, num_nodes: int, gpus_per_node: int, gpus_left: int) -> RolloutNodes | None:
    """Plan the servers of `--rollout-nodes`; None without such nodes.

    Args:
        config: configuration of the run.
        num_nodes: number of rollout nodes.
        gpus_per_node: GPUs of every node.
        gpus_left: GPUs of a training node without a rank.

    Raises:
        UserError: it contradicts the configuration, or leaves the run without servers.
    """
    rollout = config.rollout
    if not rollout.uses_servers:
        if num_nodes > 0:
            raise UserError(
                f"--rollout-nodes: {num_nodes} with rollout.engine: {rollout.engine}, which samples on the training "
                f"nodes; use 0, or rollout.engine={AutoRolloutConfig.prefers}"
            )
        return None
    if num_nodes == 0:
        if gpus_per_node and not gpus_left and not rollout.urls:
            raise UserError(
                f"--rollout-nodes: 0 leaves no GPUs for the servers of rollout.engine: {rollout.engine}, since the "
                f"ranks use all GPUs of the training nodes; use --rollout-nodes 1, rollout.urls, or --nodes 1, which "
                f"splits the node's GPUs"
            )
        return None
    if not rollout.has_serve_command:
        raise UserError(
            f"--rollout-nodes: {num_nodes} with rollout.engine: {rollout.engine} is not supported, since `cohort "
            f"serve` cannot start a {rollout.server_name}; use 0 with rollout.urls, or rollout.engine="
            f"{AutoRolloutConfig.prefers}"
        )
    for field, value, default in (
        ("rollout.urls", list(rollout.urls), []),
        ("rollout.secret_file", rollout.secret_file, None),
        ("hardware.rollout_gpus", config.hardware.rollout_gpus, "auto"),
    ):
        if value != default:
            raise UserError(
                f"{field}: {value} conflicts with --rollout-nodes: {num_nodes}, whose servers the run uses; remove one"
            )
    return _servers_of(rollout, num_nodes, gpus_per_node)


def _servers_of(rollout: ServersConfig, num_nodes: int, gpus_per_node: int) -> RolloutNodes:
    size = rollout.tensor_parallel
    if gpus_per_node and gpus_per_node % size:
        fitting = [n for n in range(1, gpus_per_node + 1) if gpus_per_node % n == 0]
        near = sorted({max([n for n in fitting if n < size]), min([n for n in fitting if n > size] or [gpus_per_node])})
        raise UserError(
            f"rollout.tensor_parallel: {size} does not divide the {gpus_per_node} GPUs of a rollout node, and a server "
            f"cannot span nodes; use {' or '.join(map(str, near))}"
        )
    if not gpus_per_node and size != 1:
        raise UserError(f"rollout.tensor_parallel: {size} requires GPUs, but there are none; use 1")
    nodes = RolloutNodes(
        num_nodes=num_nodes,
        servers_per_node=gpus_per_node // size if gpus_per_node else 1,
        gpus_per_server=size if gpus_per_node else 0,
        server_name=rollout.server_name,
    )
    if rollout.servers not in ("auto", nodes.num_servers):
        raise UserError(
            f"rollout.servers: {rollout.servers} does not match the {nodes.num_servers} servers of --rollout-nodes: "
            f"{num_nodes}; use auto"
        )
    return nodes


def training_overrides(config: Config) -> list[str]:
    """Overrides that reset the keys of the run's own servers, which have no effect together with `rollout.urls`."""
    rollout = config.rollout
    assert rollout.uses_servers
    fields = type(rollout).model_fields
    defaults = {key: fields[key].get_default(call_default_factory=True) for key in rollout.managed_server_keys}
    changed = {key: default for key, default in defaults.items() if getattr(rollout, key) != default}
    return [f"rollout.{key}={'null' if default is None else default}" for key, default in changed.items()]


def secret_override(config: Config) -> str:
    """Override that has servers and ranks use the secret file in the run folder, which `start_servers` creates."""
    return f"rollout.secret_file={json.dumps(str(Path(config.run.dir).absolute() / SECRET_FILE))}"


def start_servers(nodes: RolloutNodes, *, num_training_nodes: int, overrides: Sequence[str]) -> str:
    """Return the script lines that start the servers and set `urls`.

    Args:
        nodes: the rollout nodes.
        num_training_nodes: number of nodes before them.
        overrides: `key.sub=value` arguments of the run, with `secret_override`.
    """
    arguments = " ".join(['"$config"', *map(shlex.quote, overrides)])
    return f"""\
training_nodes=$(head -n {num_training_nodes} <<< "$nodes" | paste -sd,)
rollout_nodes=$(tail -n {nodes.num_nodes} <<< "$nodes" | paste -sd,)

# {nodes.server_name}s on the last nodes; they end with the job. A server that exits is restarted and gets the current
# weights from the trainer, which gives up after rollout.max_server_failures.
# Whoever reaches these nodes' ports from {_FIRST_PORT} on needs this secret, which is new for every start of the job.
secret_file="$run_dir/{SECRET_FILE}"
trap 'rm -f -- "$probe" "$secret_file"' EXIT
rm -f -- "$secret_file"
(umask 077; head -c 16 /dev/urandom | od -An -v -tx1 | tr -d ' \\n' > "$secret_file")
urls=""
for node in ${{rollout_nodes//,/ }}; do
    for (( i = 0; i < {nodes.servers_per_node}; i++ )); do
        urls+="${{urls:+,}}http://$node:$(( {_FIRST_PORT} + i ))"
    done
done
srun --nodes={nodes.num_nodes} --ntasks={nodes.num_nodes} --nodelist="$rollout_nodes" \\
    --kill-on-bad-exit=1 --cpu-bind=none bash -c '
    trap "" USR1  # meant for the training ranks, which save
    for (( i = 0; i < {nodes.servers_per_node}; i++ )); do
        first_gpu=$(( i * {nodes.gpus_per_server} ))
        export CUDA_VISIBLE_DEVICES=$(seq -s, "$first_gpu" $(( first_gpu + {nodes.gpus_per_server} - 1 )))
        while true; do
            status=0
            cohort serve "$@" --host 0.0.0.0 --port $(( {_FIRST_PORT} + i )) || status=$?
            (( status == 2 )) && exit 2  # a user error: another start would fail too
            sleep {_PAUSE_S}
        done &
    done
    wait -n
' serve-rollouts {arguments} &
"""


# minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds
_TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,-]*")
# Extra time between the signal and the time limit, in addition to `hardware.grace_s`, for all ranks to notice and exit.
_SLURM_LATE_S = 60
# How long a restart waits for more nodes once the minimum has joined.
_LAST_CALL_S = 60
# Servers end before training only if they fail to start.
_END_OF_BOTH = """ &
status=0
wait -n || status=$?
kill $(jobs -p) 2> /dev/null || true
wait
exit "$status"\
"""


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
    _check_options(options)
    gpus = _gpus_per_node(config, options)
    arguments = list(overrides)
    if options.rollout_nodes > 0 and config.rollout.engine == "auto":
        config = set_engine(config, AutoRolloutConfig.prefers)
        arguments.append(f"rollout.engine={config.rollout.engine}")
    elif options.nodes > 1 and config.rollout.engine == "auto":
        config = set_engine(config, "local")  # fixed here, so that it does not depend on the nodes of a start
        arguments.append("rollout.engine=local")
    _check_restarts(config, options)
    if _splits_its_gpus(config, options, gpus):
        _check_split(config, gpus)
        ranks_per_node = gpus
        who = [f"Nodes: 1, with {gpus} GPUs, which `cohort train` splits between training and servers."]
        launch = _launch_on_one_node([*arguments, f"hardware.max_restarts={options.max_restarts}"])
    else:
        ranks_per_node = count_processes(config, gpus)
        rollout = plan_rollout_nodes(
            config, num_nodes=options.rollout_nodes, gpus_per_node=gpus, gpus_left=gpus - ranks_per_node
        )
        who = _who_trains_and_samples(config, options, rollout, gpus, ranks_per_node)
        launch = _launch(config, arguments, options, rollout, ranks_per_node)
    header = ["Written by `cohort launch slurm`, to be submitted with `sbatch`.", "", *who, ""]
    parts = (
        "#!/bin/bash",
        "\n".join(f"# {line}".rstrip() for line in header),
        _directives(options, gpus, grace_s=config.hardware.grace_s if config.run.checkpoint_every > 0 else None),
        _preparation(config, config_path, ranks_per_node),
        launch,
    )
    return "\n".join(parts)


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


def _who_trains_and_samples(
    config: Config, options: SlurmOptions, rollout: RolloutNodes | None, gpus: int, ranks_per_node: int
) -> list[str]:
    """Return comment lines that describe the training and rollout nodes."""
    each = f"{gpus} GPUs" if gpus else "no GPUs"
    if rollout is not None:
        samples = rollout.header(gpus)
    elif not config.rollout.uses_servers:
        samples = (
            f"Rollout nodes: 0. The training nodes sample the completions themselves (rollout.engine: "
            f"{config.rollout.engine})."
        )
    elif config.rollout.urls:
        samples = "Rollout nodes: 0. The servers of rollout.urls sample the completions."
    else:
        samples = f"Rollout nodes: 0. {config.rollout.server_name}s on the first node sample the completions."
    ranks = options.nodes * ranks_per_node
    return [f"Training nodes: {options.nodes}, with {each} and {ranks_per_node} ranks each: {ranks} ranks.", samples]


def _directives(options: SlurmOptions, gpus: int, *, grace_s: float | None) -> str:
    """Return the #SBATCH lines. `grace_s`: time to save after a signal; None without checkpoints."""
    elastic = _min_nodes(options) < options.nodes
    lines = [
        f"--job-name={options.job_name}",
        f"--nodes={options.nodes + options.rollout_nodes}",
        "--ntasks-per-node=1",
        f"--gpus-per-node={gpus}" if gpus else None,
        "--exclusive",
        f"--time={options.time}",
        f"--partition={options.partition}" if options.partition else None,
        f"--account={options.account}" if options.account else None,
        "--output=slurm-%x-%j.log",
        "--open-mode=append",
        "--no-requeue" if grace_s is None else "--requeue",
        # to every rank, before the time limit; Slurm may be a minute early
        f"--signal=USR1@{math.ceil(grace_s) + _SLURM_LATE_S}" if grace_s is not None else None,
        "--no-kill" if elastic else None,
    ]
    advice = (
        """\
# The run saves and exits before the time limit, and at preemption if the partition's GraceTime exceeds
# hardware.grace_s. After preemption, or the loss of a node that ends the job, Slurm requeues the script, and the run
# resumes from its last checkpoint; after the time limit, submit the script again."""
        if grace_s is not None
        else """\
# run.checkpoint_every is 0: a killed run cannot be resumed, so Slurm must not requeue it."""
    )
    return "\n".join([*(f"#SBATCH {line}" for line in lines if line), advice])


def _preparation(config: Config, config_path: Path, ranks_per_node: int) -> str:
    return f"""
set -euo pipefail

config={shlex.quote(str(config_path.absolute()))}
run_dir={shlex.quote(config.run.dir)}
export PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"
cd {shlex.quote(str(Path.cwd()))}

# Waiting ranks must sleep, not spin; ranks share the node's cores.
export OMP_WAIT_POLICY="${{OMP_WAIT_POLICY:-PASSIVE}}"
cores=$(( ${{SLURM_CPUS_ON_NODE:-1}} / {ranks_per_node} ))
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-$(( cores > 0 ? cores : 1 ))}}"
# Each start of the ranks uses a new port on the node of rank 0.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# When terminated, the launchers give the ranks hardware.grace_s to save.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={math.ceil(config.hardware.grace_s) + LAUNCHER_GRACE_S}
# Every rank has several connections to every other one.
ulimit -n "$(ulimit -Hn)" || true
# For nodes with several networks: export GLOO_SOCKET_IFNAME=... NCCL_SOCKET_IFNAME=...

# run.dir must be on a shared file system: each rank writes its part of a checkpoint.
probe="$run_dir/.shared-$SLURM_JOB_ID"
mkdir -p -- "$run_dir"
trap 'rm -f -- "$probe"' EXIT
touch -- "$probe"
srun --kill-on-bad-exit=1 bash -c '
    [ -w "$1" ] && [ -w "$1/${{2##*/}}" ] && exit 0
    echo "error: $(hostname): run.dir $1 is not writable here, or is not the folder that the first node sees" >&2
    exit 2
' check-run-dir "$run_dir" "$probe"
rm -f -- "$probe"  # a new run wants an empty folder
"""


def _launch(
    config: Config,
    arguments: Sequence[str],
    options: SlurmOptions,
    rollout: RolloutNodes | None,
    ranks_per_node: int,
) -> str:
    min_nodes, timeout_s = _min_nodes(options), math.ceil(config.hardware.timeout_s)
    deadlines = f"join_timeout={timeout_s},read_timeout={timeout_s}"
    if min_nodes < options.nodes:
        deadlines += f",last_call_timeout={_LAST_CALL_S}"
        step = "--no-kill --kill-on-bad-exit=0 --wait=0"
        loss = "# The others restart without a lost node. The first node must survive: it hosts the rendezvous."
    else:
        step = "--kill-on-bad-exit=1"
        loss = "# A failed node ends the job; with --min-nodes the others would continue without it."
    words = ["-m cohort train", '"$config"', *map(shlex.quote, arguments)]
    servers, end = "", ""
    if rollout is not None:
        secret = secret_override(config)
        words += [*map(shlex.quote, training_overrides(config)), shlex.quote(secret), '"rollout.urls=[$urls]"']
        servers = start_servers(rollout, num_training_nodes=options.nodes, overrides=[*arguments, secret])
        step += f' --nodes={options.nodes} --ntasks={options.nodes} --nodelist="$training_nodes"'
        end = _END_OF_BOTH
    training = " ".join(words)
    return f"""\
# The first node of the allocation hosts the rendezvous.
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first_node="${{nodes%%$'\\n'*}}"
{servers}
launcher=(
    torchrun
    --nnodes {min_nodes}:{options.nodes}
    --nproc-per-node {ranks_per_node}
    --rdzv-backend c10d
    --rdzv-endpoint "$first_node:{options.port}"
    --rdzv-id "$SLURM_JOB_ID"
    --rdzv-conf {deadlines}  # hardware.timeout_s
    --max-restarts {options.max_restarts}
    --monitor-interval 1
    --signals_to_handle {",".join(number.name for number in SIGNALS)}
)
training=({training})

{loss}
# One task per node launches all of its ranks, which use all of the node's cores.
srun {step} --cpu-bind=none "${{launcher[@]}}" "${{training[@]}}"{end}
"""


def _launch_on_one_node(arguments: Sequence[str]) -> str:
    words = " ".join(map(shlex.quote, arguments))
    return f"""\
# One process starts the others: one training process per training GPU, and the rollout servers on the other GPUs, or on
# the same ones. It restarts all of them if one fails.
srun --kill-on-bad-exit=1 --cpu-bind=none cohort train "$config" {words}
"""


def _min_nodes(options: SlurmOptions) -> int:
    return options.nodes if options.min_nodes is None else options.min_nodes


def _check_options(options: SlurmOptions) -> None:
    """Check the options that need no configuration.

    Raises:
        UserError: an option is invalid.
    """
    if _min_nodes(options) > options.nodes:
        raise UserError(f"--min-nodes: {options.min_nodes} exceeds --nodes: {options.nodes}; use {options.nodes}")
    if not _TIME.fullmatch(options.time):
        raise UserError(
            f"--time: {options.time!r} is not a time limit of Slurm; use hours:minutes:seconds or days-hours, such as "
            f"24:00:00 or 1-00 (or minutes, minutes:seconds, days-hours:minutes:seconds)"
        )
    for name, text in (
        ("partition", options.partition),
        ("account", options.account),
        ("job-name", options.job_name),
    ):
        if text is not None and not _NAME.fullmatch(text):
            near = re.sub(r"[^A-Za-z0-9_.,-]+", "-", text).strip("-.,") or "cohort"
            raise UserError(f"--{name}: {text!r} has characters other than letters, digits and _ . , -; use {near}")


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


def _check_restarts(config: Config, options: SlurmOptions) -> None:
    """Reject restarts without checkpoints, and fewer nodes without restarts."""
    if options.max_restarts > 0 and config.run.checkpoint_every == 0:
        raise UserError(
            f"run.checkpoint_every: 0 leaves no checkpoint to restart from with --max-restarts: "
            f"{options.max_restarts}; use run.checkpoint_every=50, or --max-restarts 0"
        )
    if options.max_restarts == 0 and _min_nodes(options) < options.nodes:
        raise UserError(
            f"--min-nodes: {options.min_nodes} has no effect with --max-restarts: 0, since continuing with fewer "
            f"nodes takes a restart; use --max-restarts 3, or --min-nodes {options.nodes}"
        )
