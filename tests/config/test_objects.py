"""Python objects where a configuration file has a path: what they are called, and what is refused."""

import pickle
import sys
import types
from pathlib import Path
from typing import Any

import datasets
import pytest

from cohort.config import Config, config_from_dict, to_yaml
from cohort.config.objects import NamedObject, name_callable, unnamed_objects
from cohort.config.user_code import load_function
from cohort.data import read_rows
from cohort.errors import UserError

ROWS = [{"prompt": "1 + 1", "answer": 2}, {"prompt": "2 + 2"}]


def score(completions: list[Any]) -> list[float]:
    return [0.0 for _ in completions]


class Game:
    def reset(self) -> str:
        return ""


def config(**sections: Any) -> Config:
    return config_from_dict({"model": {"path": "m"}, "data": {"path": ROWS}, "rewards": [score], **sections})


def test_what_can_be_imported_is_named_by_its_place():
    of_this = config(
        rewards=[score, {"use": score, "weight": 2.0, "name": "again"}],
        rollout={"environment": {"one": Game, "two": {"use": Game, "weight": 3.0}}, "tools": [score]},
        algorithm={"advantage": {"use": score, "args": {"a": 1}}, "policy_loss": score},
    )
    here = f"{__name__}:score"
    raw = of_this.model_dump(mode="json")
    assert [reward["use"] for reward in raw["rewards"]] == [here, here]
    assert {name: spec["use"] for name, spec in raw["rollout"]["environment"].items()} == {
        "one": f"{__name__}:Game",
        "two": f"{__name__}:Game",
    }
    assert raw["rollout"]["tools"][0]["use"] == here
    assert raw["algorithm"]["advantage"] == {"use": here, "args": {"a": 1}} and raw["algorithm"]["policy_loss"] == here
    assert dict(unnamed_objects(of_this)) == {"data.path": "object:list"}
    assert load_function(of_this.rewards[0].use, field="f") is score


def test_what_cannot_be_imported_is_named_by_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Judge:
        def __call__(self, completions: list[Any]) -> list[float]:
            return [1.0 for _ in completions]

    judge = Judge()
    assert name_callable(judge) == "object:Judge"
    assert name_callable(lambda completions: completions) == "object:<lambda>"
    assert name_callable(Judge) == "object:Judge"
    of_this = config(rewards=[judge])
    assert load_function(of_this.rewards[0].use, field="f") is judge
    assert dict(unnamed_objects(of_this)) == {"data.path": "object:list", "rewards.0.use": "object:Judge"}
    # a function of a notebook, and one of a script
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec("def digits(completions): return completions", vars(main))
    assert name_callable(vars(main)["digits"]) == "object:digits"
    main.__file__ = "<stdin>"
    assert name_callable(vars(main)["digits"]) == "object:digits"
    main.__file__ = str(tmp_path / "train.py")
    (tmp_path / "train.py").touch()
    assert name_callable(vars(main)["digits"]) == f"{tmp_path}/train.py:digits"


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        (ROWS, "object:list"),
        (tuple(ROWS), "object:list"),
        (iter(ROWS), "object:list_iterator"),
        ((row for row in ROWS), "object:generator"),
        (datasets.Dataset.from_list([{"prompt": "1 + 1"}]), "object:Dataset"),
        (datasets.Dataset.from_list([{"prompt": "1 + 1"}]).to_iterable_dataset(), "object:IterableDataset"),
    ],
)
def test_rows(rows: Any, name: str):
    path = config(data={"path": rows}).data.path
    assert path == name
    first = read_rows(path, field="data.path")
    assert first[0]["prompt"] == "1 + 1" and first == read_rows(path, field="data.path"), "also a second time"
    first[0]["prompt"] = "changed"
    assert read_rows(path, field="data.path")[0]["prompt"] == "1 + 1", "the caller's rows stay as they are"


def test_a_path_object_is_a_path(tmp_path: Path):
    file = tmp_path / "train.jsonl"
    file.write_text('{"prompt": "1"}')
    assert config(data={"path": file}).data.path == str(file)


def test_the_name_alone_goes_to_files_and_other_processes():
    of_this = config(rewards=[score, lambda completions: completions])
    assert f"use: {__name__}:score" in to_yaml(of_this) and "path: object:list" in to_yaml(of_this)
    copy = pickle.loads(pickle.dumps(of_this))
    assert copy == of_this and not isinstance(copy.data.path, NamedObject)
    with pytest.raises(UserError, match=r"data\.path='object:list': was a Python object when the run started"):
        read_rows(copy.data.path, field="data.path")
    with pytest.raises(UserError, match=r"rewards\[1\]: 'object:<lambda>' was a Python object when the run started"):
        load_function(copy.rewards[1].use, field="rewards[1]")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"path": 5}}, "data.path: 5: must be a path, or rows: a list of dicts, a datasets.Dataset, or an"),
        ({"data": {"path": {"train": ROWS}}}, "data.path: must be rows, and is a mapping with the keys train; give"),
        ({"data": {"path": ROWS, "split": "test"}}, "data: split: test has no effect with rows that are a Python obj"),
        ({"rewards": [{"use": lambda completions: 1, "isolate": True}]}, "rewards.0: isolate: true needs a function t"),
        (
            {"rollout": {"tools": [lambda x: x], "isolate": True}},
            "rollout: isolate: true needs functions and classes that another process can import, and 'object:<lambda>'",
        ),
    ],
)
def test_refused(sections: dict[str, Any], message: str):
    with pytest.raises(UserError) as caught:
        config(**sections)
    assert str(caught.value).replace(f"{ROWS!r}: ", "").startswith(message) or message in str(caught.value)


def test_rows_that_are_no_dicts():
    path = config(data={"path": ["2 + 2"]}).data.path
    with pytest.raises(UserError, match=r"data\.path='object:list': row 1 is '2 \+ 2', which is not a dict of columns"):
        read_rows(path, field="data.path")
    with pytest.raises(UserError, match="has no rows"):
        read_rows(config(data={"path": []}).data.path, field="data.path")
