"""Launch files of people, judged by hand first (`people_files.yaml`)."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from cohort_check import check_file, convert_file

CASES: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("people_files.yaml").read_text())


@pytest.mark.parametrize("case", CASES, ids=[case["origin"] for case in CASES])
def test_the_verdict_is_that_of_a_person(case: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / case["file"]
    for name, text in {case["file"]: case["text"], **case.get("beside", {})}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = check_file(path)
    assert found.outcome == case.get("verdict", found.outcome), found.verdict
    assert case.get("error", "") in {"", *(finding.code for finding in found.findings if finding.severity == "error")}
    if "decide" in case:
        decisions = " ".join(yaml.safe_load(convert_file(path)).get("decide_first", []))
        assert all(word in decisions for word in case["decide"]), decisions
