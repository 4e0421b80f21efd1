"""TRL's own batch checks, taken out of its sources and run by themselves.

`GRPOConfig.__post_init__` (from 0.18 on) or the statements of `GRPOTrainer.__init__` that check batches (before) are
compiled without the rest of TRL, so that any version can be asked in microseconds, whatever it would need installed.

    python tests/helpers/trl_truth.py 0.16.0=/path/to/trl-0.16 ... > tests/cohort_check/trl_starts.json

makes the table of `test_check_trl.py` from folders that hold a package `trl` each
(`pip install --no-deps --target /path/to/trl-0.16 trl==0.16.0`).
"""

import ast
import itertools
import json
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# (starts, message, generation_batch_size, steps_per_generation)
Verdict = tuple[bool, str | None, int | None, int | None]
Case = dict[str, Any]  # GRPOConfig's keys, and world_size

NAMES = (
    "world_size",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_generations",
    "generation_batch_size",
    "steps_per_generation",
    "evaluates",
    "per_device_eval_batch_size",
    "num_generations_eval",
)


class _Settings(SimpleNamespace):
    """What a check looks at; everything that a case does not say is None."""

    def __getattr__(self, name: str) -> None:
        return None


def cases() -> list[Case]:
    """Every combination of a grid: training without evaluation, then evaluation."""
    worlds, sizes, accumulations, generations = (
        (1, 2, 3, 4, 7, 8, 16),
        (1, 2, 3, 4, 8, 14),
        (1, 2, 3, 4),
        (1, 2, 4, 7, 8, 14),
    )
    batches = ((None, None), (None, 1), (None, 3), (12, None), (56, None), (448, None), (8, 4))
    found = [
        dict(zip(NAMES, (w, b, a, g, size, steps, False, 8, None), strict=True))
        for w, b, a, g, (size, steps) in itertools.product(worlds, sizes, accumulations, generations, batches)
    ]
    found += [
        dict(zip(NAMES, (w, 8, 2, g, None, None, True, b, e), strict=True))
        for w, g, b, e in itertools.product(worlds, generations, sizes, (None, 2, 3, 16))
    ]
    return found


def checker(folder: Path) -> Callable[[Case], Verdict]:
    """The checks of the TRL whose package is in a folder."""
    config = _class(folder / "trl/trainer/grpo_config.py", "GRPOConfig")
    source = ast.unparse(config)
    if "must be divisible by the global batch size" in source:
        body = next(node for node in config.body if isinstance(node, ast.FunctionDef) and node.name == "__post_init__")
        statements = [node for node in body.body if "super()" not in ast.unparse(node)]
        code = compile(ast.Module(statements, []), "grpo_config.py", "exec")
        return lambda case: _run(code, self=_config_like(case))
    trainer = _class(folder / "trl/trainer/grpo_trainer.py", "GRPOTrainer")
    init = next(node for node in trainer.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    texts = [ast.unparse(node) for node in init.body]
    first = next(i for i, text in enumerate(texts) if text == "num_processes = self.accelerator.num_processes")
    last = next(i for i, text in enumerate(texts) if "eval_strategy" in text and "divisible" in text)
    first -= "at least 2 generations" in texts[first - 1]
    code = compile(ast.Module(init.body[first : last + 1], []), "grpo_trainer.py", "exec")
    uses_accumulation = "gradient_accumulation_steps" in "".join(texts[first : last + 1])

    def check(case: Case) -> Verdict:
        args = _config_like(case)
        processes = SimpleNamespace(num_processes=case["world_size"])
        trainer = SimpleNamespace(args=args, num_generations=case["num_generations"], accelerator=processes)
        starts, message, _, _ = _run(code, self=trainer, args=args)
        steps = case["gradient_accumulation_steps"] if uses_accumulation else 1
        size = case["per_device_train_batch_size"] * case["world_size"] * steps
        return (True, None, size, steps) if starts else (False, message, None, None)

    return check


def _class(path: Path, name: str) -> ast.ClassDef:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def _config_like(case: Case) -> _Settings:
    strategy = "steps" if case["evaluates"] else "no"
    own = {key: case[key] for key in NAMES if key != "evaluates"}
    fixed = {
        "scale_rewards": "group",
        "vllm_importance_sampling_mode": "",
        "vllm_importance_sampling_clip_max": 3.0,
        "gradient_checkpointing_kwargs": {},
    }
    return _Settings(**fixed, **own, eval_strategy=strategy, do_eval=case["evaluates"])


def _run(code: Any, **names: Any) -> Verdict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exec(code, {"warnings": warnings, **names})
        except ValueError as error:
            return (False, str(error), None, None)
    config = names["self"]
    return (True, None, getattr(config, "generation_batch_size", None), getattr(config, "steps_per_generation", None))


def _table(folders: dict[str, Path]) -> dict[str, list[list[Any]]]:
    """Forty cases of the grid and what each version says to them."""
    chosen = random.Random(0).sample(cases(), 40)
    return {
        version: [[*(case[name] for name in NAMES), *check(case)] for case in chosen]
        for version, check in ((version, checker(folder)) for version, folder in folders.items())
    }


if __name__ == "__main__":
    table = _table({version: Path(folder) for version, folder in (argument.split("=") for argument in sys.argv[1:])})
    lines = [f'"{version}": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]" for version, rows in table.items()]
    print("{\n" + ",\n".join(lines) + "\n}")
