"""An adapter is added to the base that it was trained on, and to no other of the same shapes."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from adapters import KINDS, save_adapter
from cohort.config import AdapterConfig, ModelConfig
from cohort.errors import UserError
from cohort.models import LoadRequest, check_adapter, load_policy
from cohort.models.adapters.adapter_folder import base_fingerprint, check_base
from runs import changed, make_inputs, train
from tiny import make_model, make_tokenizer, save_model_folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_model_folder(tmp_path / "base", "qwen2")


def save_here(base: Path, folder: Path) -> Path:
    """A new adapter of a base, as a run saves it."""
    config = ModelConfig(path=str(base), adapter=AdapterConfig(rank=2))
    adapter = load_policy(LoadRequest(config, device=torch.device("cpu"), tokenizer=make_tokenizer())).adapter
    assert adapter is not None
    adapter.save(folder, adapter.full_weights())
    return folder


def check(base: Path, adapter: Path | str) -> Any:
    return check_adapter(ModelConfig(path=str(base), adapter=AdapterConfig(path=str(adapter))))


def test_a_fingerprint_is_of_the_weights_and_not_of_their_files(base: Path, tmp_path: Path):
    shutil.copytree(base, tmp_path / "copy")
    make_model("qwen2").save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len([*(tmp_path / "shards").glob("*.safetensors")]) > 1
    same = {base_fingerprint(str(tmp_path / name)) for name in ("base", "copy", "shards")}
    other = base_fingerprint(str(save_model_folder(tmp_path / "other", "qwen2", seed=7)))
    make_model("qwen2").to(torch.bfloat16).save_pretrained(tmp_path / "rounded")
    rounded = base_fingerprint(str(tmp_path / "rounded"))
    assert len(same) == 1 and len({*same, other, rounded, None}) == 4
    assert base_fingerprint("made here") is None


def test_an_adapter_of_a_run_knows_its_base(base: Path, tmp_path: Path):
    adapter = save_here(base, tmp_path / "adapter")
    with safe_open(adapter / "adapter_model.safetensors", "pt") as file:
        assert file.metadata()["base_fingerprint"] == base_fingerprint(str(base))
    other = save_model_folder(tmp_path / "other", "qwen2", seed=7)
    with pytest.raises(UserError, match=r"model.adapter.path: .*it was trained on '.*/base'.* use model.path=.*/base"):
        check(other, adapter)
    base.rename(tmp_path / "moved")
    assert check(tmp_path / "moved", adapter).rank == 2
    with pytest.raises(UserError, match="for a different model"):  # where the base's folder is gone too
        check(other, adapter)
    other.rename(base)
    with pytest.raises(UserError, match=r"trained on an earlier model at .* use the model it was trained on"):
        check(base, adapter)


def test_an_adapter_of_others_is_compared_with_the_base_that_it_names(base: Path, tmp_path: Path):
    adapter = Path(save_adapter(tmp_path / "adapter", str(base), seed=0, **KINDS["lora"]))
    other = save_model_folder(tmp_path / "other", "qwen2", seed=7)
    shutil.copytree(base, tmp_path / "copy")
    assert check(tmp_path / "copy", adapter).rank == 4
    with pytest.raises(UserError, match=r"adapter.path: .*it was trained on '.*/base'"):
        check(other, adapter)
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "some/name"}))
    assert check(other, adapter).rank == 4  # nothing here says what some/name is


@pytest.mark.parametrize(("named", "refused"), [("org/one", False), ("org/two", True), (None, False)])
def test_two_ids_of_a_hub_are_compared(base: Path, tmp_path: Path, named: str | None, refused: bool):
    adapter = Path(save_adapter(tmp_path / "adapter", str(base), seed=0, **KINDS["lora"]))
    spec = replace(check(base, adapter), base="org/one", fingerprint=None)
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": named}))
    said = r"for 'org/two', but model.path is 'org/one'; use model.path=org/two"
    with pytest.raises(UserError, match=said) if refused else nullcontext():
        check_base(adapter, spec)


def test_a_run_goes_on_with_its_own_base_only(tmp_path: Path):
    config = changed(make_inputs(tmp_path, "qwen2"), model={"adapter": {"rank": 2}}, train={"steps": 1})
    final = train(config).final_dir
    other = save_model_folder(tmp_path / "other", "qwen2", seed=7)
    wrong = changed(
        config, model={"path": str(other), "adapter": {"path": str(final)}}, run={"dir": str(tmp_path / "on")}
    )
    with pytest.raises(UserError, match="is an adapter for a different model"):
        train(wrong)
    assert not (tmp_path / "on").exists() or not any((tmp_path / "on").rglob("*.safetensors"))
