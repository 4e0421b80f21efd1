"""The training step, a whole run and publishing on CUDA tensors without numbers: devices, copies and waits.

What the host waits for keeps a GPU idle: every place that waits inside of a micro-batch is named here, with its reason.
"""

import gc
import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

import families
from cohort.algorithms.regularizers import Coefficients
from cohort.config import config_from_dict
from cohort.learner import OptimResult, TrainResult, WorstCaseShard, forward_backward
from cohort.models import activation_checkpointing, stream_weights
from cohort.models import host_memory as pinned_memory
from cohort.models.saving import weight_specs
from cohort.packing.to_device import to_device
from cohort.ranks.collectives import SINGLE_PROCESS
from cohort.records import Prompt
from cohort.rollout import SampleRequest, SamplingParams, StepKey
from cohort.trainer.build import WorkerSpec, build_worker
from cohort.trainer.worker import Worker, pack_batches
from fake_cuda import fake_cuda
from runs import changed, make_inputs, metric, train
from selection import mostly_slow, slow
from tiny import SIZES, VOCAB_SIZE, make_gemma2, make_model, make_tokenizer, random_sequences

DEVICE = torch.device("cuda", 1)  # what is made on another one, or on the host, does not fit
# The differences that are read where layouts and kernels are tried out
PROBES_AGREE = {"models/batch_layout.py": 0.0, "models/attention/interface.py": 0.0}
GROUPS = [(9, [5, 7, 1]), (70, [80, 3, 9]), (4, [6, 6])]  # short segments, and long ones that are computed alone
SEQUENCES = [replace(s, returns=np.ones_like(s.advantages)) for s in random_sequences(GROUPS)]
SAMPLER = frozenset({"rollout/engines/local/sampler.py"})
KEY = StepKey(purpose="eval", seed=0, step=0)
MOST_COPIES = 3
SHARD = WorstCaseShard(prompt_tokens=60, completion_tokens=41, num_generations=3, num_sequences=9)


def make_moe() -> PreTrainedModel:
    """Experts in bfloat16: fake tensors know no other grouped products."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    config = Qwen3MoeConfig(**SIZES, **sizes, vocab_size=VOCAB_SIZE)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


without_padding = partial(make_model, pad_token_id=None)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to train, and what the host waits for because of it."""

    config: dict[str, Any]
    model: Callable[[], PreTrainedModel] = without_padding
    budget: int = 100_000
    capability: tuple[int, int] = (8, 0)
    layout: str = "shared"
    in_micro_batches: dict[str, int] = field(default_factory=dict)  # waits of each, by file
    per_step: dict[str, int] = field(default_factory=dict)  # waits of the whole step, by file


NARROW = {"dtype": "bfloat16"}
VARIANTS = {
    "autocast": Variant(config={}),
    "float32": Variant(config={"model": {"compute_dtype": "float32"}}),
    "bfloat16, made in forward": Variant(config={"model": NARROW, "train": {"gradients_in_forward": True}}),
    "stochastic rounding": Variant(config={"model": NARROW, "optim": {"stochastic_rounding": True}}),
    "adapter, reference": Variant(config={"model": {"adapter": {}}, "algorithm": {"name": "grpo", "beta": 0.1}}),
    "reference": Variant(config={"algorithm": {"name": "grpo", "beta": 0.1}}),
    "checkpointing": Variant(config={"model": {"gradient_checkpointing": True}}),
    "selective": Variant(config={"model": {"gradient_checkpointing": "selective"}}),
    # each gradient's arrival on the host, and each weight's departure but the last two
    "masters": Variant(config={"optim": {"offload": True}}, per_step={"learner/optimizer_offload.py": 20 + 18}),
    "streams": Variant(config={"model": {"gradient_checkpointing": True}}, budget=60),
    # its gradient's norm, and the step's values
    "critic": Variant(
        config={"algorithm": {"name": "ppo"}}, per_step={"learner/train_engine.py": 2, "trainer/worker.py": 1}
    ),
    "windows": Variant(config={}, model=make_gemma2, in_micro_batches={"learner/forward_backward.py": 2}),
    "padded": Variant(
        config={"model": {"dropout": True}},
        model=partial(make_model, attention_dropout=0.1),
        layout="padded",
        in_micro_batches={"learner/forward_backward.py": 2},
    ),
    # autograd looks for padding among the tokens before it makes a sparse gradient
    "padding token": Variant(config={}, model=make_model, in_micro_batches={"learner/forward_backward.py": 2}),
    "recurrent states": Variant(
        config={},
        model=lambda: families.make_model(families.FAMILIES["Qwen3.5 (text)"]),
        in_micro_batches={"learner/forward_backward.py": 2},  # it has a padding token
    ),
    "untied": Variant(config={}, model=partial(without_padding, tie=False)),
    # the routers' choices are counted over the step before it is computed: they are added up over ranks on the host
    "experts": Variant(
        config={"model": NARROW, "train": {"router_aux_loss_coef": 0.01}},
        model=make_moe,
        per_step={"learner/router_aux_loss.py": 7},
    ),
    "muon": Variant(config={"optim": {"name": "muon"}}),
    # PyTorch's reads two norms of each weight
    "adafactor": Variant(config={"optim": {"name": "adafactor"}}, per_step={"learner/optimizer.py": 40}),
    "sgd": Variant(config={"optim": {"name": "sgd", "momentum": 0.9}}),
    "before Ampere": Variant(config={}, capability=(7, 5)),
}
QUICK = ("adapter, reference",)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Callable[[Any], Path]:
    made: dict[str, Path] = {}

    def folder(model: Callable[[], PreTrainedModel]) -> Path:
        if repr(model) not in made:
            made[repr(model)] = path = tmp_path_factory.mktemp("model")
            model().save_pretrained(path)
            make_tokenizer().save_pretrained(path)
        return made[repr(model)]

    return folder


