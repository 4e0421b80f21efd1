"""Every architecture of `bench/families.py` at tiny size, through the code that a run loads, trains, samples and saves with.

    python bench/models.py [--only Qwen3 Mixtral] [--write docs/models.md]

Each is saved as a model folder and loaded from it, once by Cohort and once by transformers. What is compared with the
library's own forward pass, one unpadded sequence at a time with full logits, in float32:

- logprobs: of sampled tokens, the largest difference;
- gradient: of `TrainEngine.forward_backward` under a token budget that splits groups, of every parameter, relative to
  its own size; the same with gradient checkpointing, and of two processes (gloo, FSDP2);
- sampler: the logprobs that the local engine gives with its completions, the largest difference.

An adapter (LoRA on all linear layers, and on experts where they are linear layers) is filled with random numbers, and
has to give with the adapter off what the model alone gives, bit for bit. A saved folder has to be loaded by
transformers with equal weights.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from families import FAMILIES, VOCABULARY, save_folder
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from cohort.batch import LossInputs, LossOutput
from cohort.checkpoint import save_model
from cohort.config import AdapterConfig, ModelConfig, TrainConfig
from cohort.distributed import ALONE, Ranks, join_ranks, leave_ranks
from cohort.engine import TrainEngine
from cohort.errors import UserError
from cohort.packing import pack
from cohort.policy import Collectives, LoadRequest, Policy, load_policy, quiet_transformers
from cohort.records import Prompt, TrainSequence
from cohort.rollout import LocalEngine, Sampler, SamplingParams, StreamKey, generate

CPU = torch.device("cpu")
LONGEST = 100
BUDGET = 60  # fewer tokens than the last group has: it becomes a stream where prompts are shared
# Tokens of each prompt and of its completions.
GROUPS = ((5, (7, 1, 3)), (1, (1, 4)), (9, (12,)), (40, (20, 33, 9)))
BEGIN, END = "<!-- bench/models.py -->", "<!-- end -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was measured of an architecture; NaN where it does not compute that."""

    name: str
    model_type: str
    experts: str  # how they are kept: "-" where there are none
    layout: str
    head: str
    reason: str  # why the layout is not "shared"
    logprobs: float
    gradient: float
    checkpointing: float
    two_ranks: float
    sampler: float
    adapter: str
    saved: str


def random_sequences() -> list[TrainSequence]:
    """The completions of `GROUPS`, with random tokens, advantages and weights."""
    rng = np.random.default_rng(0)
    sequences: list[TrainSequence] = []
    for group, (p, completions) in enumerate(GROUPS):
        prompt = rng.integers(2, VOCABULARY, p)
        for c in completions:
            sequences.append(
                TrainSequence(
                    token_ids=np.concatenate([prompt, rng.integers(2, VOCABULARY, c)]),
                    num_prompt_tokens=p,
                    index=len(sequences),
                    group=group,
                    sampling_logprobs=np.zeros(c),
                    loss_weights=rng.random(c) / 30,
                    advantages=np.full(c, rng.normal()),
                )
            )
    return sequences


def policy_loss(inputs: LossInputs) -> LossOutput:
    """The plain policy gradient."""
    return LossOutput(per_token_loss=-inputs.advantages * inputs.logprobs, token_metrics={})


