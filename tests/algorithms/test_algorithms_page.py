"""`cohort algorithms`, docs/algorithms.md and the README's table: all made from the catalogue."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from algorithm_tables import with_tables
from cohort.cli.app import app
from cohort.config import ALGORITHMS, COMPONENTS, AlgorithmConfig

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["docs/algorithms.md", "README.md"])
def test_the_tables_are_up_to_date(name: str):
    page = (ROOT / name).read_text(encoding="utf-8")
    assert page == with_tables(page), "run `make docs`"
    broken = page.replace("| `dapo` |", "| `dopa` |").replace("| `gmpo` |", "")
    assert broken != page and with_tables(broken) == page


def test_every_algorithm_and_component_is_on_the_page():
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    for name in [*ALGORITHMS, *(name for known in COMPONENTS.values() for name in known)]:
        assert f"| `{name}` |" in page


def test_the_list_names_each_with_its_parts_and_paper():
    result = CliRunner().invoke(app, ["algorithms"])
    assert result.exit_code == 0
    for name, algorithm in ALGORITHMS.items():
        assert f"\n{name} " in "\n" + result.output
        assert f"{algorithm.when}  ({algorithm.source})\n" in result.output
        for kind, known in COMPONENTS.items():
            assert f" {getattr(algorithm, kind)}: {known[getattr(algorithm, kind)].formula}" in result.output
    assert "  [clip_low: 0.2, clip_high: 0.28, delta: null]\n" in result.output
    assert result.output.endswith("docs/algorithm-terms.md\n") and (ROOT / "docs" / "algorithm-terms.md").exists()


def test_one_algorithm_with_formulas_and_its_own_defaults():
    output = CliRunner().invoke(app, ["algorithms", "dapo"]).output
    assert COMPONENTS["policy_loss"]["clipped"].formula in output
    assert "    clip_high: 0.28\n        Upper clip of the ratio" in output and "    delta: null\n" in output


def test_one_component_with_its_formula_and_defaults():
    output = CliRunner().invoke(app, ["algorithms", "max_at_k"]).output
    assert output.startswith("advantage: max_at_k  (arXiv:2505.15201)\n    G * mean over sets")
    assert "\n    at_k: 4\n        k of the max@k objective" in output
    assert output.endswith(" (at least 2)\n\nalgorithm: {advantage: max_at_k}\n")
    found = json.loads(CliRunner().invoke(app, ["algorithms", "token_mean", "--json"]).output)
    assert found["kind"] == "loss_weight" and found["formula"] == COMPONENTS["loss_weight"]["token_mean"].formula


def test_json_is_what_a_configuration_of_that_name_has():
    for name, found in ((f["name"], f) for f in json.loads(CliRunner().invoke(app, ["algorithms", "--json"]).output)):
        assert found == json.loads(CliRunner().invoke(app, ["algorithms", name, "--json"]).output)
        config = AlgorithmConfig(name=name)
        assert found["min_generations"] == config.min_generations
        for kind in COMPONENTS:
            assert found[kind]["name"] == getattr(config, kind)
            for key, value in found[kind]["defaults"].items():
                assert getattr(config, key) == value


def test_an_unknown_name_is_told_the_nearest():
    result = CliRunner().invoke(app, ["algorithms", "gpso"])
    assert result.exit_code == 2
    assert "error: algorithm 'gpso': is not one of grpo, dr_grpo, " in result.output
    assert result.output.rstrip().endswith("did you mean gspo?")


def test_it_does_not_import_torch():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom cohort.cli.app import app\n"
        "for arguments in ([], ['--json'], ['gspo']):\n"
        "    assert CliRunner().invoke(app, ['algorithms', *arguments]).exit_code == 0\n"
        "sys.exit(bool({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
