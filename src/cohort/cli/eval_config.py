"""Build the configuration of `cohort eval` from its options and, for a run, the run's settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from cohort.config import Config, config_from_dict, load_config
from cohort.config.rollout import TurnsConfig
from cohort.errors import UserError
from cohort.run.files import checkpoints, is_run_folder

_DATA = {"prompt": "prompt", "system_prompt": "system_prompt", "chat_template": "apply_chat_template"}
_ROLLOUT = ("max_prompt_tokens", "max_completion_tokens", "stop")
_EVAL = ("split", "max_prompts", "num_samples", "temperature", "top_p", "top_k")


def eval_config(model: str, given: Mapping[str, Any]) -> Config:
    """Build the configuration of an evaluation.

    Args:
        model: folder or id of a model, or folder of a run.
        given: Command-line options by name; None if not given.

    Raises:
        UserError: the run has no final model, or an option is missing or invalid.
    """
    is_run = is_run_folder(Path(model))
    raw: dict[str, Any] = _of_run(Path(model)) if is_run else _of_model(model)
    options = {name: value for name, value in given.items() if value is not None}
    raw["data"] |= {key: options[name] for name, key in _DATA.items() if name in options}
    raw["rollout"] |= {name: options[name] for name in _ROLLOUT if name in options}
    raw["eval"] |= {name: options[name] for name in _EVAL if name in options}
    if "max_completion_tokens" in options:
        raw["eval"]["max_completion_tokens"] = None
    if "prompt" in options:
        raw["eval"]["prompt"] = None
    if "data" in options:
        raw["eval"] |= {"path": options["data"], "name": None}
        raw["eval"].setdefault("split", "test")
    brings_its_own = any(raw["rollout"].get(key) for key in ("environment", "agent"))
    if raw["eval"].get("path") is None and not (brings_its_own and raw["eval"].get("max_prompts")):
        raise UserError(f"--data is missing; give held-out data{' (the run has none)' if is_run else ''}")
    raw["data"]["path"] = raw["eval"].get("path")
    if "num_samples" in options and "temperature" not in options:
        raw["eval"]["temperature"] = 0.0 if options["num_samples"] == 1 else 0.6
    if "reward" in options:
        raw["rewards"] = _rewards(options["reward"], options.get("reward_args", "{}"))
        raw["eval"]["success_reward"] = None
    elif "reward_args" in options:
        raise UserError("--reward-args has no effect without --reward; give both, or neither")
    if not raw["rewards"] and not brings_its_own:
        raise UserError("--reward is missing; give one as in `rewards.use`, such as math or rewards.py:right")
    if "seed" in options:
        raw["train"] = {"seed": options["seed"]}
    return config_from_dict({**raw, "hardware": {"device": options.get("device", "auto")}})


def _of_model(model: str) -> dict[str, Any]:
    lengths = {"max_prompt_tokens": 512, "max_completion_tokens": 256}
    return {"model": {"path": model}, "data": {}, "rewards": [], "rollout": lengths, "eval": {}, "train": {"seed": 0}}


def _of_run(run: Path) -> dict[str, Any]:
    """Return the final model and the evaluation settings of a run."""
    config = load_config(run / "config.yaml")
    final = run / "final"
    if not final.is_dir():
        found = checkpoints(run / "checkpoints")
        other = f"; use its last checkpoint, {found[-1]}" if found else ""
        raise UserError(f"MODEL: {str(run)!r} is a run without a final model yet{other}")
    if config.model.adapter is not None:
        raise UserError(
            f"MODEL: {str(run)!r} is an adapter run; merge it with `cohort merge {run} OUT` and evaluate OUT"
        )
    raw = config.model_dump(mode="json")
    return {
        "model": {**raw["model"], "path": str(final)},
        "data": {key: raw["data"][key] for key in (*_DATA.values(),)},
        "rewards": raw["rewards"],
        "rollout": {key: raw["rollout"][key] for key in (*_ROLLOUT, *TurnsConfig.model_fields)},
        "eval": dict(raw["eval"] or {}),
        "train": {"seed": raw["train"]["seed"]},
    }


def _rewards(names: list[str], args_of_first: str) -> list[dict[str, Any]]:
    try:
        args = yaml.safe_load(args_of_first)
    except yaml.YAMLError as error:
        raise UserError(
            f"--reward-args: {args_of_first!r} is not valid YAML; use a mapping such as '{{pattern: \"#### (.*)\"}}'"
        ) from error
    return [{"use": use, "args": args if i == 0 else {}} for i, use in enumerate(names)]
