"""What Cohort does on one GPU, in one JSON file; no network, random weights.

    bench/gpu.sh quick|full [--tiny] [--only TEXT ...] [--out FOLDER]

`quick` is meant for less than four minutes: what is fast against what is plain, in values and gradients; a step whose
loss must fall as it does in float64; a short run that learns; a vLLM server that is given weights, samples, sleeps and
wakes; and a training step's memory alongside the plan's. `full` is that and more training steps, whole demos, and the
tables of docs/benchmarks.md that say something about a GPU. Every part runs on its own: one that fails, hangs or runs
out of memory takes no other with it, and all failures are told at the end. What needs a package that is not installed
is left out, and told too. `--tiny` tries all of it on a CPU.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

import gpu_checks
from cohort.errors import UserError
from gpu_rollouts import run_demo, servers, short_run
from gpu_steps import CASES, PUBLISHED, QUICK_CASE, TINY_CASES, Case, run_case
from gpu_tables import TABLES, Table, run_table
from gpu_versions import device, versions
from harness import FailedError, do_job, markdown, run_apart, try_to

Form = Literal["quick", "full"]
Result = dict[str, Any]
FILE = "gpu.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is done by itself.

    `work` returns `checks`, one `step`, numbers that were `measured`, a script's `output`, what was `left_out`: each
    where there is any. It raises `SkippedError` where it needs what is not here.
    """

    name: str
    work: Callable[[torch.device], Result]
    most_s: float = 120.0
    is_script: bool = False  # a process of its own as it is
    may_not_fit: bool = False  # nobody has said that it fits the GPU's memory


def parts_of(form: Form, *, tiny: bool, out: Path) -> list[Part]:
    """What a form consists of.

    Args:
        form: quick or full.
        tiny: with sizes for a CPU.
        out: a folder for files.
    """
    checked = {
        "kernels": gpu_checks.kernels,
        "attention": gpu_checks.attention,
        "token budgets": gpu_checks.budgets,
        "offloaded optimizer": gpu_checks.offload,
        "one step": gpu_checks.one_step,
    }
    quick = [Part(name=name, work=partial(_call, work, tiny), most_s=180.0) for name, work in checked.items()]
    quick.append(_step(TINY_CASES[1] if tiny else QUICK_CASE))
    quick.append(Part(name="local rollouts", work=partial(short_run, engine="local")))
    quick.append(Part(name="vLLM server", work=partial(_call, servers, tiny), most_s=300.0))
    if form == "quick":
        return quick
    cases = TINY_CASES[:1] if tiny else CASES
    steps = [_step(case, trl=trl) for case in cases for trl in ((False, True) if case.trl else (False,))]
    demos = [
        Part(name=f"demo, {engine}", work=partial(_demo, engine=engine, steps=2 if tiny else 50), most_s=600.0)
        for engine in ("local", "vllm")
    ]
    return [*quick, *steps, *demos, *(_table(table, tiny=tiny, out=out) for table in TABLES)]


def _call(work: Callable[[torch.device, bool], Result], tiny: bool, on: torch.device) -> Result:
    return work(on, tiny)


def _step(case: Case, *, trl: bool = False) -> Part:
    name = f"step, {case.name}{', TRL' if trl else ''}"
    return Part(name=name, work=lambda on: run_case(case, on, trl=trl), most_s=300.0, may_not_fit=trl)


def _demo(on: torch.device, *, engine: str, steps: int) -> Result:
    return {"measured": run_demo(on, engine, steps=steps)}


def _table(table: Table, *, tiny: bool, out: Path) -> Part:
    work = partial(run_table, table, tiny=tiny, out=out, timeout_s=900.0)
    return Part(name=table.script, work=lambda on: work(), is_script=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts of a form; 1 where one has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("form", choices=["quick", "full"])
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="parts whose names have one of these in them")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help=f"folder for {FILE}")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    parts = parts_of(args.form, tiny=args.tiny, out=args.out)
    on = torch.device("cpu" if args.tiny else "cuda")
    if args.job:
        (part,) = (part for part in parts if part.name == json.loads(args.job)["part"])
        do_job(lambda _: _work_apart(part, on), args.job)
        return 0
    if not args.tiny and not torch.cuda.is_available():
        raise SystemExit("no CUDA device; --tiny tries all of it on a CPU")
    chosen = [part for part in parts if not args.only or any(text in part.name for text in args.only)]
    if not chosen:
        parser.error(f"--only: no part has such a name; there are {', '.join(part.name for part in parts)}")
    # a CPU has no errors that stay with a process, and little time
    return run_parts(chosen, args.form, on, out=args.out, apart=not args.tiny)


