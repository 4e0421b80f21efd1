"""What `bench/gpu.sh` says is missing before it measures anything, and the wheels that it collects."""

import importlib.metadata
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy
import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

import gpu_packages
from gpu_packages import check, collect, read_versions, unmet

ENVIRONMENT = {**default_environment(), "sys_platform": "linux", "extra": ""}
METADATA = "Metadata-Version: 2.1\nName: {}\nVersion: {}\n"


def needs_of(needs: Mapping[str, list[str]]) -> Callable[[str], list[Requirement]]:
    return lambda name: [Requirement(text) for text in needs.get(name, ())]


def test_requirements_of_what_is_there_are_followed():
    have = {"a": "2.0", "b": "1.0", "d": "", "torch": "2.11.0+cu130", "e": "1.0"}
    needs = needs_of(
        {
            "a": ["b>=1.5", "c", "windows-only; sys_platform == 'win32'", "d>=7"],
            "torch": ["nvidia-something==1"],  # as it was built
            "e": ["f; extra == 'more'", "g; extra == 'others'"],
        }
    )
    found = unmet(map(Requirement, ["a>=1", "torch>=2.11", "e[more]", "h"]), have, needs, ENVIRONMENT)
    assert {name: [str(r) for r in requirements] for name, requirements in found.items()} == {
        "h": ["h"],
        "b": ["b>=1.5"],
        "c": ["c"],
        "f": ["f"],
    }


def test_everything_that_is_missing_is_in_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(gpu_packages, "COMPARED", ("no-such-trainer>=3",))
    check()
    assert capsys.readouterr().out == "not compared with: no-such-trainer>=3 is missing\n"
    wanted = [Requirement(text) for text in ("no-such-package>=1.5", "torch>=99", "numpy>=1", "nor-this")]
    monkeypatch.setattr(gpu_packages, "required", lambda: wanted)
    with pytest.raises(SystemExit) as error:
        check()
    message = str(error.value)
    assert "  no-such-package>=1.5 is missing\n" in message and "  nor-this is missing\n" in message
    assert " is here, but must be >=99\n" in message and "numpy" not in message


def test_a_version_that_only_another_package_refuses_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """An image's own packages may disagree and work."""
    monkeypatch.setattr(gpu_packages, "COMPARED", ())
    monkeypatch.setattr(gpu_packages, "required", lambda: [Requirement("rich")])
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["numpy>=99"] if name == "rich" else [])
    check()
    assert capsys.readouterr().out == f"may not work: numpy {numpy.__version__} is here, but must be >=99\n"


def make_wheel(folder: Path, name: str, version: str, needs: list[str], files: Mapping[str, str] | None = None) -> Path:
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    contents = dict(files or {f"{name}.py": ""})
    contents[f"{info}/METADATA"] = METADATA.format(name, version) + "".join(f"Requires-Dist: {n}\n" for n in needs)
    contents[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in contents)
    with zipfile.ZipFile(wheel, "w") as archive:
        for file, content in contents.items():
            archive.writestr(file, content)
    return wheel


def test_wheels_are_collected_until_nothing_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    index = {"a": ("2.0", ["b>=1", "c", "d; python_version < '3.12'"]), "b": ("1.1", ["a"]), "e": ("1.0", ["f"])}
    asked: list[list[str]] = []

    def download(texts: list[str], folder: Path, **_: str) -> None:
        asked.append(texts)
        for name in (Requirement(text).name for text in texts):
            make_wheel(folder, name, *index[name])

    monkeypatch.setattr(gpu_packages, "_download", download)
    monkeypatch.setattr(gpu_packages, "COMPARED", ())
    monkeypatch.setattr(gpu_packages, "required", lambda: [Requirement("a>=1"), Requirement("f"), Requirement("e")])
    options = {"python": "3.12", "platform": "x86_64", "cuda": "130"}
    found = collect(tmp_path / "new", {"c": "", "e": "1.0", "f": "0.1"}, **options)
    assert [wheel.name.partition("-")[0] for wheel in found] == ["a", "b"]
    assert asked == [["a>=1"], ["b>=1"]]  # not c, e and f, which are there
    with pytest.raises(SystemExit, match="has wheels already; give a new folder"):
        collect(tmp_path / "new", {}, **options)


def test_bitsandbytes_keeps_one_library(tmp_path: Path):
    names = ["libbitsandbytes_cpu.so", "libbitsandbytes_cuda129.so", "libbitsandbytes_cuda130.so"]
    files = {f"bitsandbytes/{name}": name for name in names} | {"bitsandbytes/__init__.py": "code"}
    wheel = make_wheel(tmp_path, "bitsandbytes", "0.50.2", [], files)
    with pytest.raises(SystemExit, match=r"--cuda: .* has no libbitsandbytes_cuda128.so"):
        gpu_packages._keep_one_library(wheel, "libbitsandbytes_cuda128.so")
    gpu_packages._keep_one_library(wheel, "libbitsandbytes_cuda130.so")
    with zipfile.ZipFile(wheel) as archive:
        kept = {name for name in archive.namelist() if not name.startswith("bitsandbytes-")}
        record = archive.read("bitsandbytes-0.50.2.dist-info/RECORD").decode()
        assert archive.read("bitsandbytes/__init__.py") == b"code"
    assert kept == {"bitsandbytes/__init__.py", *(f"bitsandbytes/{names[n]}" for n in (0, 2))}
    assert "cuda130" in record and "cuda129" not in record


def test_versions_are_read_as_pip_prints_them(tmp_path: Path):
    file = tmp_path / "have.txt"
    file.write_text("# a comment\ntorch==2.11.0+cu130\nTyping_Extensions==4.16.0\nmine @ file:///there\n-e .\nnumpy\n")
    expected = {"torch": "2.11.0+cu130", "typing-extensions": "4.16.0", "mine": "", "numpy": ""}
    assert read_versions(file) == expected
