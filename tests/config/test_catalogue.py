"""A component is declared once: everything but its function derives from its entry in the catalogue."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import cohort
from assigned import assign_advantages
from cohort.algorithms import build_algorithm, drop_zero_gradient, losses
from cohort.algorithms.custom_functions import LossTraits, loss_traits
from cohort.config import COMPONENTS, AlgorithmConfig
from cohort.config.catalogue import Component, Parameter, parameters
from cohort.packing.batch import LossInputs, LossOutput
from samples import scored
from selection import slow

ENTRY = """
POLICY_LOSSES["tether"] = Component(
    formula="-A * log p + pull * log(ratio)^2",
    source="arXiv:2402.03300",
    parameters={"pull": Parameter(float, 0.5, "Strength of the tether.", gt=0, le=2)},
    learns_without_advantage=True,
)
"""
FUNCTION = """

def tether(x: LossInputs, *, pull: float) -> LossOutput:
    return LossOutput(per_token_loss=-x.advantages * x.logprobs + pull * log_ratio(x).square())
"""
SCRIPT = """
import json, math, sys
import cohort
from cohort.config import AlgorithmConfig, config_from_dict, to_yaml
from cohort.cli.algorithms import describe_component
from cohort.errors import UserError
from algorithm_tables import with_tables
from config_page import render

def of(**keys):
    try:
        raw = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"use": "math"}], "algorithm": keys}
        config = config_from_dict(raw)
        assert config_from_dict({**raw, "algorithm": config.algorithm.model_dump()}).algorithm == config.algorithm
        return config.algorithm.model_dump()
    except UserError as error:
        return str(error)

found = {
    "file": cohort.__file__,
    "default": AlgorithmConfig(policy_loss="tether").pull,
    "elsewhere": AlgorithmConfig().pull,
    "written": of(policy_loss="tether", pull=0.25),
    "out of bounds": of(policy_loss="tether", pull=3),
    "no number": of(policy_loss="tether", pull=True),
    "no effect": of(pull=0.25),
    "other keys": of(policy_loss="tether", clip_low=0.1),
    "misspelt": of(policy_loss="tether", pul=0.25),
    "keys": render(),
    "page": with_tables(open(sys.argv[1], encoding="utf-8").read()),
    "described": describe_component("policy_loss", "tether"),
}
assert "torch" not in sys.modules
from cohort.algorithms import build_algorithm
from samples import loss_inputs
algorithm = build_algorithm(AlgorithmConfig(policy_loss="tether", pull=2.0), max_completion_tokens=8)
found["learns without advantage"] = algorithm.learns_without_advantage
x = loss_inputs([math.e, 1.0], [3.0, 3.0])
found["losses"] = algorithm.policy_loss(x).per_token_loss.tolist()
print(json.dumps(found))
"""


def with_a_loss_more(folder: Path) -> dict[str, Any]:
    """What a copy of the package says with an entry more in the catalogue and a function more in the losses."""
    package = folder / "cohort"
    shutil.copytree(Path(cohort.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, lines in {"config/catalogue.py": ENTRY, "algorithms/losses.py": FUNCTION}.items():
        with (package / name).open("a", encoding="utf-8") as file:
            file.write(lines)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, root / "docs" / "algorithms.md"],
        env=os.environ
        | {
            "PYTHONPATH": f"{package.parent}:{root / 'tests' / 'helpers'}:{root / 'tools' / 'docs'}",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert Path(found["file"]).parent == package
    return found


@slow("imports a copy of the package")
def test_an_entry_and_a_function_are_a_policy_loss_with_keys_messages_and_docs(tmp_path: Path):
    found = with_a_loss_more(tmp_path)
    assert found["losses"] == pytest.approx([-3 * 1 + 2 * 1**2, 0]) and found["learns without advantage"]
    assert (found["default"], found["elsewhere"]) == (0.5, None)
    assert found["written"] == {"name": "grpo", "policy_loss": "tether", "pull": 0.25}
    assert found["out of bounds"] == "algorithm.pull: 3: input should be less than or equal to 2"
    assert found["no number"] == "algorithm: pull: True: must be a number"
    assert found["misspelt"].startswith("algorithm.pul: unknown key; did you mean pull? algorithm has: name")
    assert found["no effect"] == (
        "algorithm: pull: 0.25 has no effect with policy_loss: clipped; remove it, or use policy_loss: tether"
    )
    assert found["other keys"] == (
        "algorithm: clip_low: 0.1 has no effect with policy_loss: tether; remove it, or use policy_loss: clipped or "
        "gspo or gspo_token or gmpo"
    )
    row = "| `pull` | number or null | `null` | Strength of the tether. Read by `tether`. |\n"
    assert row in found["keys"]
    assert "| `tether` | `-A * log p + pull * log(ratio)^2` | `pull: 0.5` | [arXiv:2402." in found["page"]
    assert found["described"]["meanings"] == {"pull": "Strength of the tether. (above 0, at most 2)"}


@pytest.mark.parametrize(("power", "kept"), [(1, ["teaches"]), (0, ["teaches", "equal"])])
def test_a_loss_that_learns_without_advantage_is_not_dropped(power: int, kept: list[str], monkeypatch):
    def tether(x: LossInputs) -> LossOutput:
        far = (x.logprobs - x.old_logprobs).clamp(min=3)  # no gradient near the old policy
        return LossOutput(per_token_loss=-x.advantages * x.logprobs + x.advantages**power * far)

    monkeypatch.setitem(
        COMPONENTS["policy_loss"], "tether", Component(formula="", source="", learns_without_advantage=not power)
    )
    monkeypatch.setattr(losses, "tether", tether, raising=False)
    algorithm = build_algorithm(AlgorithmConfig(policy_loss="tether"), max_completion_tokens=8)
    groups = {"teaches": scored([0.0, 1.0], [1, 2]), "equal": scored([1.0, 1.0], [3, 1])}
    sequences = drop_zero_gradient(assign_advantages(list(groups.values()), algorithm), algorithm)
    assert [s.group for s in sequences] == [list(groups).index(name) for name in kept for _ in range(2)]


@pytest.mark.parametrize(("name", "entry"), COMPONENTS["policy_loss"].items())
def test_losses_look_at_what_their_entries_say(name: str, entry: Component):
    traits = loss_traits(partial(getattr(losses, name), **entry.defaults), has_reference=False)
    declared = {field.name: getattr(entry, field.name) for field in fields(LossTraits)}
    assert traits == LossTraits(**declared)


def test_no_parameter_has_the_name_of_another_key_of_the_section():
    for keys in (AlgorithmConfig.__annotations__, {"name": None, **COMPONENTS}):
        assert not parameters().keys() & keys.keys()


def test_components_that_share_a_key_mean_the_same_by_it(monkeypatch: pytest.MonkeyPatch):
    wider = {"clip_low": Parameter(float, 0.2, "Something else.")}
    monkeypatch.setitem(COMPONENTS["policy_loss"], "mine", Component(formula="", source="", parameters=wider))
    with pytest.raises(AssertionError, match="clip_low is declared twice, and differently"):
        parameters()
