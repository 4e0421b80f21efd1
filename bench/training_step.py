"""Time and memory of one training step of one group, compared with other ways of computing the same gradient.

    python bench/training_step.py [--grid full|small|gpu|tiny] [--dtype float32|bfloat16] [--methods ...]
                                  [--repeats 2] [--json FILE]

Forward and backward of one group of G completions of 16 to 256 tokens after a shared prompt of P tokens, without the
optimizer. Small random Qwen3-type models in float32, with a head that dominates (hidden 256, 4 layers) and with a body
that does (hidden 512, 8 layers, a vocabulary of 4,096). Every measurement is in a process of its own, one thread, the
methods in turn; of `--repeats` rounds the least counts, since what other work takes away is none of a method's. Memory
is the peak resident set above the loaded weights in the first pass, gradients included; time is processor time of a
second pass that reuses the first one's memory. Where there is a GPU it is used: memory is then what its allocator has
given out, and time all time. All methods must give the same gradient, or nothing is reported; with bfloat16 products
the difference, which rounding explains, is reported and not judged. Needs the extra `bench`, and Linux. `small` is the
points that have targets, `gpu` a model of Qwen3-0.6B's shape with longer completions.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from baselines import BASELINES
from harness import (
    QWEN3_06B,
    TINY,
    FailedError,
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
    spread,
    write_model,
)

OURS: dict[str, dict[str, Any]] = {  # name -> layout and keys of `train`
    "packed": {"layout": "packed"},
    "shared": {"layout": "shared"},
    "gradients-in-forward": {"layout": "shared", "gradients_in_forward": True},
}
METHODS = [*BASELINES, *OURS]
SAME_GRADIENT = 1e-4  # relative, of every parameter, in float32
CLOSE = 0.1  # measured saving of shared prompts against the formula
NOISE = 0.02  # a difference that is none
FAILED = "failed"  # what the reason begins with where a method was not left out on purpose
TARGETS = {  # prompt tokens -> memory and time against full logits, the same against padded-fused, gradients in forward
    64: (17.0, 1.6, 1.5, 1.1, 2.0),
    512: (16.0, 2.3, 2.5, 1.5, 3.0),
    2048: (14.0, 3.9, 5.2, 3.6, 4.5),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What is computed."""

    model: str
    prompt_tokens: int
    completion_tokens: tuple[int, ...]

    @property
    def name(self) -> str:
        """For titles."""
        return f"{self.model}, G={len(self.completion_tokens)}, P={self.prompt_tokens}"


MODELS = {
    "V=151,936": ModelShape(hidden=256, layers=4, intermediate=768, vocab=151_936),
    "V=32,768": ModelShape(hidden=256, layers=4, intermediate=768, vocab=32_768),
    "body-heavy": ModelShape(hidden=512, layers=8, intermediate=1536, vocab=4_096),
    "Qwen3-0.6B": QWEN3_06B,
    "tiny": TINY,
}
Result = dict[str, Any]


