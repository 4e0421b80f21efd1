"""What several ranks load and save: each reads its own rows, one tensor at a time is gathered, and no rank waits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cohort.models.loading.safetensors_files import stored_weights
from ranks import RanksOnDemand
from selection import mostly_slow, slow
from test_loading import load
from test_multimodal import save_multimodal_folder
from test_weight_conversion import save
from tiny import make_model, make_tokenizer

KINDS = ["tied", "untied", "mixtral", "qwen3 moe"]
over_kinds = pytest.mark.parametrize(
    "kind", mostly_slow(KINDS, "tied", "qwen3 moe", reason="one dense model, and one of experts")
)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for kind in ("tied", "untied"):
        make_model("qwen3", tie=kind == "tied", num_hidden_layers=5).save_pretrained(folder / kind)
        make_tokenizer().save_pretrained(folder / kind)
    made = {kind: folder / kind if "tied" in kind else save(folder / kind, kind) for kind in KINDS}
    return {**made, "gemma3": save_multimodal_folder(folder / "gemma3", "gemma3")}


class Done:
    """What a number of ranks made of models, and the folder of what they saved."""

    def __init__(self, world_size: int, folder: Path, models: dict[str, Path]):
        self.world_size, self.folder = world_size, folder
        self._models, self._ranks = models, RanksOnDemand(folder)

    def saving(self, kind: str) -> dict[str, Any]:
        return self._ranks(self.world_size, "saving", str(self.folder), str(self._models[kind]))

    @property
    def fails(self) -> dict[str, Any]:
        return self._ranks(self.world_size, "saving_fails", str(self.folder), str(self._models["untied"]))


@pytest.fixture(scope="module", params=[pytest.param(2, marks=slow("three ranks show it")), 3])
def done(request, tmp_path_factory, models) -> Done:
    return Done(request.param, tmp_path_factory.mktemp("saved"), models)


@over_kinds
def test_shards_put_together_are_what_the_files_hold(done, models, kind: str):
    stored = load_file(models[kind] / "model.safetensors")
    weights = done.saving(kind)["weights"]
    assert weights.keys() == stored.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in stored.items())


@over_kinds
def test_every_rank_reads_its_rows_and_nothing_else(done, models, kind: str):
    """Of experts too, whose rows are made of several tensors of the files."""
    result = done.saving(kind)
    total = sum(tensor.num_bytes for tensor in stored_weights(models[kind]).values())
    for num_bytes, own in zip(result["num_bytes"], result["own_bytes"], strict=True):
        assert 0 <= num_bytes - own < 500  # what reads the counter is counted too
        assert own < 0.6 * total
    assert 0 <= sum(result["num_bytes"]) - total < 500 * done.world_size


@over_kinds
def test_one_tensor_is_gathered_at_a_time(done, models, kind: str):
    result = done.saving(kind)
    model = AutoModelForCausalLM.from_pretrained(models[kind])
    sizes = [p.nbytes for p in model.parameters()]
    # two at the most: gloo's thread may let go of one a moment after the next is there
    assert max(sizes) <= max(result["most_gathered"]) <= 2 * max(sizes) < 0.6 * sum(sizes)
    assert result["left"] == 0


@over_kinds
def test_what_was_saved_is_loaded_by_the_library_and_here(done, models, kind: str):
    assert done.saving(kind)
    folder = done.folder / models[kind].name
    files = list(folder.glob("model-*-of-*.safetensors"))
    assert len(files) > 5
    expected, again = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (models[kind], folder))
    tokens = torch.arange(2, 40).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, expected(tokens).logits)
    own = load(folder).model.state_dict()  # on one rank, whatever their number was
    assert all(torch.equal(own[name], weight) for name, weight in expected.state_dict().items())


def test_a_full_disk_of_one_rank_is_known_to_all_ranks(done):
    failed, folder = done.fails["third"], done.folder / "full"
    said = dict(enumerate(done.fails["said"]))
    assert said.pop(failed) == "OSError: [Errno 28] No space left on device"
    assert said
    for text in said.values():
        assert text.startswith(
            f"TrainingError: rank {failed} failed to write {folder}: {folder}: no space left on device"
        )


def test_all_ranks_that_see_the_folder_write(done, models):
    ranks = range(done.world_size)
    assert done.fails["writers"] == {"room": [*ranks], "apart": [rank for rank in ranks if rank != 1]}
    expected = stored_weights(models["untied"])
    for name in ("room", "apart"):
        saved = stored_weights(done.folder / name)
        assert saved.keys() == expected.keys()
        assert all(torch.equal(saved[name].read_bytes(), expected[name].read_bytes()) for name in expected)


def test_what_a_multimodal_model_has_beside_its_language_model_is_saved(done, models):
    trained = done.saving("gemma3")["weights"]
    before, after = (stored_weights(path) for path in (models["gemma3"], done.folder / "gemma3"))
    assert after.keys() == before.keys()
    for name in before.keys() - trained.keys():
        assert torch.equal(before[name].read_bytes(), after[name].read_bytes()), name
    assert trained.keys() < before.keys()