def _work_apart(part: Part, on: torch.device) -> Result:
    torch.set_num_threads(min(8, os.cpu_count() or 1))  # for the comparisons in float64
    result = part.work(on)
    return result | ({"peak_bytes": torch.cuda.max_memory_allocated()} if on.type == "cuda" else {})


def run_parts(parts: Sequence[Part], form: Form, on: torch.device, *, out: Path, apart: bool) -> int:
    """Run parts one after the other, and write what they have found after each.

    Args:
        parts: to run.
        form: that they are of.
        on: a GPU, or the CPU.
        out: folder for the file.
        apart: each in a process of its own.

    Returns:
        1 where one has failed, else 0.
    """
    begun = time.monotonic()
    found: dict[str, Any] = {"form": form, "tiny": on.type == "cpu", "versions": versions(), "device": device()}
    found["parts"] = []
    out.mkdir(parents=True, exist_ok=True)
    print(f"{found['device']['name']}: " + ", ".join(f"{k} {v or '-'}" for k, v in found["versions"].items()))
    for part in parts:
        result = run_part(part, form, on, apart=apart)
        print(f"{result['status']:9}{result['seconds']:7.1f} s  {part.name}", flush=True)
        found["parts"].append(result)
        found["seconds"] = time.monotonic() - begun
        found["failures"] = [line for result in found["parts"] for line in failures_of(result)]
        found["left_out"] = [line for result in found["parts"] for line in left_out_of(result)]
        (out / FILE).write_text(json.dumps(found, indent=1))
    print("\n" + summary(found) + f"\n\n{found['seconds']:.0f} s; {out / FILE}")
    return 1 if found["failures"] else 0


def run_part(part: Part, form: Form, on: torch.device, *, apart: bool) -> Result:
    """The outcome of a part, whatever becomes of it: passed, failed or left out."""
    start = time.monotonic()
    arguments = [form, *(["--tiny"] if on.type == "cpu" else [])]
    try:
        result = (
            run_apart(__file__, {"part": part.name}, arguments=arguments, timeout_s=part.most_s)
            if apart and not part.is_script
            else try_to(lambda: part.work(on))
        )
    except (FailedError, UserError) as error:
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
    steps = [result["step"] for result in found["parts"] if "step" in result]
    texts += [steps_table(steps)] if steps else []
    measured = {result["name"]: result["measured"] for result in found["parts"] if "measured" in result}
    texts += [f"{name}\n" + "\n".join(f"  {k}: {v}" for k, v in values.items()) for name, values in measured.items()]
    texts += [f"## {result['name']}\n\n{result['output']}" for result in found["parts"] if "output" in result]
    texts += ["Left out:\n" + "\n".join(f"- {line}" for line in found["left_out"])] if found["left_out"] else []
    failures = "\n".join(f"- {line}" for line in found["failures"])
    return "\n\n".join([*texts, f"FAILED:\n{failures}" if failures else "Nothing failed."])


def steps_table(steps: Sequence[Result]) -> str:
    """Training steps, alongside what others have published."""
    rows = []
    for step in steps:
        name = f"{step['name']}: {step['method']}, {step['layout']}"
        name += "" if step["updates"] else ", without the optimizer: its state does not fit"
        mfu = "" if step["mfu"] is None else f"{step['mfu']:.1%}"
        peak, planned = (_gibibytes(step[key]) for key in ("peak_bytes", "planned_bytes"))
        if peak and planned:
            planned += f" ({step['planned_bytes'] / step['peak_bytes']:.2f} x)"
        rows.append([name, f"{step['tokens_per_s']:,.0f}", mfu, peak, planned, f"{step['seconds']:.2f}"])
    rows += [[*row, "", ""] for row in PUBLISHED]
    return markdown(["training step", "tokens/s", "MFU", "peak GiB", "planned GiB", "seconds"], rows)


def _gibibytes(size: int | None) -> str:
    return "" if size is None else f"{size / 2**30:.1f}"


if __name__ == "__main__":
    sys.exit(main())
