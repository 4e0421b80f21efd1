"""What `auto` comes to on this machine: the engine that samples, and how many processes train."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from cohort.config import Config, load_config
from cohort.errors import UserError
from cohort.placement import num_gpus, why_vllm_does_not_fit
from cohort.plan.rollout_engine import why_not_vllm, with_engine
from cohort.rollout.vllm.options import vllm_python
from cohort.rollout.vllm.server import check_vllm
from cohort.run_files import has_begun, holds_run


def with_chosen_engine(config: Config, note: Callable[[str], None]) -> Config:
    """The configuration with `rollout.engine: auto` decided: that of the run in `run.dir`, else vLLM where it can be.

    Args:
        config: of the run.
        note: told what was chosen, and why; not on a machine without GPUs, where there is nothing to choose.

    Raises:
        UserError: something in the configuration does not go with the engine.
    """
    if config.rollout.engine != "auto":
        return config
    engine, why = _chosen(config)
    if why is not None:
        note(f"rollout.engine: auto: {engine}, {why}")
    return with_engine(config, engine)


def _chosen(config: Config) -> tuple[str, str | None]:
    """The engine, and why for a person."""
    begun = _engine_of_run(Path(config.run.dir))
    if num_gpus(config) == 0:
        return begun or "local", None
    if begun is not None:
        return begun, "as the run began"
    if int(os.environ.get("WORLD_SIZE", "1")) > int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return "local", "since on several machines vLLM needs nodes or servers of its own (rollout.urls)"
    if (reason := why_not_vllm(config)) is not None:
        return "local", f"since vLLM is ruled out: {reason}"
    try:
        version = check_vllm(vllm_python(None))
    except UserError:
        if config.hardware.rollout_gpus != "auto" or "COHORT_VLLM_PYTHON" in os.environ:
            raise  # which ask for it
        return (
            "local",
            f"since there is no vLLM that can be used in {sys.executable} (COHORT_VLLM_PYTHON names another)",
        )
    if (problem := why_vllm_does_not_fit(config)) is not None:
        return "local", f"since vLLM does not fit beside training: {problem}"
    return "vllm", f"since vLLM {version} is installed"


def _engine_of_run(folder: Path) -> str | None:
    """The engine that a run has begun with; None where the folder holds none, or one that cannot be read."""
    if not holds_run(folder) or not has_begun(folder):
        return None
    try:
        engine = load_config(folder / "config.yaml").rollout.engine
    except UserError:
        return None
    return None if engine == "auto" else engine