def grid(name: str) -> list[Point]:
    """The points of a grid; those that have targets come first."""
    if name == "tiny":
        return [Point(model="tiny", prompt_tokens=40, completion_tokens=tuple(spread(4, 16, 4)))]
    if name == "gpu":
        lengths = tuple(spread(256, 2048, 8))
        return [Point(model="Qwen3-0.6B", prompt_tokens=p, completion_tokens=lengths) for p in (512, 2048)]
    models = {"small": [("V=151,936", 8), ("body-heavy", 8)]}
    models["full"] = [
        *models["small"],
        ("V=32,768", 8),
        *((model, 16) for model in ("V=151,936", "V=32,768", "body-heavy")),
    ]
    return [
        Point(model=model, prompt_tokens=p, completion_tokens=tuple(spread(16, 256, g)))
        for model, g in models[name]
        for p in (64, 512, 2048)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", choices=["full", "small", "gpu", "tiny"], default="small")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of products")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, metavar="METHOD", help=str(METHODS))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="seconds: to see that it runs")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        do_job(work, args.job)
        return
    if args.quick:
        args.grid, args.methods, args.repeats = "tiny", ["full-logits", "shared"], 1
    results: dict[Point, dict[str, Result]] = {}
    print(f"{machine('trl', 'liger-kernel')}; one thread, {args.dtype}, least of {args.repeats}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for point in grid(args.grid):
            write_model(MODELS[point.model], Path(folder) / point.model)
            results[point] = run_point(point, args.methods, args.repeats, folder, args.dtype)
            print(f"\n### {point.name}\n\n{point_table(results[point])}", flush=True)
            if args.json:
                rows = [asdict(p) | {"methods": r} for p, r in results.items()]
                args.json.write_text(json.dumps({"machine": machine("trl", "liger-kernel"), "points": rows}, indent=1))
    for title, text in summaries(results).items():
        print(f"\n### {title}\n\n{text}")
    reasons = [
        (p.name, method, r["skipped"]) for p, found in results.items() for method, r in found.items() if "skipped" in r
    ]
    if failed := [": ".join(reason) for reason in reasons if reason[-1].startswith(FAILED)]:
        raise SystemExit("\n".join(failed))


def work(job: dict[str, Any]) -> Result:
    """One method at one point."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        limit_memory()
    policy = load(job["folder"], device, compute_dtype=job["dtype"])
    shape, method = MODELS[job["model"]], job["method"]
    sequences = make_group(job["prompt_tokens"], job["completion_tokens"], shape.vocab)
    tiny = make_group(8, [4, 6], shape.vocab)
    if method in BASELINES:
        policy.model.set_attn_implementation("sdpa")

        def step(group=sequences):
            with policy.autocast():
                BASELINES[method](policy.model, group)
    else:
        keys = dict(OURS[method])
        layout = keys.pop("layout")
        assert policy.layout == "shared", "a model of full attention without dropout"
        policy.traits = replace(policy.traits, layout=layout)
        engine = make_engine(policy, micro_batch_tokens=1 << 30, **keys)

        def step(group=sequences):
            forward_backward(engine, group)

    measured = measure(step, lambda: policy.model.zero_grad(set_to_none=True), lambda: step(tiny))
    return {**measured, "gradient": sketch(policy.model)}


def run_point(
    point: Point, methods: Sequence[str], repeats: int, folder: str, dtype: str = "float32"
) -> dict[str, Result]:
    """Every method's least numbers, once their gradients are found to be the same."""
    found: dict[str, Result] = {}
    reference: tuple[str, Mapping[str, list[float]]] | None = None
    for round_number, method in itertools.product(range(repeats), methods):
        if "skipped" in found.get(method, {}):
            continue
        job = {"folder": str(Path(folder) / point.model), "model": point.model, "method": method, "dtype": dtype}
        job |= {"prompt_tokens": point.prompt_tokens, "completion_tokens": point.completion_tokens}
        try:
            result = run_apart(__file__, job)
        except FailedError as error:  # the other methods are measured
            result = {"skipped": f"{FAILED}: {str(error).splitlines()[-1]}"}
        print(f"{point.name}, round {round_number + 1}: {method}", file=sys.stderr, flush=True)
        if "skipped" in result:
            found[method] = result
            continue
        gradient = result.pop("gradient")
        reference = reference or (method, gradient)
        result["disagreement"], whose = disagreement(gradient, reference[1])
        if dtype == "float32" and result["disagreement"] > SAME_GRADIENT:
            raise SystemExit(
                f"{point.name}: the gradient of {method} is not that of {reference[0]}: {whose} differs by "
                f"{result['disagreement']:.1e}, more than {SAME_GRADIENT:.0e}"
            )
        least = found.setdefault(method, dict(result))
        for key, value in result.items():
            least[key] = max(least[key], value) if key == "disagreement" else min(least[key], value)
    return found


def ratio(results: dict[str, Result], other: str, method: str, key: str) -> float | None:
    """How many times as much the other method takes; None where one was not measured."""
    if any("skipped" in results.get(m, {"skipped": ""}) for m in (other, method)):
        return None
    return float(results[other][key] / results[method][key])


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def point_table(results: dict[str, Result]) -> str:
    """All methods at one point; ratios say how many times as much the other method takes."""
    header = ["method", "peak MB", "seconds", "wall s", "full logits: memory", "time", "padded-fused: memory", "time"]
    header.append("gradient differs by")
    rows = []
    for method, r in results.items():
        if "skipped" in r:
            rows.append([f"{method} ({r['skipped']})"] + [""] * (len(header) - 1))
            continue
        measured = [f"{r['peak_bytes'] / 1e6:.0f}", f"{r['seconds']:.2f}", f"{r['wall_s']:.2f}"]
        against = [
            times(ratio(results, other, method, key))
            for other in ("full-logits", "padded-fused")
            for key in ("peak_bytes", "seconds")
        ]
        rows.append([method, *measured, *against, f"{r['disagreement']:.0e}"])
    return markdown(header, rows)


def summaries(results: dict[Point, dict[str, Result]]) -> dict[str, str]:
    """Tables over all points: targets, what sharing saves, where packing alone is better."""
    parts = {"Targets and measured": targets_table(results), "What shared prompts save": sharing_table(results)}
    worse = [
        f"- {point.name}: {method} takes {1 / value:.2f} times the {what} of packed"
        for point, r in results.items()
        for method in ("shared", "gradients-in-forward")
        for key, what in (("peak_bytes", "memory"), ("seconds", "time"))
        if (value := ratio(r, "packed", method, key)) is not None and value < 1 - NOISE
    ]
    return parts | {"Slower or larger than packing without sharing": "\n".join(worse) or "Nowhere."}


def targets_table(results: dict[Point, dict[str, Result]]) -> str:
    """V=151,936, eight completions: what was aimed at, and what was measured."""
    compared = [
        ("full logits / shared: memory", "full-logits", "shared", "peak_bytes"),
        ("time", "full-logits", "shared", "seconds"),
        ("padded-fused / shared: memory", "padded-fused", "shared", "peak_bytes"),
        ("time", "padded-fused", "shared", "seconds"),
        ("full logits / gradients in forward: time", "full-logits", "gradients-in-forward", "seconds"),
    ]
    rows = []
    for point, r in results.items():
        if point.model == "V=151,936" and len(point.completion_tokens) == 8:
            cells = [
                f"{target:.1f}x: {times(ratio(r, *names)) or 'not measured'}"
                for target, (_, *names) in zip(TARGETS[point.prompt_tokens], compared, strict=True)
            ]
            rows.append([f"P={point.prompt_tokens}", *cells])
    return markdown(["target: measured", *(title for title, *_ in compared)], rows)


def sharing_table(results: dict[Point, dict[str, Result]]) -> str:
    """Packed without and with shared prompts: time, what the operations come to, tokens, attention and head."""
    header = ["point", "tokens", "shared", "G(1+r)/(G+r)", "predicted", "measured", f"within {CLOSE:.0%}"]
    rows = []
    for point, r in results.items():
        measured = ratio(r, "packed", "shared", "seconds")
        p, c = point.prompt_tokens, point.completion_tokens
        relation, count = p / statistics.mean(c), len(c)
        predicted = work_of(point, shared=False) / work_of(point, shared=True)
        close = "" if measured is None else "yes" if abs(measured / predicted - 1) <= CLOSE else "no"
        tokens = (count * p + sum(c) - count, p + sum(c) - count)
        formula = count * (1 + relation) / (count + relation)
        rows.append([point.name, *(f"{n:,}" for n in tokens), times(formula), times(predicted), times(measured), close])
    return markdown(header, rows)


def work_of(point: Point, *, shared: bool) -> float:
    """Operations of packed rows, with those that are done again in backward."""
    shape = MODELS[point.model]
    return shape.flops(point.prompt_tokens, point.completion_tokens, shared=shared, recomputed=True)


if __name__ == "__main__":
    main()
