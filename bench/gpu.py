"""What Cohort does on one GPU, in one JSON file; no network, random weights.

    bench/gpu.sh quick|full [--tiny] [--within SECONDS] [--rest] [--only TEXT ...] [--out FOLDER]

`quick`: what is fast against what is plain, in values and gradients; a step whose loss must fall as it does in float64;
sharding, process groups and shared memory as far as one GPU has them; a short run that learns; a vLLM server that is
given weights, samples, sleeps and wakes; what the GPU reaches at best; and a training step's memory alongside the
plan's. `full` is that and more training steps, one of them profiled, QLoRA, offload, out of memory, whole demos, and
the tables of docs/benchmarks.md that say something about a GPU. Every part runs on its own: one that fails, hangs or
runs out of memory takes no other with it, and all failures are told at the end. What needs a package that is not
installed is left out, and told too. `--tiny` tries all of it on a CPU.

The file keeps what earlier calls have found; a part that is run again replaces its result. With `--within` no part is
started that is not likely to end in time, and one that takes longer is ended. `--rest` runs only what has no result
yet. gpu.tar has all files of the folder.
"""

import argparse
import json
import math
import os
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

import gpu_checks
import gpu_memory
import gpu_speed
import gpu_weights
from cohort.errors import UserError
from gpu_rollouts import run_demo, servers, short_run
from gpu_steps import (
    CASES,
    OFFLOAD_CASES,
    PROFILED_CASE,
    PUBLISHED,
    QLORA_CASE,
    QUICK_CASE,
    TINY_CASES,
    TINY_OFFLOAD_CASES,
    TINY_QLORA_CASE,
    Case,
    profiled,
    run_case,
)
from gpu_tables import TABLES, Table, run_table
from gpu_versions import device, versions
from harness import FailedError, do_job, markdown, run_apart, try_to