def build(variant: Variant, folder: Path, run: Path) -> Worker:
    """All that a rank has, with its models loaded."""
    base = {
        "model": {"path": str(folder)},
        "data": {"path": "prompts.jsonl", "prompt": "question"},
        "rewards": [{"use": "exact"}],
        "rollout": {"engine": "local", "num_generations": 3},
        "train": {"steps": 2, "prompts_per_step": 3},
        "hardware": {"device": str(DEVICE)},
    }
    config = config_from_dict(changed(base, **variant.config))
    spec = WorkerSpec(
        folder=run, num_steps=2, checkpoint=None, micro_batch_tokens=variant.budget, longest_sequence_tokens=256
    )
    return build_worker(config, SINGLE_PROCESS, spec, device=DEVICE, tokenizer=make_tokenizer())


def update(worker: Worker) -> tuple[TrainResult, OptimResult]:
    """What a step of the loop makes of its sequences."""
    worker.forward_only(*pack_batches(worker.engine, SEQUENCES), worker.algorithm.forward_only_outputs)
    coefficients = Coefficients(kl=0.1 if worker.algorithm.needs_reference else 0.0, entropy=0.0)
    for model, engine in reversed(worker.engines.items()):
        result = worker.forward_backward(*pack_batches(engine, SEQUENCES), model, coefficients)
        optim = worker.optim_step(model)
    return result, optim


def by_file(waits: dict[str, int]) -> Counter[str]:
    files: Counter[str] = Counter()
    for place, count in waits.items():
        files[place.partition(":")[0]] += count
    return files


@pytest.mark.parametrize("name", mostly_slow(VARIANTS, *QUICK, reason="one variant of each kind is tried"))
def test_a_step_stays_on_its_device_and_waits_where_it_says(name: str, tmp_path: Path, folders):
    variant = VARIANTS[name]
    folder = folders(variant.model)
    if "adapter" in variant.config.get("model", {}):
        importlib.import_module("peft")  # what it imports looks for CUDA's own functions where there is a GPU
    with fake_cuda(index=DEVICE.index, answers=PROBES_AGREE, capability=variant.capability) as cuda:
        worker = build(variant, folder, tmp_path)
        policy = worker.policy
        assert policy.layout == variant.layout and policy.has_plain_head, policy.notes()
        for _ in range(2):  # the second one finds gradients' and optimizer's state
            cuda.crossings.clear()
            result, optim = update(worker)
            waits = by_file(cuda.waits())
        assert result.num_out_of_memory == 0 and optim.grad_norm == 1
        assert {p.device for p in policy.model.parameters()} == {DEVICE}
        assert {x.device for x in worker.engine.old_outputs.values()} == {DEVICE}
        expected = Counter({file: n * result.num_micro_batches for file, n in variant.in_micro_batches.items()})
        # metrics of each model, once all of the step is computed, and the gradient's norm
        expected.update({"learner/loss.py": len(worker.engines), "learner/train_engine.py": 1, **variant.per_step})
        assert waits == +expected


def test_a_micro_batch_takes_few_copies(tmp_path: Path, folders):
    """None of which anything waits for, as the tests above say."""
    with fake_cuda(index=DEVICE.index, answers=PROBES_AGREE) as cuda:
        worker = build(VARIANTS["autocast"], folders(VARIANTS["autocast"].model), tmp_path)
        cuda.crossings.clear()
        result, _ = update(worker)
        assert result.num_micro_batches == 1
        assert sum(c.way == "in" for c in cuda.crossings) <= MOST_COPIES