def naive_logprobs(model: PreTrainedModel, token_ids: np.ndarray, num_prompt_tokens: int) -> Tensor:
    """Logprobs of a completion by the library's forward pass over one unpadded row."""
    ids = torch.from_numpy(token_ids).unsqueeze(0)
    logits = model(input_ids=ids, use_cache=False).logits[0, num_prompt_tokens - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(-1, ids[0, num_prompt_tokens:, None]).squeeze(-1)


def naive(model: PreTrainedModel, sequences: Sequence[TrainSequence]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logprobs of each sequence, and the gradient of the same loss by every parameter."""
    model.train()
    logprobs = [naive_logprobs(model, s.token_ids, s.num_prompt_tokens) for s in sequences]
    for s, values in zip(sequences, logprobs, strict=True):
        weights = torch.from_numpy(-s.loss_weights * s.advantages).to(values)
        (weights * values).sum().backward(retain_graph=True)
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return [values.detach() for values in logprobs], grads


def load(folder: Path, *, ranks: Ranks = ALONE, **keys: Any) -> Policy:
    """As a run loads it."""
    return load_policy(
        LoadRequest(
            ModelConfig(path=str(folder), **keys),
            device=CPU,
            tokenizer=AutoTokenizer.from_pretrained(folder),
            ranks=ranks,
            collectives=Collectives() if ranks.world_size > 1 else None,
            longest_sequence_tokens=LONGEST,
        )
    )


def make_engine(policy: Policy, ranks: Ranks = ALONE) -> TrainEngine:
    """As a run makes it."""
    return TrainEngine(
        policy,
        TrainConfig(),
        micro_batch_tokens=BUDGET,
        learning_rate=lambda _: 0.0,
        temperature=1.0,
        reference=None,
        ranks=ranks,
    )


def trained(policy: Policy, ranks: Ranks = ALONE) -> tuple[Mapping[int, Tensor], dict[str, Tensor]]:
    """Logprobs by sequence, of this rank's, and the whole gradient, by the engine."""
    engine = make_engine(policy, ranks)
    batches = pack(
        random_sequences(),
        micro_batch_tokens=BUDGET,
        world_size=ranks.world_size,
        share_prompts=policy.shares_prompts,
        padded=policy.layout == "padded",
    )
    engine.forward_backward(batches[ranks.rank], policy_loss)
    grads = {}
    for name, parameter in policy.model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            grads[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.to_dense()
    return engine.old_logprobs, grads


def error(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest relative error of a parameter's gradient. Small gradients beside a large one are rounding."""
    largest = max(g.norm().item() for g in expected.values())
    zeros = {name: torch.zeros_like(g) for name, g in {**expected, **actual}.items()}
    actual, expected = zeros | dict(actual), zeros | dict(expected)
    return max(
        (actual[name] - g).norm().item() / max(g.norm().item(), 1e-3 * largest) for name, g in expected.items()
    )


def measure(name: str, folder: Path) -> Row:
    """One process."""
    family = FAMILIES[name]
    save_folder(family, folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected, gradient = naive(theirs, random_sequences())
    torch.save(gradient, folder / "gradient.pt")
    policy = load(folder)
    logprobs, mine = trained(policy)
    values = max((logprobs[n] - e).abs().max().item() for n, e in enumerate(expected))
    return Row(
        name=name,
        model_type=family.model_type,
        experts=experts_of(theirs),
        layout=policy.layout,
        head="plain" if policy.has_plain_head else "full logits",
        reason=policy.traits.reason or "",
        logprobs=values,
        gradient=error(mine, gradient),
        checkpointing=checkpointing(folder, gradient),
        two_ranks=float("nan"),
        sampler=sampler(policy, theirs, folder),
        adapter=adapter(folder, expected),
        saved=saved(policy, folder),
    )


def experts_of(model: PreTrainedModel) -> str:
    """How a model keeps its experts."""
    if any(p.ndim == 3 for p in model.parameters()):
        return "fused"
    return "layers" if any("expert" in n for n, _ in model.named_modules()) else "-"


def checkpointing(folder: Path, gradient: Mapping[str, Tensor]) -> float:
    """The gradient's error with gradient checkpointing."""
    try:
        return error(trained(load(folder, gradient_checkpointing=True))[1], gradient)
    except ValueError as problem:  # the library says that it cannot
        print(f"  gradient checkpointing: {problem}", file=sys.stderr)
        return float("nan")


def sampler(policy: Policy, theirs: PreTrainedModel, folder: Path) -> float:
    """The largest difference of a sampled token's logprob from a plain forward pass; NaN if nothing is sampled."""
    rng = np.random.default_rng(1)
    prompts = [
        Prompt(id=n, epoch=0, content="", token_ids=rng.integers(2, VOCABULARY, length), columns={})
        for n, length in enumerate((3, 11, 1))
    ]
    try:
        engine = LocalEngine(
            Sampler(policy, end_token_ids=frozenset({1}), max_num_seqs=8).sample,
            AutoTokenizer.from_pretrained(folder),
        )
        key = StreamKey(purpose="train", seed=0, step=0)
        groups = generate(engine, prompts, SamplingParams(num_generations=3, max_completion_tokens=20, temperature=1.0), key)
    except UserError as problem:
        print(f"  sampler: {problem}", file=sys.stderr)
        return float("nan")
    worst = 0.0
    theirs.eval()
    with torch.no_grad():
        for group in groups:
            for c in group.completions:
                ids = np.concatenate([group.prompt.token_ids, c.token_ids])
                plain = naive_logprobs(theirs, ids, len(group.prompt.token_ids)).double().numpy()
                worst = max(worst, np.abs(plain - c.sampling_logprobs).max())
    return worst


def adapter(folder: Path, expected: Sequence[Tensor]) -> str:
    """Whether LoRA on all linear layers trains, and off gives the model's own logprobs."""
    try:
        policy = load(folder, adapter=AdapterConfig(rank=2))
    except UserError as problem:
        return str(problem)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.adapter.tensors().values():
            parameter.normal_(std=0.1)
    adapted, grads = trained(policy)
    moved = max((adapted[n] - e).abs().max().item() for n, e in enumerate(expected))
    with_gradient = sum(bool(grads[n].any()) for n, p in policy.model.named_parameters() if p.requires_grad)
    trained_tensors = sum(p.requires_grad for p in policy.model.parameters())
    off = make_engine(policy.as_reference()).estimate(random_sequences(), {"logprobs"})["logprobs"]
    back = max((off[n] - e).abs().max().item() for n, e in enumerate(expected))
    if moved < 1e-3 or back > 1e-4 or with_gradient < trained_tensors:
        return f"wrong: moves logprobs by {moved:.0e}, off differs by {back:.0e}, gradients of {with_gradient} of {trained_tensors}"
    return "works"


def saved(policy: Policy, folder: Path) -> str:
    """Whether transformers loads from a saved folder what it loads from the first one, bit for bit."""
    save_model(policy, AutoTokenizer.from_pretrained(folder), folder / "saved")
    again, first = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder / "saved", folder))
    differ = [name for name in first if name not in again or not torch.equal(first[name], again[name])]
    return f"wrong: {', '.join(differ[:3])}" if differ or len(first) != len(again) else "yes"


def run_ranks(root: Path) -> None:
    """What each of several processes does with every folder in `root`; rank 0 writes the gradients' errors."""
    ranks = join_ranks(backend="gloo", timeout_s=120, command_timeout_s=120)
    errors: dict[str, float | str] = {}
    for folder in sorted(path for path in root.iterdir() if (path / "gradient.pt").exists()):
        try:
            _, gradient = trained(load(folder, ranks=ranks), ranks)
            if ranks.is_first:
                errors[folder.name] = error(gradient, torch.load(folder / "gradient.pt"))
        except Exception as problem:  # on all ranks alike
            import traceback; traceback.print_exc()
            errors[folder.name] = f"{type(problem).__name__}: {problem}"
    if ranks.is_first:
        (root / "ranks.json").write_text(json.dumps(errors))
    leave_ranks()


def two_ranks(root: Path) -> dict[str, float | str]:
    """The gradients' errors of two processes, by folder."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, __file__, "--ranks", str(root)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
        return {}
    return json.loads((root / "ranks.json").read_text())


if __name__ == "__main__":
    import pprint
    if sys.argv[1] == "--ranks":
        warnings.filterwarnings("ignore")
        with quiet_transformers():
            run_ranks(Path(sys.argv[2]))
        sys.exit()
    root = Path(tempfile.mkdtemp(dir="/tmp/moe-scratch"))
    import traceback, time
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with quiet_transformers():
        for i, name in enumerate(sys.argv[1:] if sys.argv[1] != "all" else FAMILIES):
            t=time.time()
            try:
                r = measure(name, root / f"m{i}")
                print(i, f"{r.name:24} {r.experts:6} {r.layout:7} {r.head:11} lp {r.logprobs:.0e} g {r.gradient:.0e} ck {r.checkpointing:.0e} s {r.sampler:.0e} ad {r.adapter[:160]} saved {r.saved} | {r.reason} {time.time()-t:.1f}s", flush=True)
            except Exception as e:
                print(i, name, "EXC", "".join(traceback.format_exception(e)[-3:]), flush=True)
    pprint.pprint(two_ranks(root))
