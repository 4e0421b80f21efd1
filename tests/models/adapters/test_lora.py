"""Adapters in one process: law 2, what is frozen, what is saved, merging, going on, and what is refused."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from adapters import KINDS, peft_model, save_adapter
from cohort.config import AdapterConfig, ModelConfig
from cohort.errors import UserError
from cohort.models import LoadRequest, Policy, check_adapter, load_policy, load_tokenizer, merge, save_policy
from cohort.models.adapters.adapter_folder import adapter_spec
from cohort.models.adapters.lora import Adapter, AdapterInit
from cohort.models.loading.meta_device import named_saved_tensors
from cohort.packing import collate
from selection import mostly_slow, slow
from test_law_two import (
    GROUPS,
    LAYOUTS,
    assert_layouts_are_naive,
    compute_in_float64,
    detached_prompt,
    differences,
    fast,
    make_law_model,
    make_law_policy,
    naive,
    streamed,
)
from test_mixers import FLOAT32_PARTS, make_wide_model
from test_mixers import GROUPS as UNEVEN_GROUPS
from tiny import make_model, naive_logprobs, policy_of, random_sequences, save_model_folder

CPU = torch.device("cpu")


def adapted(model: PreTrainedModel, *, seed: int = 3, **kind: Any) -> Adapter:
    """A new adapter in a model, with random weights that matter."""
    spec = adapter_spec(ModelConfig(path="made here", adapter=AdapterConfig(**kind)), model)
    adapter = Adapter(model, AdapterInit(spec=spec, seed=seed, weights=None, reference=None), trainable=True)
    adapter.initialize()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in adapter.tensors().values():
            tensor.add_(0.2 * torch.randn(tensor.shape, generator=generator))
    return adapter


def load(base: Path | str, *, reference: bool = False, seed: int = 0, dtype: str = "float32", **kind: Any) -> Policy:
    config = ModelConfig(path=str(base), dtype=dtype, adapter=AdapterConfig(**kind))
    tokenizer = load_tokenizer(config)
    return load_policy(LoadRequest(config, device=CPU, tokenizer=tokenizer, keep_reference=reference, seed=seed))


def load_base(base: Path | str, dtype: str = "float32") -> Policy:
    config = ModelConfig(path=str(base), dtype=dtype)
    return load_policy(LoadRequest(config, device=CPU, tokenizer=load_tokenizer(config), trainable=False))


def some_logprobs(policy: Policy) -> torch.Tensor:
    sequences = random_sequences([(5, [3, 4]), (2, [6])])
    return policy.logprobs(collate(sequences, share_prompts=policy.shares_prompts), temperature=0.9)[0].detach()


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_model_folder(tmp_path_factory.mktemp("model") / "base", "qwen2", tie=True)


# Law 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", mostly_slow(["qwen2", "gemma3", "mixtral"], "qwen2", reason="see test_law_two"))
def test_fast_equals_naive(family: str, kind: str, monkeypatch: pytest.MonkeyPatch):
    """Logprobs, entropies and every gradient of the adapter, in float64; Gemma scales its embedding and caps logits."""
    model = make_law_model(family)
    compute_in_float64(model, monkeypatch)
    targets = KINDS[kind]["targets"]
    settings = {**KINDS[kind], "targets": ["q_proj", "k_proj", "lm_head"]} if family == "mixtral" else KINDS[kind]
    adapted(model, **settings)
    model.train()
    sequences = random_sequences(GROUPS)
    expected = naive(model, sequences)
    assert all("lora_" in name for name in expected.gradients) and expected.gradients
    policy = make_law_policy(model)
    assert policy.shares_prompts
    assert policy.has_plain_head or ("lm_head" in settings["targets"] and kind == "dora"), targets
    assert max(differences(streamed(policy, sequences), expected)) < (1e-6 if family == "mixtral" else 1e-10)
    assert_layouts_are_naive(policy, sequences, expected, most=1e-6 if family == "mixtral" else 1e-10)


MIXER_TARGETS = {
    "Qwen3.5 (text)": ["in_proj_qkv", "out_proj", "q_proj"],
    "LFM2": ["in_proj", "out_proj"],
    "Nemotron-H": ["in_proj", "q_proj"],
}


@pytest.mark.parametrize("kind", mostly_slow(MIXER_TARGETS, "Qwen3.5 (text)", reason="other mixers"))
def test_adapters_of_a_mixer(kind: str, monkeypatch: pytest.MonkeyPatch):
    targets = MIXER_TARGETS[kind]
    model = make_wide_model(kind, monkeypatch)
    adapted(model, rank=2, targets=targets)
    model.train()
    sequences = random_sequences(UNEVEN_GROUPS)
    expected = naive(model, sequences)
    assert any(".lora_A" in name and targets[0] in name for name in expected.gradients)
    policy = make_law_policy(model)
    assert policy.layout == "shared"
    value, gradient = differences(fast(policy, sequences, "shared"), expected)
    assert value < 1e-10 and gradient < (1e-6 if kind in FLOAT32_PARTS else 1e-10)


def test_what_goes_wrong_is_seen(monkeypatch: pytest.MonkeyPatch):
    """Negative controls: a prompt without gradients, and a scaling that is off."""
    model = make_law_model("qwen3")
    compute_in_float64(model, monkeypatch)
    adapter = adapted(model, targets=["k_proj", "v_proj"], rank=2)
    sequences = random_sequences(GROUPS)
    expected, policy = naive(model, sequences), make_law_policy(model)
    assert max(differences(fast(policy, sequences, "shared"), expected)) < 1e-10
    detached_prompt(monkeypatch)
    assert differences(fast(policy, sequences, "shared"), expected)[1] > 0.05
    monkeypatch.undo()
    compute_in_float64(model, monkeypatch)
    for layer in adapter._layers().values():
        layer.scaling["default"] *= 1.01
    assert differences(fast(policy, sequences, "shared"), expected)[0] > 1e-4


def test_float32():
    model = make_law_model("qwen2", dtype=torch.float32)
    adapted(model, **KINDS["lora"])
    sequences = random_sequences(GROUPS)
    expected = naive(model, sequences)
    for layout in LAYOUTS:
        assert max(differences(fast(make_law_policy(model), sequences, layout), expected)) < 1e-5


@pytest.mark.parametrize("other", [{"lora_dropout": 0.1}, {"use_dora": True}])
def test_other_adapters_on_the_head_are_left_to_the_model(other: dict[str, Any]):
    config = LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False, **other)
    assert not policy_of(get_peft_model(make_model(), config).get_base_model()).has_plain_head


# What is frozen, and the reference


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_with_the_adapter_off_the_policy_is_the_base_bit_for_bit(base: Path, kind: str, dtype: str):
    targets = [name for name in KINDS[kind]["targets"] if name != "lm_head"] if kind == "dora" else None
    policy = load(base, reference=True, dtype=dtype, **{**KINDS[kind], **({"targets": targets} if targets else {})})
    expected = some_logprobs(load_base(base, dtype))
    if kind != "dora":  # which divides by the norm that it multiplies by
        assert torch.equal(some_logprobs(policy), expected)  # a new adapter adds 0
    with torch.no_grad():
        for tensor in policy.adapter.tensors().values():
            tensor.add_(0.1)
    changed_by = (some_logprobs(policy) - expected).abs().max()
    assert changed_by > 0.05
    assert torch.equal(some_logprobs(policy.as_reference()), expected)
    assert (some_logprobs(policy) - expected).abs().max() == changed_by  # and it is on again
    trained = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in policy.model.named_parameters() if "lora_" in name}
    assert {p.dtype for p in policy.model.parameters() if p.requires_grad} == {torch.float32}


def test_the_reference_of_a_run_that_goes_on_is_what_it_started_from(base: Path, tmp_path: Path):
    folder = save_adapter(tmp_path / "first", str(base), seed=0, **KINDS["outer"])
    policy = load(base, reference=True, path=folder)
    expected = some_logprobs(policy)
    assert policy.has_plain_head  # two adapters on the head are one at a time
    with torch.no_grad():
        for tensor in policy.adapter.tensors().values():
            tensor.mul_(0.5)
    assert (some_logprobs(policy) - expected).abs().max() > 0.05
    assert torch.equal(some_logprobs(policy.as_reference()), expected)
    assert (expected - some_logprobs(load_base(base))).abs().max() > 0.05


def test_new_weights_depend_on_the_seed_alone(base: Path):
    torch.manual_seed(1)
    first = load(base, rank=4).adapter.full_weights()
    torch.manual_seed(2)
    same, other = load(base, rank=4).adapter.full_weights(), load(base, rank=4, seed=1).adapter.full_weights()
    for key, tensor in first.items():
        assert torch.equal(tensor, same[key])
        if ".lora_A." in key:
            bound = tensor.shape[1] ** -0.5  # as peft's: uniform, of variance 1 / (3 in)
            assert tensor.abs().max() <= bound and tensor.var().sqrt().item() == pytest.approx(bound / 3**0.5, rel=0.2)
            assert not torch.equal(tensor, other[key])
        else:
            assert not tensor.any()


def test_dropout_is_padded_and_never_in_the_reference(base: Path):
    policy = load(base, reference=True, rank=4, dropout=0.5)
    assert policy.layout == "padded" and "it has dropout" in str(policy.traits.reason)
    with torch.no_grad():
        for tensor in policy.adapter.tensors().values():
            tensor.add_(0.1)
    policy.model.train()
    assert not torch.equal(some_logprobs(policy), some_logprobs(policy))
    assert torch.equal(some_logprobs(policy.as_reference()), some_logprobs(policy.as_reference()))


# Files


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_what_peft_loads(base: Path, tmp_path: Path, kind: str):
    policy = load(base, **KINDS[kind])
    with torch.no_grad():
        for n, tensor in enumerate(policy.adapter.tensors().values()):
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(n)))
    save_policy(policy, load_tokenizer(ModelConfig(path=str(base))), tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template is not None
    names = json.loads((tmp_path / "saved/adapter_config.json").read_text())["target_modules"]
    assert len(names) == (7 if kind == "lora" else 3)
    model = peft_model(str(base), str(tmp_path / "saved"), dtype=torch.float32).eval()
    (sequence,) = random_sequences([(7, [9])])
    row = collate([sequence], share_prompts=policy.shares_prompts)
    expected = naive_logprobs(model, sequence)[0]
    torch.testing.assert_close(policy.logprobs(row, temperature=1.0)[0], expected, rtol=0, atol=1e-5)
    again = load(base, path=str(tmp_path / "saved"))
    torch.testing.assert_close(again.logprobs(row, temperature=1.0)[0], expected, rtol=0, atol=1e-5)
    assert again.adapter.spec == policy.adapter.spec


MERGED = [*itertools.product(KINDS, (True, False), (1, 3))]


@pytest.mark.parametrize(
    ("kind", "tie", "shards"),
    mostly_slow(MERGED, *(case for case in MERGED if case[1] == (case[2] == 3)), reason="each kind both ways"),
)
def test_merged_equals_unmerged(tmp_path: Path, kind: str, tie: bool, shards: int):
    base = save_model_folder(tmp_path / "base", tie=tie)
    if shards > 1:
        model = AutoModelForCausalLM.from_pretrained(base)
        (base / "model.safetensors").unlink()
        model.save_pretrained(base, max_shard_size="40KB")
        assert len([*base.glob("*.safetensors")]) >= shards
    adapter = save_adapter(tmp_path / "adapter", str(base), seed=1, **KINDS[kind])
    (tmp_path / "merged").mkdir()
    merge(Path(adapter), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.tie_word_embeddings == (tie and kind != "outer")
    assert merged.dtype == torch.float32
    assert {p.name for p in base.glob("*.safetensors")} == {p.name for p in (tmp_path / "merged").glob("*.safetensors")}
    ids = torch.arange(2, 30).unsqueeze(0)
    with torch.no_grad():
        expected = peft_model(str(base), adapter, dtype=torch.float32)(input_ids=ids).logits.log_softmax(-1)
        actual = merged(input_ids=ids).logits.log_softmax(-1)
        alone = AutoModelForCausalLM.from_pretrained(base)(input_ids=ids).logits.log_softmax(-1)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    assert (alone - expected).abs().max() > 0.1
    AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert load_base(tmp_path / "merged").shares_prompts


def test_a_base_in_bfloat16_is_merged_in_float32_and_rounded_once(tmp_path: Path):
    base = save_model_folder(tmp_path / "base", dtype=torch.bfloat16)
    adapter = save_adapter(tmp_path / "adapter", str(base), seed=1, **KINDS["lora"])
    (tmp_path / "merged").mkdir()
    merge(Path(adapter), tmp_path / "merged")
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "merged/model.safetensors")
    added = load_file(f"{adapter}/adapter_model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        expected = before[name]
        if f"{key}A.weight" in added:
            expected = (expected.float() + 6 / 4 * (added[f"{key}B.weight"] @ added[f"{key}A.weight"])).bfloat16()
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, expected), name


@slow("it fits 64 tokens, twice")
def test_full_rank_reaches_what_training_all_weights_reaches(tmp_path: Path):
    """Fitting 64 tokens by gradient descent: an adapter of full rank on everything gets as far."""
    sequences = random_sequences([(3, [8]), (2, [8]), (4, [8, 8])])

    def fit(policy: Policy, learning_rate: float) -> float:
        parameters = [p for p in policy.model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
        row = collate(sequences, share_prompts=policy.shares_prompts)
        for _ in range(150):
            loss = -policy.logprobs(row, temperature=1.0)[0].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    folder = save_model_folder(tmp_path / "base", tie=False)
    config = ModelConfig(path=str(folder))
    full = fit(load_policy(LoadRequest(config, device=CPU, tokenizer=load_tokenizer(config))), 3e-3)
    targets = ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "embed_tokens"]
    lora = fit(load(folder, rank=32, alpha=32, targets=targets), 3e-3)
    assert full < 0.1 and lora < 1.1 * full
    assert fit(load(folder, rank=1, alpha=1, targets=["q_proj"]), 3e-3) > 10 * full  # negative control


# What is refused


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"targets": ["q_prj"]}, r"targets: 'q_prj' is not a layer of this model; nearest: q_proj"),
        ({"targets": ["q_proj", "mlp"]}, r"targets: 'mlp' is a Qwen2MLP, not a linear layer of this model"),
        ({"rank": 17}, r"rank: 17 exceeds .* model.layers.0.self_attn.k_proj \(16 x 32\); use at most 16"),
        ({"rank": 33, "targets": ["q_proj"]}, r"rank: 33 exceeds .* \(32 x 32\); use at most 32"),
        ({"path": "/nowhere"}, r"adapter.path: '/nowhere' has no adapter_config.json"),
    ],
)
def test_what_does_not_go_with_the_model(base: Path, adapter: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        check_adapter(ModelConfig(path=str(base), adapter=AdapterConfig(**adapter)))


def test_an_adapter_of_another_base(base: Path, tmp_path: Path):
    wide = save_model_folder(tmp_path / "wide", "qwen2", hidden_size=64)
    deep = save_model_folder(tmp_path / "deep", "qwen2", num_hidden_layers=3)
    of_wide, of_deep, of_base = (
        save_adapter(tmp_path / f"of-{path.name}", str(path), seed=0, **KINDS["lora"]) for path in (wide, deep, base)
    )

    def check(model: Path, adapter: str, **keys: Any) -> Any:
        return check_adapter(ModelConfig(path=str(model), adapter=AdapterConfig(path=adapter, **keys)))

    with pytest.raises(UserError, match=r"a different model, not .*q_proj.lora_A.weight is 4 x 64, expected 4 x 32"):
        check(base, of_wide)
    with pytest.raises(UserError, match=r"the model has no layer for base_model.model.model.layers.2."):
        check(base, of_deep)
    file = Path(of_base) / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": None}))
    fine = check(deep, of_base)  # of fewer layers, and of a base that nothing is known of: those that it has
    assert len(fine.modules) == 14 and fine.names == fine.modules
    assert check(base, of_base, rank=4, targets="all-linear").rank == 4
    for keys, message in (
        ({"rank": 8}, r"adapter.rank: 8 contradicts the adapter at .*, which has 4; remove rank, or use 4"),
        ({"alpha": 4}, r"adapter.alpha: 4.0 contradicts the adapter at .*, which has 6.0"),
        ({"dora": True}, r"adapter.dora: True contradicts the adapter at .*, which has False"),
        ({"targets": ["q_proj"]}, r"adapter.targets: .* does not match the layers of the adapter at"),
    ):
        with pytest.raises(UserError, match=message):
            check(base, of_base, **keys)


def test_adapters_of_kinds_that_are_not_trained_here(base: Path, tmp_path: Path):
    adapter = Path(save_adapter(tmp_path / "adapter", str(base), seed=0, **KINDS["lora"]))
    saved = json.loads((adapter / "adapter_config.json").read_text())
    for change, message in (
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save: \['lm_head'\] is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: 'pissa' is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    ):
        (adapter / "adapter_config.json").write_text(json.dumps({**saved, **change}))
        with pytest.raises(UserError, match=message):
            check_adapter(ModelConfig(path=str(base), adapter=AdapterConfig(path=str(adapter))))
    (adapter / "adapter_config.json").write_text(json.dumps(saved))
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop(min(tensors))
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"it lacks base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"):
        check_adapter(ModelConfig(path=str(base), adapter=AdapterConfig(path=str(adapter))))
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(UserError, match=r"adapter.path: .* is truncated, or not"):
        check_adapter(ModelConfig(path=str(base), adapter=AdapterConfig(path=str(adapter))))
    with pytest.raises(UserError, match=r"is an adapter, not a model; .* model.adapter.path"):
        load_tokenizer(ModelConfig(path=str(adapter)))


def test_rows_of_zeros_have_no_direction(tmp_path: Path):
    base = save_model_folder(tmp_path / "base", tie=True)  # the padding token's row is 0
    with pytest.raises(UserError, match=r"dora: true .* 1 rows of lm_head are 0"):
        load(base, dora=True, rank=4, targets=["lm_head"])


def test_the_base_has_its_names_without_the_adapter(base: Path):
    policy = load(base, **KINDS["outer"])
    plain = dict(named_saved_tensors(load_base(base).model))
    named = dict(named_saved_tensors(policy.model))
    assert named.keys() == plain.keys() and all(torch.equal(named[name], plain[name]) for name in plain)
