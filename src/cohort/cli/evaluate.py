"""`cohort eval`: evaluate a model or a run; with the run's settings, changed by options."""

import json
import math
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from cohort.cli.command import Debug
from cohort.config import Config, config_from_dict, load_config
from cohort.config.rollout import TurnsConfig
from cohort.errors import UserError
from cohort.processes.this_process import print_loading_notice
from cohort.run.files import checkpoints, is_run_folder

_DATA = {"prompt": "prompt", "system_prompt": "system_prompt", "chat_template": "apply_chat_template"}
_ROWS = ("path", "split", "name", "columns", "where", "map", "rows", "sources")  # of which `eval.rows` are held out
_ROLLOUT = ("max_prompt_tokens", "max_completion_tokens", "stop")
_EVAL = ("split", "max_prompts", "num_samples", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def evaluate(
    model: Annotated[str, typer.Argument(help="Model folder, Hugging Face id, or folder of a finished run.")],
    data: Annotated[
        str | None,
        typer.Option(help="JSONL, JSON, Parquet or CSV file, folder, or `datasets` id. Default for a run: its own."),
    ] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(help="Reward as in `rewards.use`; the first one defines success. Default for a run: its own."),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Prompt column. Default: prompt.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of a folder or dataset id. Default: test.")] = None,
    system_prompt: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    chat_template: Annotated[
        bool | None,
        typer.Option("--chat-template/--no-chat-template", help="Render prompts with the model's chat template."),
    ] = None,
    num_samples: Annotated[int | None, typer.Option(help="k completions per prompt, for mean@k and pass@k.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 is greedy. Default: 0, or 0.6 for k > 1.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling; 1 (default): off.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Top-k sampling; 0 (default): off.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Min-p sampling; 0 (default): off.")] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Penalty for tokens that are there already; 1 (default): off.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop string, which ends a completion. Default for a run: its own.")
    ] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Longest prompt. Default: 512.")] = None,
    max_completion_tokens: Annotated[int | None, typer.Option(help="Longest completion. Default: 256.")] = None,
    max_prompts: Annotated[int | None, typer.Option(help="Evaluate the first N prompts only.")] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed. Default: 0.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    reward_args: Annotated[str | None, typer.Option(help="Keyword arguments of the first reward, as YAML.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write completions to this Parquet file.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Evaluate a model on a dataset: accuracy, mean@k, pass@k. A run is evaluated with its own settings."""
    given = {name: value for name, value in locals().items() if name not in ("model", "out", "json_", "debug")}
    config = eval_config(model, given)
    print_loading_notice()
    run_eval(config, out=out, as_json=json_)


def eval_config(model: str, given: Mapping[str, Any]) -> Config:
    """Build the configuration of an evaluation.

    Args:
        model: folder or id of a model, or folder of a run.
        given: Command-line options by name; None if not given.

    Raises:
        UserError: the run has no final model, or an option is missing or invalid.
    """
    is_run = is_run_folder(Path(model))
    options = {name: value for name, value in given.items() if value is not None}
    raw: dict[str, Any] = _of_run(Path(model), options) if is_run else _of_model(model)
    raw["data"] |= {key: options[name] for name, key in _DATA.items() if name in options}
    raw["rollout"] |= {name: options[name] for name in _ROLLOUT if name in options}
    raw["eval"] |= {name: options[name] for name in _EVAL if name in options}
    if "max_completion_tokens" in options:
        raw["eval"]["max_completion_tokens"] = None
    if "prompt" in options:
        raw["eval"]["prompt"] = None
    if "data" in options:
        raw["eval"] |= {"path": options["data"], "name": None, "rows": None, "sources": []}
        raw["eval"].setdefault("split", "test")
    brings_its_own = any(raw["rollout"].get(key) for key in ("environment", "agent"))
    if raw["eval"].get("rows") is None:
        paths = [source["path"] for source in raw["eval"].get("sources", ())] or [raw["eval"].get("path")]
        if paths == [None] and not (brings_its_own and raw["eval"].get("max_prompts")):
            raise UserError(f"--data is missing; give held-out data{' (the run has none)' if is_run else ''}")
        raw["data"]["path"] = paths[0]
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


def _of_run(run: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the final model and the evaluation settings of a run; with `eval.rows`, also where it has its rows from.

    Raises:
        UserError: there is no final model, or `eval.rows` would be other rows with these options.
    """
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
    holds_out = config.eval is not None and config.eval.rows is not None and "data" not in options
    if holds_out and "seed" in options:
        raise UserError(
            "--seed: chooses which rows of the training data the run holds out (eval.rows), so that another one would "
            "evaluate rows that it was trained on; leave it out, or give --data"
        )
    return {
        "model": {**raw["model"], "path": str(final)},
        "data": {key: raw["data"][key] for key in (*_DATA.values(), *(_ROWS if holds_out else ()))},
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


def run_eval(config: Config, *, out: Path | None, as_json: bool) -> None:
    """Evaluate, print the metrics, and write the completions to `out` if given."""
    from cohort.display import ProgressBar
    from cohort.run.completions import write_completions_file
    from cohort.trainer.without_training import evaluate_model

    if out is not None:
        _check_can_be_written(out)
    with ProgressBar("evaluating") as progress:
        result = evaluate_model(
            config,
            on_progress=progress.update,
            on_data_progress=progress.data_progress,
            notify=partial(typer.echo, err=True),
        )
    metrics = {name.removeprefix("eval/"): value for name, value in result.metrics.items()}
    if out is not None:
        write_completions_file(out, step=0, groups=result.groups)
    if as_json:
        typer.echo(json.dumps({name: value if math.isfinite(value) else None for name, value in metrics.items()}))
        return
    width = max(map(len, metrics))
    for name, value in metrics.items():
        typer.echo(f"{name:<{width}}  {value:.4g}")


def _check_can_be_written(file: Path) -> None:
    """Check that `file` is writable before the evaluation starts.

    Raises:
        UserError: it is not.
    """
    if file.is_dir():
        raise UserError(f"--out: {str(file)!r} is a folder; give a file, such as {str(file / 'completions.parquet')!r}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: {str(file)!r} cannot be written: {error.strerror}") from error
    if not os.access(file.parent, os.W_OK):
        raise UserError(f"--out: {str(file)!r} cannot be written: no permission to write in {str(file.parent)!r}")
