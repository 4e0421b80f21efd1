"""The closed form of `cohort plan` against the symbolic run of the real training step, over a grid.

    python bench/plan_verify.py [--layers 4] [--shapes 0.5b 7b] [--trained full lora] > grid.jsonl
    python bench/plan_verify.py --table grid.jsonl
    python bench/plan_verify.py CONFIG.yaml [KEY=VALUE ...] [--gpus 8] [--model-shape 7b] [--layers 4]

5 shapes x 3 numbers of processes x 3 lengths x checkpointing off and on x all weights or LoRA of rank 16; one
completion with a prompt of 512 tokens. Layers of a model are alike: by default 4 of them run, and the closed form
counts as many; `--layers 0` runs all. No GPU is needed. With CONFIG, its plan is compared instead of the grid.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from cohort.cli.plan import plan_hardware, plan_run
from cohort.config import AdamwConfig, load_config
from cohort.config.model import AdapterConfig
from cohort.errors import UserError
from cohort.plan.adapter import adapter_shape
from cohort.plan.defaults import compute_dtype
from cohort.plan.memory import plan_memory
from cohort.plan.predict import Plan
from cohort.plan.shape import PRESETS, preset_shape, shape_from_config
from cohort.plan.workload import Workload
from symbolic_step import track_step

SHAPES = ("0.5b", "qwen3-0.6b", "llama3-1b", "7b", "llama3-70b")
PROCESSES = (2, 8, 64)
LENGTHS = (512, 2048, 4096)
TRAINED = ("full", "lora")
PROMPT_TOKENS = 512


def main() -> None:
    """Print one JSON object for each point, as it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--gpus", type=int, help="per node; as `cohort plan --gpus`")
    parser.add_argument("--model-shape", help="as `cohort plan --model`")
    parser.add_argument("--layers", type=int, default=4, help="0: all")
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--processes", nargs="+", type=int, default=PROCESSES)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--trained", nargs="+", choices=TRAINED, default=TRAINED)
    parser.add_argument("--table", type=Path, help="Print the ratios of points that were run before.")
    parser.add_argument("--quick", action="store_true", help="seconds: to see that it runs")
    options = parser.parse_intermixed_args()
    if options.quick:
        options.layers, options.shapes, options.processes, options.lengths = 1, ["0.5b"], [2], [64]
        options.trained = ["full"]
    if options.table:
        for row in table(map(json.loads, options.table.read_text(encoding="utf-8").splitlines())):
            print(row)
        return
    if options.config is not None:
        settings = load_config(options.config, options.overrides)
        machines = plan_hardware(settings, gpu=None, gpus=options.gpus, nodes=1, gpu_memory=None)
        plan, _ = plan_run(settings, machines, options.config.parent, model=options.model_shape)
        print(json.dumps(verify_plan(plan, layers=options.layers)))
        return
    grid = product(options.trained, options.shapes, (False, True), options.lengths, options.processes)
    for trained, name, checkpointing, length, processes in grid:
        point = measure(name, options.layers, processes, length, checkpointing=checkpointing, trained=trained)
        print(json.dumps(point), flush=True)


def measure(
    name: str, layers: int, processes: int, length: int, *, checkpointing: bool, trained: str
) -> dict[str, Any]:
    """One point: both numbers, in bytes, and their ratio."""
    started = time.perf_counter()
    config = dict(PRESETS[preset_shape(name).name])
    config["num_hidden_layers"] = layers = layers or config["num_hidden_layers"]
    adapter, shape = AdapterConfig() if trained == "lora" else None, shape_from_config(config, name=name)
    tracked = track_step(
        config,
        world_size=processes,
        prompt_tokens=PROMPT_TOKENS,
        completion_tokens=length,
        num_generations=1,
        gradient_checkpointing=checkpointing,
        adapter=adapter,
    )
    workload = Workload(
        shape=shape,
        processes=processes,
        weight_bytes=4,
        compute_bytes=2,
        checkpointing=checkpointing,
        offload=False,
        gradients_in_forward=False,
        has_reference=False,
        packed_tokens=PROMPT_TOKENS + length - 1,
        loss_tokens=length,
        shared_prefix_tokens=0,
        sampled_sequences=0,
        sampled_tokens=0,
        awake_server_bytes=0,
        on_gpu=False,
        shares_prompts=False,
        adapter=adapter_shape(adapter, shape) if adapter else None,
    )
    predicted = plan_memory(workload).total("backward")
    return {
        "shape": name,
        "trained": trained,
        "layers": layers,
        "processes": processes,
        "completion_tokens": length,
        "checkpointing": checkpointing,
        "tracked_bytes": tracked.train_bytes,
        "predicted_bytes": predicted,
        "ratio": round(predicted / tracked.train_bytes, 4),
        "seconds": round(time.perf_counter() - started, 1),
    }


