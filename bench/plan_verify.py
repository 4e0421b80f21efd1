"""The closed form of `cohort plan` against the symbolic run of the real training step, over a grid.

    python bench/plan_verify.py [--layers 8] [--shapes 0.5b 7b] > grid.jsonl

5 shapes x 3 numbers of processes x 3 lengths x checkpointing off and on; one completion with a prompt of 512 tokens.
Layers of a model are alike: by default 8 of them run, and the closed form counts as many. No GPU is needed.
"""

import argparse
import json
import time
from itertools import product

from cohort.cli.plan_verify import track_step
from cohort.plan.memory import Work, plan_memory
from cohort.plan.shape import PRESETS, preset_shape, shape_of

SHAPES = ("0.5b", "qwen3-0.6b", "llama3-1b", "7b", "llama3-70b")
PROCESSES = (2, 8, 64)
LENGTHS = (512, 2048, 4096)
PROMPT_TOKENS = 512


def main() -> None:
    """Print one JSON object for each point, and the largest difference at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--processes", nargs="+", type=int, default=PROCESSES)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    options = parser.parse_args()
    ratios = []
    for name, checkpointing, length, processes in product(
        options.shapes, (False, True), options.lengths, options.processes
    ):
        started = time.perf_counter()
        config = {**PRESETS[preset_shape(name).name], "num_hidden_layers": options.layers}
        tracked = track_step(
            config,
            world_size=processes,
            prompt_tokens=PROMPT_TOKENS,
            completion_tokens=length,
            num_generations=1,
            checkpointing=checkpointing,
        )
        work = Work(
            shape=shape_of(config, name=name),
            processes=processes,
            weight_bytes=4,
            compute_bytes=2,
            checkpointing=checkpointing,
            offload=False,
            gradients_in_forward=False,
            has_reference=False,
            row_tokens=PROMPT_TOKENS + length - 1,
            scored_tokens=length,
            kept_prompt_tokens=0,
            sampled_sequences=0,
            sampled_tokens=0,
            vllm_bytes=0,
            on_gpu=False,
        )
        predicted = plan_memory(work).total("backward")
        ratios.append(predicted / tracked.train_bytes)
        point = {
            "shape": name,
            "layers": options.layers,
            "processes": processes,
            "completion_tokens": length,
            "checkpointing": checkpointing,
            "tracked_bytes": tracked.train_bytes,
            "predicted_bytes": predicted,
            "ratio": round(ratios[-1], 4),
            "seconds": round(time.perf_counter() - started, 1),
        }
        print(json.dumps(point), flush=True)
    print(json.dumps({"points": len(ratios), "smallest": min(ratios), "largest": max(ratios)}))


if __name__ == "__main__":
    main()
