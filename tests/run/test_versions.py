"""Versions that are newer than any that was tested are named, and never refused."""

import tomllib
from pathlib import Path

import pytest

from cohort.run.provenance import TESTED, newer_than_tested, release, untested_versions
from commands import assert_refused, set_up

PROJECT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "version", "note"),
    [
        ("transformers", "5.26.0", "transformers 5.26.0 is newer than 5.24.0, which Cohort was tested with"),
        ("transformers", "6.0.0.dev0", "transformers 6.0.0.dev0 is newer than 5.24.0, which Cohort was tested with"),
        ("transformers", "5.24.7", None),  # a patch release
        ("transformers", "5.9.0", None),
        ("torch", "2.15.0+cu130", None),
        ("torch", "2.16.1+cu130", "torch 2.16.1+cu130 is newer than 2.15.0, which Cohort was tested with"),
        ("python", "3.14.8", None),
        ("python", "3.15.0", "Python 3.15.0 is newer than 3.14, which Cohort was tested with"),
        ("vllm", "0.35.1", "vLLM 0.35.1 is newer than 0.32.0, which Cohort was tested with"),
    ],
)
def test_a_newer_version_is_named(monkeypatch, name, version, note):
    newest = {"python": "3.14", "torch": "2.15.0", "transformers": "5.24.0", "vllm": "0.32.0"}[name]
    monkeypatch.setitem(TESTED, name, ("0.1", newest))
    assert newer_than_tested(name, version) == note


def test_a_run_names_it_at_the_start_and_with_an_error(tmp_path, cohort, monkeypatch):
    config = set_up(tmp_path)
    assert untested_versions() == []
    monkeypatch.setitem(TESTED, "transformers", ("5.0.0", "5.1.0"))
    [note] = untested_versions()
    ended = cohort("train", config)
    assert (ended.code, ended.out.count(note)) == (0, 1)
    ended = cohort("train", config, f"run.dir={tmp_path / 'other'}", "model.path=no/such/model")
    assert_refused(ended, "no/such/model", note)


def pins(name: str) -> dict[str, str]:
    lines = (PROJECT / name).read_text().splitlines()
    return dict(line.lower().split("==") for line in lines if "==" in line and not line.startswith("#"))


def test_the_pinned_versions_are_the_newest_that_were_tested():
    newest = pins("constraints.txt")
    assert release(newest["transformers"]) == release(TESTED["transformers"][1])
    assert release(TESTED["torch"][0]) <= release(newest["torch"]) <= release(TESTED["torch"][1])
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={TESTED['python'][0]}"


def test_the_oldest_pins_are_the_lower_bounds_of_the_project():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    of_judges = project["optional-dependencies"]["judge"]
    bounds = dict(dependency.split(">=") for dependency in [*project["dependencies"], *of_judges])
    oldest = pins("constraints-oldest.txt")
    assert bounds.keys() == oldest.keys()
    for name, version in oldest.items():
        if name != "torch":
            assert (version + ".0").startswith(bounds[name] + "."), (name, version, bounds[name])
    for name in ("torch", "transformers"):
        assert release(bounds[name]) == release(TESTED[name][0])
