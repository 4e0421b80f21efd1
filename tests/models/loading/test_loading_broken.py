"""Model folders whose files are broken: found before anything is loaded."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from cohort.errors import UserError
from cohort.models import check_model_folder
from cohort.models.loading.safetensors_files import read_rows, stored_weights
from test_loading import load
from tiny import VOCAB_SIZE, make_model, make_tokenizer, save_model_folder

# Broken files


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
    path = tmp_path / "model"
    make_model().save_pretrained(path, max_shard_size="20KB")
    make_tokenizer().save_pretrained(path)
    check_model_folder(str(path))
    return path


def test_a_truncated_file(folder):
    file = folder / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - 1)
    what = f"it has {size - 1} bytes, expected {size}; copy or download it again"
    assert refusal(folder) == f"model.path: {file} is truncated: {what}"
    os.truncate(file, 100)
    assert "is truncated: it has 100 bytes, but its header ends at byte" in refusal(folder)
    os.truncate(file, 0)
    assert refusal(folder) == f"model.path: {file} (0 bytes) is not a safetensors file; copy or download it again"


def test_a_truncated_shard(sharded):
    file = sorted(sharded.glob("*.safetensors"))[1]
    os.truncate(file, file.stat().st_size - 10)
    assert f"{file} is truncated" in refusal(sharded)


def test_a_file_with_bytes_too_many(folder):
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"12345678")
    assert "is longer than its header says" in refusal(folder)


@pytest.mark.parametrize(
    "content", [b"garbage", b"<!DOCTYPE html><html>Sign in</html>" * 10, b"PK\x03\x04" + b"x" * 99]
)
def test_something_else_than_safetensors(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    assert "is not a safetensors file" in refusal(folder)


@pytest.mark.parametrize(
    "header",
    [b"{broken", b"[]", b'{"a": {"dtype": "F32", "shape": [2]}}', b'{"a": 1}'],
)
def test_a_broken_header(folder, header):
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "its header is damaged" in refusal(folder)


def test_a_tensor_whose_bytes_are_not_its_shape(folder):
    header = b'{"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,8]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert "its header is damaged: a of shape [2, 3] in BF16 is in bytes 0 to 8" in refusal(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_git_lfs_pointer(folder, sharded, name):
    (folder / "model.safetensors").unlink(missing_ok=True)
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 988097824\n")
    assert f"{name} is a git-lfs pointer, not the file itself; run `git lfs pull`" in refusal(folder)


def test_an_index_that_is_not_one(sharded):
    for text in ('{"weight_map": {', "{}", "[]", '{"weight_map": 3}'):
        (sharded / "model.safetensors.index.json").write_text(text)
        assert "model.safetensors.index.json is not a weights index" in refusal(sharded)


def test_an_index_and_its_files(sharded):
    index = sharded / "model.safetensors.index.json"
    names = json.loads(index.read_text())
    first = sorted(sharded.glob("*.safetensors"))[0]
    (sharded / "elsewhere").mkdir()
    first.rename(sharded / "elsewhere" / first.name)
    assert f"1 of them are missing: {first.name}; copy them into the folder" in refusal(sharded)
    (sharded / "elsewhere" / first.name).rename(first)
    names["weight_map"]["model.layers.7.extra"] = first.name
    index.write_text(json.dumps(names))
    assert "names 1 tensors that are not in its files: model.layers.7.extra;" in refusal(sharded)


def test_a_config_that_is_not_an_object(folder):
    (folder / "config.json").write_text("[]")
    assert "config.json is not a model config: it must be a JSON object" in refusal(folder)


@pytest.mark.parametrize(("key", "value"), [("vocab_size", 500), ("hidden_size", 64)])
def test_weights_of_another_model(folder, key, value):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    assert f"the embedding is {VOCAB_SIZE} x 32, but config.json says" in refusal(folder)


def test_a_tensor_of_another_shape_deeper_in_the_model(folder):
    config = AutoConfig.from_pretrained(folder)
    config.intermediate_size = 48
    config.save_pretrained(folder)
    with pytest.raises(UserError, match=r"gate_proj.weight is 64 x 32 in the file, but config.json says 48 x 32"):
        load(folder)


def test_reading_rows_of_a_file_that_has_shrunk(folder):
    name = "model.layers.1.mlp.up_proj.weight"
    stored, expected = stored_weights(folder)[name], load_file(folder / "model.safetensors")[name]
    part = torch.empty(5, 32, dtype=torch.float64)
    read_rows(stored, part, 20)
    assert torch.equal(part, expected[20:25].double())
    os.truncate(stored.file, stored.start + 20 * 32 * 4 + 40)
    with pytest.raises(UserError, match=r"600 bytes are missing; the file has changed since it was checked"):
        read_rows(stored, part, 20)
