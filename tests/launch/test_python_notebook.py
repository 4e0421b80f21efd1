"""A real notebook: training in place, curves, two runs in one kernel, and an interrupted cell."""

import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from runs import metric
from waiting import PATIENCE_S, num_lines, until

pytestmark = pytest.mark.extras

CELLS = {
    "set up": """
import cohort
from cohort.demo.tasks import WORDS

rows = [{"prompt": problem.question, "answer": problem.answer} for problem in WORDS.generate(0, 32, "train")]

def right(completions, answer, **kwargs):
    return [float(text.endswith(f"#### {a}")) + 0.1 * ("####" in text) for text, a in zip(completions, answer)]

def new_trainer(run_dir, steps):
    return cohort.Trainer(
        WORDS.base_path,
        rows,
        [right],
        rollout={"num_generations": 4, "max_completion_tokens": 24},
        train={"steps": steps, "prompts_per_step": 2, "learning_rate": 1e-4},
        run={"dir": run_dir},
    )
""",
    "train": """
trainer = new_trainer("first", 4)
for step in trainer:
    if step.steps_done == 2:
        break
""",
    "go on": "_ = trainer.train()",
    "history": "trainer.history",
    "plot": 'trainer.history.plot("reward")',
    "matplotlib": """
%matplotlib inline
import matplotlib.pyplot as plt

plt.plot(trainer.history["reward"]);
""",
    "again": 'print(new_trainer("second", 4).train().final_dir)',
    "interrupted": """
long = new_trainer("long", 100_000)
long.train()
""",
    "after": """
before = len(long.history)
for step in long:
    break
print(step.steps_done - before, len(long.generate(["Mia has 2 shells."])))
""",
}


def outputs(cell: Any, kind: str) -> list[Any]:
    return [output for output in cell.outputs if output.output_type == kind]


def shown(cell: Any) -> str:
    """The only output that a cell displays, as HTML."""
    (output,) = outputs(cell, "display_data")
    return output.data["text/html"]


@pytest.mark.timeout(300)
def test_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cells = {name: nbformat.v4.new_code_cell(source.strip()) for name, source in CELLS.items()}
    cells["interrupted"].metadata["tags"] = ["raises-exception"]
    notebook = nbformat.v4.new_notebook(cells=list(cells.values()))
    client = nbclient.NotebookClient(notebook, timeout=PATIENCE_S, resources={"metadata": {"path": str(tmp_path)}})

    def interrupt() -> None:
        until(lambda: num_lines(tmp_path / "long" / "metrics.jsonl") >= 3)
        client.km.provisioner.process.send_signal(signal.SIGINT)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    try:
        client.execute()
    finally:
        for number, handler in handlers.items():  # the client leaves its own
            signal.signal(number, handler)
    thread.join()

    assert "<b>step 2 of 4: reward" in shown(cells["train"])
    assert "<b>step 4 of 4: reward" in shown(cells["go on"]), "progress is shown in the cell that trains"
    assert shown(cells["again"]).count("<svg") == 4
    assert outputs(cells["history"], "execute_result")[0].data["text/html"].count("<svg") == 4
    assert outputs(cells["history"], "execute_result")[0].data["text/plain"].startswith("History of 4 steps: reward ")
    assert outputs(cells["plot"], "execute_result")[0].data["text/html"].count("<svg") == 1
    assert "image/png" in outputs(cells["matplotlib"], "display_data")[0].data
    assert outputs(cells["again"], "stream")[-1].text == f"{tmp_path}/second/final\n"
    assert metric(tmp_path / "first", "reward") == metric(tmp_path / "second", "reward")

    (error,) = outputs(cells["interrupted"], "error")
    assert error.ename == "KeyboardInterrupt" and re.fullmatch(r"stopped; .*step-\d+", error.evalue)
    assert re.search(r"stopped by SIGINT after step \d+: saved", shown(cells["interrupted"]))
    assert outputs(cells["after"], "stream")[-1].text == "1 1\n"
