"""`cohort serve`: one rollout server in the foreground, for runs on other machines (`rollout.urls`)."""

import shlex
import signal
import sys

from cohort.config import Config
from cohort.config.rollout import AutoRolloutConfig
from cohort.errors import TrainingError, UserError
from cohort.plan.rollout_engine import set_engine
from cohort.processes.child import end_group
from cohort.rollout.engines import servers_setup
from cohort.rollout.engines.servers.placement import num_gpus, visible_devices
from cohort.rollout.engines.servers.process import GRACE_S, start_guarded
from cohort.rollout.engines.servers.secret import SECRET_VARIABLE, read_or_create_secret, read_secret


def serve_command(config: Config, *, host: str, port: int) -> tuple[list[str], dict[str, str]]:
    """Return the server's command line, and the environment variables that it adds.

    The server gets the first `rollout.tensor_parallel` visible GPUs; without GPUs it runs on CPU. It demands the secret
    in `rollout.secret_file`, which is created if it is missing.

    Raises:
        UserError: the run's engine has no such servers, this machine has too few GPUs, or there is no secret file.
    """
    other = AutoRolloutConfig.prefers
    config = set_engine(config, other)
    rollout = config.rollout
    if not rollout.uses_servers:
        raise UserError(
            f"rollout.engine: {rollout.engine} samples in the training processes, without a server; use {other}"
        )
    if not rollout.has_serve_command:
        raise UserError(
            f"rollout.engine: {rollout.engine}: `cohort serve` cannot start a {rollout.server_name}; use {other}"
        )
    if rollout.secret_file is None:
        raise UserError(
            "rollout.secret_file: not set, but a server of `cohort serve` demands a secret of every request; use "
            "rollout.secret_file=server-secret (created if it is missing), here and for the run"
        )
    found, needed = num_gpus(config), rollout.tensor_parallel
    if needed > max(1, found):
        raise UserError(
            f"rollout.tensor_parallel: {needed} exceeds this machine's {found} GPUs; use at most {max(1, found)}"
        )
    gpus = ",".join(visible_devices(config)[:needed]) if found else ""
    command, environment = servers_setup(rollout.engine).serve_command(config, gpus=gpus, host=host, port=port)
    read_or_create_secret(rollout.secret_file)
    return command, environment | {SECRET_VARIABLE: rollout.secret_file}


def as_shell(command: list[str], environment: dict[str, str]) -> str:
    """Format a command for a shell, one option per line."""
    words = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    words.append(shlex.join(command[:3]))  # python -m module
    for word in map(shlex.quote, command[3:]):
        if words[-1].startswith("--") and " " not in words[-1] and not word.startswith("--"):
            words[-1] += f" {word}"  # an option and its value
        else:
            words.append(word)
    return " \\\n    ".join(["env", *words])


def serve(config: Config, *, host: str, port: int) -> None:
    """Run a server until this process is terminated. The server's processes end with this one, however it ends.

    Raises:
        UserError: the server program is missing or not supported, or as for `serve_command`.
        TrainingError: the server exited.
    """
    command, added = serve_command(config, host=host, port=port)
    config = set_engine(config, AutoRolloutConfig.prefers)
    servers_setup(config.rollout.engine).find_program(config)
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    process = start_guarded(command, added, secret=read_secret(added[SECRET_VARIABLE]), log=None)
    try:
        code = process.wait()
    finally:
        end_group(process, grace_s=GRACE_S)
        signal.signal(signal.SIGTERM, before)
    # an error even for code 0, with which a server may exit after its engine has died
    raise TrainingError(f"the server exited with code {code}; see its output above")
