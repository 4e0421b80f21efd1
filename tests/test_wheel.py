"""The wheel: complete, typed, and the demo runs from it where the source is not."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

import cohort
from pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# as `python -m build --no-isolation`: the wheel is made from the sdist
BUILD = """
import os, pathlib, sys, tarfile
from setuptools import build_meta

out = sys.argv[1]
with tarfile.open(os.path.join(out, build_meta.build_sdist(out))) as sdist:
    sdist.extractall(out, filter="data")
os.chdir(next(path.parent for path in pathlib.Path(out).glob("*/pyproject.toml")))
build_meta.build_wheel(out)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    copied = tmp_path_factory.mktemp("source")  # a build leaves files in the folder
    for name in ("src", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "MANIFEST.in"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(copied)], check=True)
    subprocess.run(["rm", "-rf", *map(str, copied.rglob("*.egg-info"))], check=True)
    run(sys.executable, "-c", BUILD, str(out), cwd=copied)
    (found,) = out.glob("*.whl")
    return found


def run(*command: str, cwd: Path, code: int = 0) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env={**clean, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow("`cohort demo` runs from the source")
def test_the_wheel_has_every_file_of_the_packages(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.parent.name.endswith(".egg-info")
    }
    assert "cohort/py.typed" in files and "cohort_view/static/index.html" in files
    assert sorted(files - names) == []
    assert {name for name in names - files if ".dist-info/" not in name} == set()
    assert wheel.name.startswith(f"cohort_rl-{PROJECT['version']}-py3-none-any")
    assert cohort.__version__ == PROJECT["version"]


@pytest.mark.slow("`cohort demo` runs from the source")
def test_the_demo_runs_from_the_wheel(wheel: Path, tmp_path: Path):
    """In an environment that sees the packages that Cohort needs, but not its source."""
    run(sys.executable, "-m", "venv", "env", cwd=tmp_path)
    python, command = str(tmp_path / "env" / "bin" / "python"), str(tmp_path / "env" / "bin" / "cohort")
    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(wheel), cwd=tmp_path)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (site / "needed.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")  # its own .pth files are not followed
    where = run(python, "-c", "import cohort, cohort_check, cohort_view; print(cohort_view.__file__)", cwd=tmp_path)
    assert where.startswith(str(site))
    assert "Accuracy 19.9% before, " in run(command, "demo", "--out", "runs", cwd=tmp_path)
    run(command, "init", "first", cwd=tmp_path)
    run(command, "train", "first/run.yaml", "train.steps=1", cwd=tmp_path)
    assert "prompts" in run(command, "plan", "--model", "qwen2.5-0.5b", "--gpus", "1", "--gpu", "h100", cwd=tmp_path)
    run(command, "view", "runs/math", "--export", "page.html", cwd=tmp_path)
    assert (tmp_path / "page.html").stat().st_size > 100_000
