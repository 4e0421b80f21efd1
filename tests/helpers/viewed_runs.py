"""Small runs for the page, damaged copies of them, and `cohort view` as a process."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from waiting import PATIENCE_S

STEPS = 6
NUM_HELDOUT = 16
# Each would set `pwned` if the page ever took it for markup or script; then what reorders or hides text
HOSTILE = (
    "<script>window.pwned=1</script>",
    "<img src=x onerror='window.pwned=1'>",
    "</textarea></title></style><svg onload=window.pwned=1>",
    "<a href='javascript:window.pwned=1'>click</a>",
    "\u202egnirts desrever\u2066\u200b\u0000\u001b[31m",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 😀👩‍👩‍👧 \U000e0041",
)
HOSTILE_NAME = "hostile <img src=x onerror=pwned=1>"
HOSTILE_TOKEN = "<img src=x onerror=window.pwned=1>\u202e"
LARGE = 10_000_000  # characters of one completion


# What a run logs of each step, as far as made-up runs need it
MADE_UP_METRICS = (
    *("reward", "reward_std", "frac_reward_zero_std", "entropy", "grad_norm", "loss", "learning_rate", "step_time"),
    *(f"environment/number_{i}" for i in range(40)),
)
MADE_UP_START = 1000.0  # Unix seconds; a step takes two


def start_training(folder: Path, *changes: str, task: str = "words") -> subprocess.Popen[bytes]:
    """Start a small run on a demo's model and problems."""
    from cohort.config import to_yaml
    from cohort.demo.run import demo_config, write_data
    from cohort.demo.tasks import find_task

    config = demo_config(folder, task=find_task(task), seed=0)
    write_data(folder, config, task=find_task(task), seed=0)
    heldout = folder / "data" / "heldout.jsonl"
    heldout.write_text("\n".join(heldout.read_text().splitlines()[:NUM_HELDOUT]) + "\n")
    file = folder.with_name(f"{folder.name}.yaml")
    file.write_text(to_yaml(config))
    sizes = (f"train.steps={STEPS}", "train.prompts_per_step=4", "rollout.num_generations=4", "eval.every=3")
    command = [sys.executable, "-m", "cohort", "train", str(file), *sizes, "run.checkpoint_every=3", *changes]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextmanager
