"""The part of the Slurm batch script that starts vLLM servers on rollout nodes."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cohort.config import Config, ServersConfig
from cohort.errors import UserError
from cohort.run_files import SECRET_FILE

_FIRST_PORT = 8000
_PAUSE_S = 10  # between the end of a server and its next start


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutNodes:
    """The last nodes of an allocation, which only run vLLM servers."""

    num_nodes: int
    servers_per_node: int
    gpus_per_server: int

    @property
    def num_servers(self) -> int:
        """Servers on all rollout nodes."""
        return self.num_nodes * self.servers_per_node

    def header(self, gpus_per_node: int) -> str:
        """Return a comment line that describes the nodes."""
        each = f"{gpus_per_node} GPUs" if gpus_per_node else "no GPUs"
        return (
            f"Rollout nodes: {self.num_nodes}, with {each} and {self.servers_per_node} vLLM servers each: "
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
                f"nodes; use 0, or rollout.engine=vllm"
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
            f"serve` cannot start a {rollout.server_name}; use 0 with rollout.urls, or rollout.engine=vllm"
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

# vLLM servers on the last nodes; they end with the job. A server that exits is restarted and gets the current weights
# from the trainer, which gives up after rollout.max_server_failures.
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