@slow("test_pinned_memory tries the same memory without a model")
def test_activations_wait_in_their_size_of_pinned_memory_which_is_used_again(tmp_path, folders, monkeypatch):
    """PyTorch's allocator would round each of them up to a power of two, and keep what the largest step took."""
    monkeypatch.setattr(
        activation_checkpointing, "enable_offload", partial(activation_checkpointing.enable_offload, min_bytes=1)
    )
    monkeypatch.setattr(activation_checkpointing, "Tensor", FakeTensor)  # no other subclass is moved
    monkeypatch.setattr(pinned_memory, "BLOCK_BYTES", block := 4096)
    with fake_cuda(index=DEVICE.index, answers=PROBES_AGREE) as cuda:
        worker = build(Variant(config={"model": {"activation_offload": True}}), folders(without_padding), tmp_path)
        cuda.crossings.clear()
        for _ in range(3):
            result, _ = update(worker)
            moved = [c for c in cuda.crossings if c.where.startswith("models/activation_checkpointing.py")]
            ways = {way: sum(c.num_bytes for c in moved if c.way == way) for way in ("out", "in")}
            assert result.num_micro_batches == 1 and not any(c.waits for c in moved)
            assert ways["in"] == ways["out"] > 100 * block
            assert ways["out"] <= sum(cuda.registered.values()) <= 1.01 * ways["out"] + block
            cuda.crossings.clear()
        del worker
        gc.collect()
        assert not cuda.registered


@pytest.mark.parametrize(
    "name",
    mostly_slow(["autocast", "masters"], "masters", reason="masters are one more thing to send"),
)
def test_weights_are_published_from_the_device_without_waiting(name: str, tmp_path: Path, folders):
    with fake_cuda(index=DEVICE.index, answers=PROBES_AGREE) as cuda:
        worker = build(VARIANTS[name], folders(VARIANTS[name].model), tmp_path)
        cuda.crossings.clear()
        specs = weight_specs(worker.policy, torch.bfloat16)
        sent = list(stream_weights(worker.policy, torch.bfloat16))
        assert [(s.name, s.shape, s.dtype) for s in specs] == [(n, tuple(x.shape), x.dtype) for n, x in sent]
        assert {x.device for _, x in sent} == {DEVICE} and not cuda.crossings


@slow("a step on the device is tried above, and the search for a budget on the CPU")
def test_the_budget_is_looked_for(tmp_path: Path, folders):
    with fake_cuda(index=DEVICE.index, answers=PROBES_AGREE):
        worker = build(VARIANTS["autocast"], folders(VARIANTS["autocast"].model), tmp_path)
        assert worker.find_budget(SHARD, 800) >= 800  # nothing runs out of memory


@slow("a whole run; single steps are tried above")
def test_a_whole_run_on_the_first_gpu(tmp_path: Path):
    """Sampling, evaluation, training and saving, on `cuda` as a configuration says it: without a number."""
    config = changed(
        make_inputs(tmp_path, pad_token_id=None),
        hardware={"device": "cuda", "processes": 1},
        rollout={"engine": "local"},
        algorithm={"name": "grpo", "beta": 0.1},  # learns where all completions are equal
        train={"steps": 1},
        eval={"every": 1},
    )
    with fake_cuda(
        answers=PROBES_AGREE | {"rollout/engines/local/sampler.py": sampler_answers(3)}, nothing_found=SAMPLER
    ) as cuda:
        result = train(config)
    assert metric(result.run_dir, "grad_norm") == [1.0]
    assert cuda.launches["_softmax_kernel"] and cuda.launches["_gradient_kernel"]


def sampler_answers(num_tokens: int) -> Iterator[float]:
    """Of twelve completions of at most 12 tokens, all of which end at a time.

    After each token the sampler reads how many are running, and where the longest is; at the end tokens, logprobs and
    lengths.
    """
    return cycle([*[11.0] * (num_tokens - 1), *[12.0] * 4])


def test_the_sampler_waits_once_for_each_token(tmp_path: Path, folders):
    sampling = SamplingParams(num_generations=12, max_completion_tokens=12, temperature=1.0)
    prompt = Prompt(id=0, epoch=0, content="", token_ids=np.arange(2, 7), columns={})
    waits = []
    for num_tokens in (3, 5):
        answers = PROBES_AGREE | {"rollout/engines/local/sampler.py": sampler_answers(num_tokens)}
        with fake_cuda(index=DEVICE.index, answers=answers, nothing_found=SAMPLER) as cuda:
            worker = build(VARIANTS["autocast"], folders(VARIANTS["autocast"].model), tmp_path)
            cuda.crossings.clear()
            keys = tuple(KEY.call(prompt, index) for index in range(12))
            worker.sample([SampleRequest(token_ids=prompt.token_ids, sampling=sampling, keys=keys)], KEY.purpose)
            waits.append(sum(by_file(cuda.waits()).values()))
    assert waits[1] - waits[0] == 2


def test_a_tensor_that_is_left_on_the_host_is_found(tmp_path: Path, folders, monkeypatch):
    monkeypatch.setattr(forward_backward, "to_device", lambda x, *to: replace(to_device(x, *to), labels=x.labels))
    with fake_cuda(index=DEVICE.index, answers=PROBES_AGREE):
        worker = build(VARIANTS["autocast"], folders(VARIANTS["autocast"].model), tmp_path)
        with pytest.raises((RuntimeError, AssertionError), match="cpu"):
            update(worker)
