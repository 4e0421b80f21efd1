"""What each key that trades memory saves and costs, measured on one training step of one group.

    python bench/memory.py [--grid full|tiny] [--repeats 2] [--json FILE]

Forward and backward of 16 completions of 256 tokens after a shared prompt of 2,048, without the optimizer: hidden 512,
8 layers, a vocabulary of 4,096, and some cases with 151,936. Every case is in a process of its own, one thread, in
turn; of `--repeats` rounds the least counts. Memory is the peak resident set above the loaded weights, gradients
included. Every case must give the gradient of the first one. Linux only.
"""

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import (
    ModelShape,
    disagreement,
    do_job,
    forward_backward,
    limit_memory,
    load,
    machine,
    make_engine,
    make_group,
    markdown,
    measure,
    run_apart,
    sketch,
    write_model,
)

SAME_GRADIENT = {"float32": 1e-4, "bfloat16": 0.1}  # relative, of every parameter, by the dtype of products


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The work: G completions of C tokens after P."""

    prompt_tokens: int
    num_completions: int
    completion_tokens: int

    def budget(self, completions: int) -> int:
        """Tokens of the prompt and so many completions; the last token of each is no input."""
        return self.prompt_tokens + completions * (self.completion_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Keys of the sections `model` and `train` that differ from the defaults."""

    shape: str = "V=4,096"
    per_micro_batch: int | None = None  # completions that fit under `train.micro_batch_tokens` with the prompt; all
    model: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)

    def title(self, group: Group) -> str:
        """The keys as they are written in a configuration."""
        keys = {f"model.{k}": v for k, v in self.model.items()} | {f"train.{k}": v for k, v in self.train.items()}
        if self.per_micro_batch:
            keys = {"train.micro_batch_tokens": group.budget(self.per_micro_batch), **keys}
        return ", ".join(f"`{k}: {str(v).lower()}`" for k, v in keys.items()) or "the whole group at once"


SHAPES = {
    "V=4,096": ModelShape(hidden=512, layers=8, intermediate=1536, vocab=4_096),
    "V=151,936": ModelShape(hidden=512, layers=8, intermediate=1536, vocab=151_936),
    "tiny": ModelShape(hidden=32, layers=2, intermediate=64, vocab=512, heads=4, kv_heads=2, head_dim=16),
}
CHECKPOINTING, SELECTIVE = {"gradient_checkpointing": True}, {"gradient_checkpointing": "selective"}
IN_FORWARD = {"gradients_in_forward": True}
GRIDS = {
    "full": (
        Group(prompt_tokens=2048, num_completions=16, completion_tokens=256),
        (
            Case(),
            Case(per_micro_batch=8),
            Case(per_micro_batch=4),
            Case(per_micro_batch=1),
            Case(model=SELECTIVE),
            Case(model=CHECKPOINTING),
            Case(per_micro_batch=4, model=SELECTIVE),
            Case(per_micro_batch=4, model=CHECKPOINTING),
            Case(per_micro_batch=1, model=CHECKPOINTING),
            Case(model={"compute_dtype": "bfloat16"}),
            Case(train=IN_FORWARD),
            Case(shape="V=151,936"),
            Case(shape="V=151,936", train=IN_FORWARD),
            Case(shape="V=151,936", per_micro_batch=1, model=CHECKPOINTING),
        ),
    ),
    "tiny": (
        Group(prompt_tokens=24, num_completions=4, completion_tokens=8),
        (Case(shape="tiny"), Case(shape="tiny", per_micro_batch=1, model=CHECKPOINTING)),
    ),
}
Result = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", choices=GRIDS, default="full")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        do_job(work, args.job)
        return
    group, cases = GRIDS[args.grid]
    results: dict[int, Result] = {}
    references: dict[str, Mapping[str, list[float]]] = {}  # shape -> gradient of its first case
    with tempfile.TemporaryDirectory() as folder:
        for name in dict.fromkeys(case.shape for case in cases):
            write_model(SHAPES[name], Path(folder) / name)
        for _, (number, case) in itertools.product(range(args.repeats), enumerate(cases)):
            if "skipped" in results.get(number, {}):
                continue
            job = {"folder": str(Path(folder) / case.shape), "grid": args.grid, "case": number}
            result = run_apart(__file__, job)
            print(f"{case.shape}: {case.title(group)}", file=sys.stderr, flush=True)
            if "skipped" not in result:
                check(case, result, references)
            before = results.get(number, result)
            results[number] = {k: min(v, before[k]) if k in ("peak_bytes", "cpu_s") else v for k, v in result.items()}
    print(f"{machine()}; one thread, least of {args.repeats}")
    for name in dict.fromkeys(case.shape for case in cases):
        rows = [(case, results[n]) for n, case in enumerate(cases) if case.shape == name]
        print(f"\n### P={group.prompt_tokens}, G={group.num_completions}, C={group.completion_tokens}, {name}\n")
        print(table(group, rows))
    if args.json:
        cases_done = [{"case": case.title(group), "shape": case.shape, **results[n]} for n, case in enumerate(cases)]
        args.json.write_text(json.dumps({"machine": machine(), "cases": cases_done}, indent=1))