def served(*arguments: object) -> Iterator[str]:
    """The address, with the token, of a page that `cohort view` serves."""
    command = [sys.executable, "-m", "cohort", "view", *map(str, arguments), "--port", "0", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = iter(process.stdout.readline, "")
            yield next(found[0] for line in said if (found := re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", line)))
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE_S)


def run_view(run: str, view: str = "") -> str:
    """Hash of a run's view, such as `run_view("demo", "/steps/3?group=0")`."""
    return f"#/run/{quote(run, safe='')}{view}"


def go(page: Any, address: str, view: str) -> Any:
    """Open a view by its hash and return what it is in."""
    page.goto(address.split("?")[0] + view)
    return page.locator("main")


def fill_with_hostile_text(run: Path) -> None:
    """Put what could harm the page into a run's completions, prompts, names, tokens, metrics and configuration."""
    tokenizer = run / "final" / "tokenizer.json"
    vocabulary = json.loads(tokenizer.read_text())
    hostile_id = len({*vocabulary["model"]["vocab"], *(token["content"] for token in vocabulary["added_tokens"])})
    vocabulary["added_tokens"].append({**vocabulary["added_tokens"][0], "id": hostile_id, "content": HOSTILE_TOKEN})
    tokenizer.write_text(json.dumps(vocabulary))
    for file in sorted((run / "completions").glob("*.parquet")):
        table = pq.read_table(file)
        texts = [HOSTILE[row % len(HOSTILE)] for row in range(table.num_rows)]
        if file.name == f"step-{STEPS:06d}.parquet":
            texts[0] = HOSTILE[0] * (LARGE // len(HOSTILE[0]))
        ids = [[hostile_id, *row[1:]] for row in table["completion_token_ids"].to_pylist()]
        table = _replaced(table, "completion", pa.array(texts))
        table = _replaced(table, "completion_token_ids", pa.array(ids, table.schema.field("completion_token_ids").type))
        table = _replaced(table, "prompt", pa.array([HOSTILE[1] for _ in texts]))
        table = _replaced(table, "answer", pa.array([HOSTILE[4] for _ in texts]))
        table = _replaced(table, "end", pa.array(["<b>unbroken</b>" * 100 for _ in texts]))
        table = table.append_column(f"rewards/{HOSTILE[1]}", pa.array([1.0] * len(texts)))
        pq.write_table(table, file)
    (run / "config.yaml").write_text((run / "config.yaml").read_text() + f"\n# {HOSTILE[0]}\n")
    row = {"step": STEPS, "kind": "train", "reward": 1.0, HOSTILE[1]: 1.0, HOSTILE[4]: 1.0, "loss": float("nan")}
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(row) + "\n")
    with (run / "events.jsonl").open("a") as events:
        for text in (f"warning: {HOSTILE[1]}", f"warning: {HOSTILE[4]}"):
            events.write(json.dumps({"timestamp": 1.0, "step": 1, "event": "warning", "text": text}) + "\n")


def lengthen_first_completion(run: Path, step: int, num_tokens: int) -> None:
    """Repeat the tokens of a step's first completion until there are so many."""
    file = run / "completions" / f"step-{step:06d}.parquet"
    table = pq.read_table(file)
    for name in ("completion_token_ids", "sampling_logprobs"):
        values = table[name].to_pylist()
        values[0] = (values[0] * num_tokens)[:num_tokens]
        table = _replaced(table, name, pa.array(values, table.schema.field(name).type))
    pq.write_table(table, file)
    (run / "tokens" / file.name).unlink()


def break_files(run: Path) -> None:
    """Truncate, spoil and delete files of a run, as a full disk or a power failure would."""
    last = run / "completions" / f"step-{STEPS:06d}.parquet"
    last.write_bytes(last.read_bytes()[:-100])
    metrics = run / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-40] + b'\xff\n{"step": ')
    (run / "plan.json").write_text("{")
    (run / "config.yaml").unlink()
    (run / "completions" / f"eval-{STEPS:06d}.parquet").write_bytes(b"")
    (run / "events.jsonl").write_text('{"event"\n[1]\n')


def write_made_up_run(folder: Path, *, learning_rate: float = 1e-4, steps: int, findings: Sequence[Any] = ()) -> Path:
    """Write a run without completions that has finished, and was started again after half of its steps."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"train:\n  learning_rate: {learning_rate}\n  steps: {steps}\n")
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.write(made_up_line(step))
            if step % 10 == 0:
                accuracy = {"timestamp": MADE_UP_START + 2 * step, "eval/accuracy": step / 50}
                file.write(json.dumps({"step": step, "kind": "eval", **accuracy}) + "\n")
    starts = [{"step": done, "event": "start", "steps_done": done, "steps": steps} for done in (0, steps // 2)]
    health = {"step": steps, "event": "health", "findings": findings}
    with (folder / "events.jsonl").open("w") as file:
        for event in (*starts, health):
            file.write(json.dumps({"timestamp": MADE_UP_START + 2 * event["step"], **event}) + "\n")
    status = {"timestamp": MADE_UP_START + 2 * steps, "phase": "finished", "step": steps, "steps": steps}
    (folder / "status.json").write_text(json.dumps(status))
    return folder


def made_up_line(step: int) -> str:
    """A line of metrics.jsonl. The reward is a hundredth of the step."""
    values = {name: 1.0 + step + place for place, name in enumerate(MADE_UP_METRICS)} | {"reward": step / 100}
    return json.dumps({"step": step, "kind": "train", "timestamp": MADE_UP_START + 2 * step, **values}) + "\n"


def _replaced(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, values)


def steps_done(run: Path) -> int:
    """Steps that a running run has logged."""
    file = run / "metrics.jsonl"
    rows: list[dict[str, Any]] = [json.loads(line) for line in file.open()] if file.exists() else []
    return max((row["step"] for row in rows), default=0)