def verify_plan(plan: Plan, *, layers: int) -> dict[str, Any]:
    """Compare the plan's closed form with a symbolic run of its micro-batch.

    Both use a model with `layers` layers (0: all), AdamW, no critic and no CPU offload.

    Raises:
        UserError: there is only one process, so weights are not sharded.
    """
    if plan.layout.num_training < 2:
        raise UserError("a symbolic run requires sharded training; plan for at least 2 GPUs")
    model_config = _model_config(plan)
    model_config["num_hidden_layers"] = layers = layers or plan.shape.layers
    print(f"running {layers} of {plan.shape.layers} layers symbolically", file=sys.stderr)
    model, rollout, completions = plan.config.model, plan.config.rollout, plan.micro_batches.completions_per_micro_batch
    tracked = track_step(
        model_config,
        world_size=plan.layout.num_training,
        prompt_tokens=rollout.max_prompt_tokens,
        completion_tokens=rollout.max_new_tokens,
        num_generations=completions,
        gradient_checkpointing=model.gradient_checkpointing,
        dtype=model.dtype,
        compute_dtype=compute_dtype(model, on_gpu=True),
        adapter=model.adapter,
        reshard_after_forward=plan.workload.reshard_after_forward,
    )
    workload = replace(
        plan.workload,
        shape=shape_from_config(model_config, name=plan.shape.name),
        offload=False,
        masters_on_host=False,
        parameters_on_host=False,
        gradients_in_forward=False,
        has_reference=False,
        packed_tokens=rollout.max_prompt_tokens + completions * (rollout.max_new_tokens - 1),
        loss_tokens=completions * rollout.max_new_tokens,
        shared_prefix_tokens=0,
        shares_prompts=completions > 1,
        kept_base_bytes=0,
        on_gpu=False,
        optim=AdamwConfig(),
        critic=None,
    )
    predicted = plan_memory(workload).total("backward")
    return {
        "layers": layers,
        "tracked_bytes": tracked.train_bytes,
        "predicted_bytes": predicted,
        "ratio": predicted / tracked.train_bytes,
    }


def _model_config(plan: Plan) -> dict[str, Any]:
    if plan.shape.name in PRESETS:
        return dict(PRESETS[plan.shape.name])
    return dict(json.loads((Path(plan.config.model.path) / "config.json").read_text(encoding="utf-8")))


def table(points: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Markdown: of each shape, the smallest and the largest ratio over processes and lengths."""
    ratios: dict[tuple[str, int], dict[tuple[str, bool], list[float]]] = {}
    for point in points:
        columns = ratios.setdefault((point["shape"], point["layers"]), {})
        columns.setdefault((point["trained"], point["checkpointing"]), []).append(point["ratio"])
    columns_in_order = [(trained, checkpointing) for trained in TRAINED for checkpointing in (False, True)]
    names = [trained + ", checkpointing" * checkpointing for trained, checkpointing in columns_in_order]
    yield "| model | layers | points | " + " | ".join(names) + " |"
    yield "| --- | --- | --- | " + " | ".join("---" for _ in names) + " |"
    for (shape, layers), by_column in ratios.items():
        found = [by_column.get(column, []) for column in columns_in_order]
        cells = [f"{min(some):.3f} to {max(some):.3f}" if some else "not run" for some in found]
        yield f"| {shape} | {layers} | {sum(map(len, found))} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