Form = Literal["quick", "full"]
Result = dict[str, Any]
FILE, ARCHIVE = "gpu.json", "gpu.tar"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is done by itself.

    `work` returns `checks`, one `step`, numbers that were `measured`, a script's `output`, what was `left_out`: each
    where there is any. It raises `SkippedError` where it needs what is not here. Its argument is the device; a script's
    are the device and the seconds that it may take.
    """

    name: str
    work: Callable[..., Result]
    about_s: float = 30.0  # an estimate for a GPU: with less time left it is not started
    most_s: float = 180.0
    is_script: bool = False  # a process of its own as it is
    may_not_fit: bool = False  # nobody has said that it fits the GPU's memory


def parts_of(form: Form, *, tiny: bool, out: Path) -> list[Part]:
    """What a form consists of.

    Args:
        form: quick or full.
        tiny: with sizes for a CPU.
        out: a folder for files.
    """
    quick = [
        _part("kernels", gpu_checks.kernels, tiny),
        _part("attention", gpu_checks.attention, tiny),
        _part("token budgets", gpu_checks.budgets, tiny),
        _part("offloaded optimizer", gpu_checks.offload, tiny),
        _part("one step", gpu_checks.one_step, tiny),
        _part("sharding", gpu_checks.sharding, tiny),
        _part("Triton compilations", gpu_checks.compilations, tiny),
        _part("process group", gpu_weights.process_group, tiny),
        _part("expandable segments", gpu_memory.segments, tiny),
        _part("weights to another process", gpu_weights.other_process, tiny),
        _part("ceilings", gpu_speed.ceilings, tiny),
        _step(TINY_CASES[1] if tiny else QUICK_CASE),
        Part(name="local rollouts", work=partial(short_run, engine="local")),
        _part("vLLM server", servers, tiny, about_s=120.0, most_s=300.0),
    ]
    if form == "quick":
        return quick
    cases = TINY_CASES[:1] if tiny else CASES
    steps = [_step(case, trl=trl) for case in cases for trl in ((False, True) if case.trl else (False,))]
    steps.append(_part("profile", partial(profiled, TINY_CASES[0] if tiny else PROFILED_CASE), tiny))
    more = [
        _step(TINY_QLORA_CASE if tiny else QLORA_CASE, kind="QLoRA"),
        _part("out of memory", gpu_memory.out_of_memory, tiny),
        _part("head", gpu_speed.head, tiny),
        _part("sampling", gpu_speed.sampling, tiny),
        *(_step(case, kind="offload") for case in (TINY_OFFLOAD_CASES if tiny else OFFLOAD_CASES)),
    ]
    demos = [
        Part(name=f"demo, {engine}", work=partial(_demo, engine=engine, steps=2 if tiny else 50), about_s=90.0,
             most_s=600.0)
        for engine in ("local", "vllm")
    ]  # fmt: skip
    return [*quick, *steps, *more, *(_table(table, tiny=tiny, out=out) for table in TABLES), *demos]


def _part(name: str, work: Callable[[torch.device, bool], Result], tiny: bool, **options: Any) -> Part:
    return Part(name=name, work=partial(_call, work, tiny), **options)


def _call(work: Callable[[torch.device, bool], Result], tiny: bool, on: torch.device) -> Result:
    return work(on, tiny)


def _step(case: Case, *, kind: str = "step", trl: bool = False) -> Part:
    name = f"{kind}, {case.name}{', TRL' if trl else ''}"
    return Part(name=name, work=lambda on: run_case(case, on, trl=trl), about_s=40.0, most_s=300.0, may_not_fit=trl)


def _demo(on: torch.device, *, engine: str, steps: int) -> Result:
    return {"measured": run_demo(on, engine, steps=steps)}


def _table(table: Table, *, tiny: bool, out: Path) -> Part:
    def work(_: torch.device, timeout_s: float) -> Result:
        return run_table(table, tiny=tiny, out=out, timeout_s=timeout_s)

    return Part(name=table.name, work=work, about_s=table.about_s, most_s=900.0, is_script=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts of a form; 1 where one has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("form", choices=["quick", "full"])
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="parts whose names have one of these in them")
    parser.add_argument("--rest", action="store_true", help="only parts that have no result in the folder yet")
    parser.add_argument("--within", type=float, metavar="SECONDS", help="start nothing that cannot end by then")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help=f"folder for {FILE} and {ARCHIVE}")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    parts = parts_of(args.form, tiny=args.tiny, out=args.out)
    on = torch.device("cpu") if args.tiny else torch.device("cuda", 0)
    if args.job:
        (part,) = (part for part in parts if part.name == json.loads(args.job)["part"])
        do_job(lambda _: _work_apart(part, on), args.job)
        sys.stdout.flush()
        os._exit(0)  # a thread that hangs in NCCL would keep the process
    if not args.tiny and not torch.cuda.is_available():
        raise SystemExit("no CUDA device; --tiny tries all of it on a CPU")
    chosen = [part for part in parts if not args.only or any(text in part.name for text in args.only)]
    if not chosen:
        parser.error(f"--only: no part has such a name; there are {', '.join(part.name for part in parts)}")
    if args.rest:
        done = {r["name"] for r in earlier(args.out, tiny=args.tiny).get("parts", ()) if "not_started" not in r}
        chosen = [part for part in chosen if part.name not in done]
    # a CPU has no errors that stay with a process, and little time
    return run_parts(chosen, args.form, on, out=args.out, apart=not args.tiny, within_s=args.within)


def _work_apart(part: Part, on: torch.device) -> Result:
    torch.set_num_threads(min(8, os.cpu_count() or 1))  # for the comparisons in float64
    if on.type == "cpu":
        return part.work(on)
    before = gpu_memory.begin(on)
    return part.work(on) | {"memory": before | gpu_memory.peaks(on)}


def earlier(out: Path, *, tiny: bool) -> Result:
    """What earlier calls have written into the folder; nothing if there were none.

    Raises:
        SystemExit: they were of the other size.
    """
    file = out / FILE
    found: Result = json.loads(file.read_text()) if file.exists() else {}
    if found and found["tiny"] != tiny:
        raise SystemExit(f"{file} is {'' if found['tiny'] else 'not '}of --tiny; use another folder (OUT=...)")
    return found


def run_parts(
    parts: Sequence[Part], form: Form, on: torch.device, *, out: Path, apart: bool, within_s: float | None = None
) -> int:
    """Run parts one after the other, and write what they have found after each, with what earlier calls have.

    Args:
        parts: to run.
        form: that they are of.
        on: a GPU, or the CPU.
        out: folder for the file.
        apart: each in a process of its own.
        within_s: no part is started that is not likely to end by then.

    Returns:
        1 where one has failed, else 0.
    """
    begun = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    found = earlier(out, tiny=on.type == "cpu")
    call: Result = {"form": form, "versions": versions(), "device": device()}
    calls = [*found.get("calls", ()), call]
    results: dict[str, Result] = {result["name"]: result for result in found.get("parts", ())}
    print(f"{call['device']['name']}: " + ", ".join(f"{k} {v or '-'}" for k, v in call["versions"].items()))
    failed = False
    for part in parts:
        left_s = math.inf if within_s is None else within_s - (time.monotonic() - begun)
        result = run_part(part, form, on, apart=apart, left_s=left_s, before=results.get(part.name))
        print(f"{result['status']:9}{result['seconds']:7.1f} s  {part.name}", flush=True)
        if part.name not in results or "not_started" not in result:
            results[part.name] = {**result, "call": len(calls)}
        failed |= result["status"] == "failed"
        call["seconds"] = time.monotonic() - begun
        found = {"tiny": on.type == "cpu", **call, "calls": calls, "parts": [*results.values()]}
        found["failures"] = [line for result in results.values() for line in failures_of(result)]
        found["left_out"] = [line for result in results.values() for line in left_out_of(result)]
        (out / FILE).write_text(json.dumps(found, indent=1))
    if not parts:
        print("every part has a result")
        return 0
    print("\n" + summary(found) + f"\n\n{found['seconds']:.0f} s; {out / FILE}")
    pack(out)
    return int(failed)


def pack(out: Path) -> None:
    """Put all files of the folder into one archive."""
    with tarfile.open(out / ARCHIVE, "w") as archive:
        for file in sorted(path for path in out.rglob("*") if path.is_file() and path != out / ARCHIVE):
            archive.add(file, file.relative_to(out))


def run_part(
    part: Part, form: Form, on: torch.device, *, apart: bool, left_s: float = math.inf, before: Result | None = None
) -> Result:
    """The outcome of a part, whatever becomes of it: passed, failed or left out.

    Args:
        part: to run.
        form: that it is of.
        on: a GPU, or the CPU.
        apart: in a process of its own.
        left_s: the seconds that are left.
        before: its result in an earlier call, which says how long it takes.
    """
    about_s = before["seconds"] if before and before["status"] == "passed" else part.about_s
    if left_s < about_s:
        why = f"not started: {max(0.0, left_s):.0f} s were left, and it takes about {about_s:.0f} s"
        return {"name": part.name, "status": "left out", "seconds": 0.0, "skipped": why, "not_started": True}
    start, most_s = time.monotonic(), min(part.most_s, left_s)
    arguments = [form, *(["--tiny"] if on.type == "cpu" else [])]
    try:
        if part.is_script:
            result = try_to(lambda: part.work(on, most_s))
        elif apart:
            result = run_apart(__file__, {"part": part.name}, arguments=arguments, timeout_s=most_s)
        else:
            result = try_to(lambda: part.work(on))
    except FailedError as error:
        result = {"failed": str(error)} | ({"output": error.output} if error.output else {})
    except UserError as error:
        result = {"failed": str(error)}
    except Exception:  # the other parts are run whatever it is
        result = {"failed": traceback.format_exc(limit=-8)}
    if result.pop("out_of_memory", False) and not part.may_not_fit:
        result["failed"] = result.pop("skipped")
    failed = "failed" in result or not all(check["passed"] for check in result.get("checks", ()))
    status = "failed" if failed else "left out" if "skipped" in result else "passed"
    return {"name": part.name, "status": status, "seconds": time.monotonic() - start, **result}


def failures_of(result: Result) -> list[str]:
    """What a part has failed at."""
    lines = [f"{result['name']}: {result['failed'].strip()}"] if "failed" in result else []
    for check in result.get("checks", ()):
        if not check["passed"]:
            error = check["note"] if check["error"] is None else f"{check['error']:.2g}, at most {check['limit']:.2g}"
            lines.append(f"{result['name']}: {check['name']}: {error}")
    return lines


def left_out_of(result: Result) -> list[str]:
    """What a part has left out, and why."""
    skipped = [f"{result['name']}: {result['skipped']}"] if "skipped" in result else []
    checks = [check for check in result.get("checks", ()) if check["left_out"]]
    skipped += [f"{result['name']}: {check['name']}: {check['note']}" for check in checks]
    return skipped + [f"{result['name']}: {line}" for line in result.get("left_out", ())]


def summary(found: Result) -> str:
    """For a person: errors, times and memory, what scripts have printed, what was left out, and what failed."""
    checks = [check for result in found["parts"] for check in result.get("checks", ()) if check["error"] is not None]
    rows = [
        [check["name"], f"{check['error']:.1e}", f"{check['limit']:.1e}", "passed" if check["passed"] else "**FAILED**"]
        for check in checks
    ]
    texts = [markdown(["check", "error", "limit", ""], rows)] if rows else []
    steps = [result for result in found["parts"] if "step" in result]
    texts += [steps_table(steps)] if steps else []
    measured = {result["name"]: result["measured"] for result in found["parts"] if "measured" in result}
    texts += [f"{name}\n" + "\n".join(f"  {k}: {v}" for k, v in values.items()) for name, values in measured.items()]
    texts += [f"## {result['name']}\n\n{result['output']}" for result in found["parts"] if "output" in result]
    texts += ["Left out:\n" + "\n".join(f"- {line}" for line in found["left_out"])] if found["left_out"] else []
    failures = "\n".join(f"- {line}" for line in found["failures"])
    return "\n\n".join([*texts, f"FAILED:\n{failures}" if failures else "Nothing failed."])


def steps_table(results: Sequence[Result]) -> str:
    """Training steps, alongside what others have published."""
    rows = []
    for step, memory in ((result["step"], result.get("memory", {})) for result in results):
        name = f"{step['name']}: {step['method']}, {step['layout']}"
        name += "" if step["updates"] else ", without the optimizer: its state does not fit"
        mfu = "" if step["mfu"] is None else f"{step['mfu']:.1%}"
        peak, planned = (_gibibytes(step[key]) for key in ("peak_bytes", "planned_bytes"))
        if peak and planned:
            planned += f" ({step['planned_bytes'] / step['peak_bytes']:.2f} x)"
        sizes = [peak, planned, *(_gibibytes(memory.get(key)) for key in ("reserved_bytes", "used_bytes"))]
        moved = "" if not step["moved_bytes"] else f"{step['moved_bytes'] / step['seconds'] / 1e9:.1f}"
        rows.append([name, f"{step['tokens_per_s']:,.0f}", mfu, *sizes, f"{step['seconds']:.2f}", moved])
    rows += [[*row, "", "", "", "", ""] for row in PUBLISHED]
    header = ["training step", "tokens/s", "MFU", "peak GiB", "planned GiB", "reserved GiB", "driver GiB", "seconds"]
    return markdown([*header, "offload GB/s"], rows)


def _gibibytes(size: int | None) -> str:
    return "" if size is None else f"{size / 2**30:.1f}"


if __name__ == "__main__":
    sys.exit(main())
