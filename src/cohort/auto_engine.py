"""Resolve `rollout.engine: auto` on this machine."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from cohort.config import Config, load_config
from cohort.errors import UserError
from cohort.placement import num_gpus, vllm_memory_shortfall
from cohort.plan.rollout_engine import set_engine, vllm_incompatibility
from cohort.rollout.engines.vllm.server import check_vllm
from cohort.rollout.engines.vllm.server_options import vllm_python
from cohort.run_files import has_progress, is_run_folder


def choose_engine(config: Config, notify: Callable[[str], None]) -> Config:
    """Resolve `rollout.engine: auto`: the engine of the run in `run.dir`, else vLLM if possible.

    Args:
        config: configuration of the run.
        notify: called with the choice and its reason, except on a machine without GPUs.

    Raises:
        UserError: the configuration is incompatible with the engine.
    """
    if config.rollout.engine != "auto":
        return config
    engine, why = _chosen(config)
    if why is not None:
        notify(f"rollout.engine: auto: {engine}, {why}")
    return set_engine(config, engine)


def _chosen(config: Config) -> tuple[str, str | None]:
    """Name of the engine, and the reason in words."""
    begun = _engine_of_run(Path(config.run.dir))
    if num_gpus(config) == 0:
        return begun or "local", None
    if begun is not None:
        return begun, "as when the run started"
    if int(os.environ.get("WORLD_SIZE", "1")) > int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return "local", "since vLLM needs dedicated nodes or servers on several machines (rollout.urls)"
    if (reason := vllm_incompatibility(config)) is not None:
        return "local", f"since vLLM does not support this run: {reason}"
    try:
        version = check_vllm(vllm_python(None))
    except UserError:
        if config.hardware.rollout_gpus != "auto" or "COHORT_VLLM_PYTHON" in os.environ:
            raise  # both request vLLM
        return (
            "local",
            f"since {sys.executable} has no usable vLLM (set COHORT_VLLM_PYTHON to an environment that has)",
        )
    if (problem := vllm_memory_shortfall(config)) is not None:
        return "local", f"since vLLM does not fit alongside training: {problem}"
    return "vllm", f"since vLLM {version} is installed"


def _engine_of_run(folder: Path) -> str | None:
    """Engine that the run in `folder` started with; None without a readable run."""
    if not is_run_folder(folder) or not has_progress(folder):
        return None
    try:
        engine = load_config(folder / "config.yaml").rollout.engine
    except UserError:
        return None
    return None if engine == "auto" else engine
