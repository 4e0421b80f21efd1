"""Model folders whose files are broken: found before anything is loaded."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from cohort.errors import UserError
from cohort.models import check_model_folder
from cohort.models.loading.safetensors_files import stored_weights
from test_loading import load
from tiny import make_model, make_tokenizer, save_model_folder

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 988097824\n"
INDEX = "model.safetensors.index.json"


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        check_model_folder(str(path))
    return str(caught.value)


@pytest.fixture
def folder(tmp_path) -> Path:
    path = save_model_folder(tmp_path / "model")
    check_model_folder(str(path))
    return path


@pytest.fixture
def sharded(tmp_path) -> Path:
    path = tmp_path / "shards"
    make_model().save_pretrained(path, max_shard_size="20KB")
    make_tokenizer().save_pretrained(path)
    check_model_folder(str(path))
    return path


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[:-1],
        lambda whole: whole[:100],
        lambda whole: b"",
        lambda whole: whole + b"12345678",
        lambda whole: b"<!DOCTYPE html><html>Sign in</html>" * 10,
    ],
)
def test_a_file_that_is_truncated_or_something_else(folder: Path, sharded: Path, damage: Callable[[bytes], bytes]):
    for file in (folder / "model.safetensors", sorted(sharded.glob("*.safetensors"))[1]):
        file.write_bytes(damage(file.read_bytes()))
        size = file.stat().st_size
        said = refusal(file.parent)
        assert said.startswith(f"model.path: {file} ({size} bytes) is truncated, or not a safetensors file (")
        assert said.endswith("; copy or download it again")


def test_git_lfs_pointers(folder: Path, sharded: Path):
    for file in (folder / "model.safetensors", sharded / INDEX):
        file.write_text(LFS)
        assert f"{file.name} is a git-lfs pointer, not the file itself; run `git lfs pull`" in refusal(file.parent)


def test_an_index_that_is_not_one_or_lacks_a_file(sharded: Path):
    first = sorted(sharded.glob("*.safetensors"))[0]
    first.unlink()
    assert f"1 of them are missing: {first.name}; copy them into the folder" in refusal(sharded)
    for text in ('{"weight_map": {', "{}", "[]", '{"weight_map": 3}'):
        (sharded / INDEX).write_text(text)
        assert f"{INDEX} is not a weights index" in refusal(sharded)


def test_a_tensor_of_another_shape(folder: Path):
    config = AutoConfig.from_pretrained(folder)
    config.intermediate_size = 48
    config.save_pretrained(folder)
    with pytest.raises(UserError, match=r"gate_proj.weight is 64 x 32 in the file, but config.json says 48 x 32"):
        load(folder)


def test_reading_rows_of_a_file_that_has_shrunk(folder: Path):
    name = "model.layers.1.mlp.up_proj.weight"
    stored, expected = stored_weights(folder)[name], load_file(folder / "model.safetensors")[name]
    part = torch.empty(5, 32, dtype=torch.float64)
    stored.read_rows(part, 20)
    assert torch.equal(part, expected[20:25].double())
    os.truncate(stored.file, stored.start + 20 * 32 * 4 + 40)
    with pytest.raises(UserError, match=r"600 bytes are missing; the file has changed since it was checked"):
        stored.read_rows(part, 20)
