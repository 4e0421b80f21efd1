"""The recipe of CONTRIBUTING.md: a copy of Cohort with one folder more and an entry in two tables trains with it."""

import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

import cohort
import stub_engine
from runs import changed, make_inputs, metric
from selection import slow
from stub_engine.config import StubRolloutConfig

PROJECT = Path(__file__).parents[3]
# Tables of the recipe: in which file, before what, and the text that is added.
ENTRIES = {
    "rollout/engines/__init__.py": ('    "vllm": "', '    "stub": "cohort.rollout.engines.stub.setup:StubSetup",\n'),
    "config/rollout.py": ("RolloutConfig = Annotated[", f"{inspect.getsource(StubRolloutConfig)}\n\n"),
}
UNION = ("| VllmRolloutConfig, Field", "| VllmRolloutConfig | StubRolloutConfig, Field")


def with_the_stub_engine(folder: Path) -> Path:
    """Make a copy of the package that has the engine, and return the path to import it from."""
    package = folder / "copy" / "cohort"
    shutil.copytree(Path(cohort.__file__).parent, package, ignore=shutil.ignore_patterns("*.pyc.*"))  # half-written
    shutil.copytree(Path(stub_engine.__file__).parent, package / "rollout/engines/stub")
    for name, (before, entry) in ENTRIES.items():
        text = (package / name).read_text(encoding="utf-8")
        assert text.count(before) == 1
        text = text.replace(before, entry + before).replace(*UNION)
        (package / name).write_text(text, encoding="utf-8")
    return package.parent


@slow("the recipe names the files that it changes")
def test_an_engine_is_a_folder_and_its_entries(tmp_path: Path):
    rollout = {"engine": "stub", "servers": 2, "parity_tolerance": 100.0}
    run = changed(make_inputs(tmp_path), rollout=rollout, train={"steps": 2}, hardware={"device": "cpu"})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    path = os.pathsep.join(map(str, (with_the_stub_engine(tmp_path), *sys.path)))

    trained = subprocess.run(
        [sys.executable, "-m", "cohort", "train", "run.yaml"],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert trained.returncode == 0, trained.stderr
    said = trained.stdout + trained.stderr
    assert "starting 2 stub servers" in said and "parity: the servers' logprobs match" in said
    assert "engine: stub\n" in (tmp_path / "run/config.yaml").read_text()
    assert len(metric(tmp_path / "run", "rewards/digit/mean")) == 2


def test_the_recipe_names_the_files():
    recipe = (PROJECT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("**A rollout engine.**")[2]
    for name in ENTRIES:
        assert f"src/cohort/{name}" in recipe.partition("**An attention backend.**")[0]