def work(job: dict[str, Any]) -> Result:
    """One case."""
    group, cases = GRIDS[job["grid"]]
    case = cases[job["case"]]
    vocab = SHAPES[case.shape].vocab
    limit_memory()
    policy = load(job["folder"], **case.model)
    engine = make_engine(
        policy, micro_batch_tokens=group.budget(case.per_micro_batch or group.num_completions), **case.train
    )
    sequences = make_group(group.prompt_tokens, [group.completion_tokens] * group.num_completions, vocab)
    tiny = make_group(8, [4, 6], vocab)
    done = []
    measured = measure(
        lambda: done.append(forward_backward(engine, sequences)),
        lambda: policy.model.zero_grad(set_to_none=True),
        lambda: forward_backward(engine, tiny),
    )
    scored_inputs = group.num_completions * (group.completion_tokens - 1)
    return {
        **measured,
        "micro_batches": done[-1].num_micro_batches,
        "prompt_tokens": done[-1].num_inputs - scored_inputs,
        "gradient": sketch(policy.model),
    }


def check(case: Case, result: Result, references: dict[str, Mapping[str, list[float]]]) -> None:
    """Compare a case's gradient with the first one of its model; the distance takes the gradient's place.

    Raises:
        SystemExit: it is another gradient.
    """
    gradient = result.pop("gradient")
    result["disagreement"], whose = disagreement(gradient, references.setdefault(case.shape, gradient))
    limit = SAME_GRADIENT[case.model.get("compute_dtype", "float32")]
    if result["disagreement"] > limit:
        raise SystemExit(f"{case}: {whose} differs by {result['disagreement']:.1e}, more than {limit:.0e}")


def table(group: Group, rows: list[tuple[Case, Result]]) -> str:
    """Memory and time of each case, and as shares of the first."""
    header = ["keys", "micro-batches", "prompt tokens computed", "peak MB", "CPU s", "memory", "time"]
    lines = []
    first = rows[0][1]
    for case, r in rows:
        if "skipped" in r:
            lines.append([f"{case.title(group)} ({r['skipped']})"] + [""] * len(header))
            continue
        shares = [f"{r[key] / first[key]:.0%}" if key in first else "" for key in ("peak_bytes", "cpu_s")]
        numbers = [f"{r['micro_batches']}", f"{r['prompt_tokens']:,}", f"{r['peak_bytes'] / 1e6:.0f}"]
        lines.append([case.title(group), *numbers, f"{r['cpu_s']:.2f}", *shares, f"{r['disagreement']:.0e}"])
    return markdown([*header, "gradient differs by"], lines)


if __name__ == "__main__":
    main()
