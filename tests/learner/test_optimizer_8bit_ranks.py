"""AdamW in 8 bits where ranks have different numbers of rows: each compiles its own step."""

from pathlib import Path

import pytest

from ranks import run_ranks
from selection import slow


@slow("torchao compiles for a minute; test_optimizers has the optimizer, not compiled")
@pytest.mark.parametrize("first", [0, 1])
def test_no_rank_runs_what_another_has_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int):
    """51 and 50 rows of 128: moments in 8 bits on one rank and not on the other, whichever compiles first.

    Without the optimizer's own handling the second rank finds the first one's step on disk, and fails.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    [result] = run_ranks(2, tmp_path, ("step_in_8_bits_in_turn", str(first)))
    assert result["rows"] == [51, 50]
    # the first step of Adam is the learning rate by the sign of the gradient
    assert result["largest_error"] < 1e-5
