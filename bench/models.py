"""Every architecture of `bench/families.py` at tiny size, through the code that a run loads, trains and samples with.

    python bench/models.py [--only Qwen3 Mixtral] [--write docs/models.md] | --quick

Each is saved as a model folder and loaded from it, once by Cohort and once by transformers. What is compared with the
library's own forward pass, one unpadded sequence at a time with full logits, in float32:

- logprobs: of sampled tokens, the largest difference;
- gradient: of `TrainEngine.forward_backward` under a token budget that splits groups, of every parameter, relative to
  its own size; the same with gradient checkpointing, and of two processes (gloo, FSDP2);
- sampler: the logprobs that the local engine gives with its completions, the largest difference.

An adapter (LoRA, `targets: all-linear`) is filled with random numbers: it has to change the logprobs, each of its
weights has to get a gradient, and switched off it has to give the model's own logprobs. From a folder that is saved
here transformers has to load the same weights, bit for bit.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from cohort.config import AdapterConfig, ModelConfig, TrainConfig
from cohort.errors import UserError
from cohort.learner import TokenBudget, TrainEngine
from cohort.models import (
    CollectiveCounter,
    LoadRequest,
    Policy,
    find_routers,
    load_policy,
    quiet_transformers,
    save_policy,
)
from cohort.packing import bins, pack
from cohort.packing.batch import LossInputs, LossOutput
from cohort.ranks.collectives import SINGLE_PROCESS, Ranks
from cohort.ranks.join import join_ranks, leave_ranks
from cohort.records import Prompt, TrainSequence
from cohort.rollout import LocalEngine, RolloutCollector, Sampler, SamplingParams, StepKey
from families import FAMILIES, VOCABULARY, save_folder

CPU = torch.device("cpu")
LONGEST = 100
BUDGET = 60  # fewer tokens than the last group has, which is split where prompts are shared
# Tokens of each prompt and of its completions.
GROUPS = ((5, (7, 1, 3)), (1, (1, 4)), (9, (12,)), (40, (20, 33, 9)))
BEGIN, END = "<!-- bench/models.py -->", "<!-- end -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was measured of an architecture; NaN where it does not compute that."""

    name: str
    model_type: str
    has_routers: bool
    layout: str
    has_plain_head: bool
    reason: str  # why the layout is not "shared"
    logprobs: float
    gradient: float
    checkpointing: float
    two_ranks: float
    sampler: float
    adapter: str
    saved: bool


def random_sequences() -> list[TrainSequence]:
    """The completions of `GROUPS`, with random tokens, advantages and weights."""
    rng = np.random.default_rng(0)
    sequences: list[TrainSequence] = []
    for group, (p, completions) in enumerate(GROUPS):
        prompt = rng.integers(2, VOCABULARY, p)
        for c in completions:
            sequences.append(
                TrainSequence.single_turn(
                    prompt,
                    rng.integers(2, VOCABULARY, c),
                    index=len(sequences),
                    group=group,
                    loss_weights=rng.random(c) / 30,
                    advantages=rng.normal(),
                )
            )
    return sequences


def policy_loss(inputs: LossInputs) -> LossOutput:
    """The plain policy gradient."""
    return LossOutput(per_token_loss=-inputs.advantages * inputs.logprobs, token_metrics={})


def naive_logprobs(model: PreTrainedModel, token_ids: np.ndarray, num_prompt_tokens: int) -> Tensor:
    """Logprobs of a completion by the library's forward pass over one unpadded row."""
    ids = torch.from_numpy(token_ids).long().unsqueeze(0)
    logits = model(input_ids=ids, use_cache=False).logits[0, num_prompt_tokens - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(-1, ids[0, num_prompt_tokens:, None]).squeeze(-1)


def naive(model: PreTrainedModel, sequences: Sequence[TrainSequence]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logprobs of each sequence, and the gradient of the same loss: of the model as it is sampled."""
    model.eval()
    logprobs = [naive_logprobs(model, s.token_ids, s.shared_prefix_tokens) for s in sequences]
    for s, values in zip(sequences, logprobs, strict=True):
        weights = torch.from_numpy(-s.loss_weights * s.advantages).to(values)
        (weights * values).sum().backward(retain_graph=True)
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return [values.detach() for values in logprobs], grads


def load(folder: Path, *, ranks: Ranks = SINGLE_PROCESS, **keys: Any) -> Policy:
    """As a run loads it."""
    return load_policy(
        LoadRequest(
            ModelConfig(path=str(folder), **keys),
            device=CPU,
            tokenizer=AutoTokenizer.from_pretrained(folder),
            ranks=ranks,
            collectives=CollectiveCounter() if ranks.world_size > 1 else None,
            longest_sequence_tokens=LONGEST,
        )
    )


def make_engine(policy: Policy, ranks: Ranks = SINGLE_PROCESS) -> TrainEngine:
    """As a run makes it."""
    return TrainEngine(
        policy,
        TrainConfig(),
        budget=TokenBudget(BUDGET),
        learning_rate=lambda _: 0.0,
        temperature=1.0,
        reference=None,
        ranks=ranks,
    )


def trained(policy: Policy, ranks: Ranks = SINGLE_PROCESS) -> tuple[Mapping[int, Tensor], dict[str, Tensor]]:
    """Logprobs by sequence, of this rank's, and the whole gradient, by the engine."""
    engine = make_engine(policy, ranks)
    with patch.object(bins, "_MICRO_BATCH_COST", 0.0):  # split it, though its prompt is so short that it would not pay
        batches = pack(
            random_sequences(),
            micro_batch_tokens=BUDGET,
            dp_size=ranks.dp_size,
            share_prompts=policy.shares_prompts,
            padded=policy.layout == "padded",
        )
    engine.forward_backward(batches[ranks.rank], policy_loss)
    grads = {}
    for name, parameter in policy.model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            grads[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.to_dense()
    return engine.old_outputs, grads


def error(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest relative error of a parameter's gradient. Small gradients beside a large one are rounding."""
    largest = max(g.norm().item() for g in expected.values())
    zeros = {name: torch.zeros_like(g) for name, g in {**expected, **actual}.items()}
    actual, expected = zeros | dict(actual), zeros | dict(expected)
    return max((actual[name] - g).norm().item() / max(g.norm().item(), 1e-3 * largest) for name, g in expected.items())


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
        has_routers=bool(find_routers(theirs)),
        layout=policy.layout,
        has_plain_head=policy.has_plain_head,
        reason=policy.traits.reason or "",
        logprobs=values,
        gradient=error(mine, gradient),
        checkpointing=checkpointing(folder, gradient),
        two_ranks=math.nan,
        sampler=sampler(policy, theirs, folder),
        adapter=adapter(folder, expected),
        saved=saved(policy, folder),
    )


def checkpointing(folder: Path, gradient: Mapping[str, Tensor]) -> float:
    """The gradient's error with gradient checkpointing."""
    try:
        return error(trained(load(folder, gradient_checkpointing=True))[1], gradient)
    except ValueError as problem:  # the library says that it cannot
        print(f"  gradient checkpointing: {problem}", file=sys.stderr)
        return math.nan


def sampler(policy: Policy, theirs: PreTrainedModel, folder: Path) -> float:
    """The largest difference of a sampled token's logprob from a plain forward pass; NaN if nothing is sampled."""
    rng = np.random.default_rng(1)
    prompts = [
        Prompt(id=n, epoch=0, content="", token_ids=rng.integers(2, VOCABULARY, length), columns={})
        for n, length in enumerate((3, 11, 1))
    ]
    try:
        engine = LocalEngine(Sampler(policy, end_token_ids=frozenset({1}), max_num_seqs=8).sample)
        key = StepKey(purpose="train", seed=0, step=0)
        sampling = SamplingParams(num_generations=3, max_completion_tokens=20, temperature=1.0)
        with closing(RolloutCollector(engine, AutoTokenizer.from_pretrained(folder))) as collector:
            groups = collector.collect(prompts, sampling, key)
    except UserError as problem:
        print(f"  sampler: {problem}", file=sys.stderr)
        return math.nan
    worst = 0.0
    theirs.eval()
    with torch.no_grad():
        for group in groups:
            for c in group.trajectories:
                ids = np.concatenate([group.prompt.token_ids, c.sampled_token_ids])
                plain = naive_logprobs(theirs, ids, len(group.prompt.token_ids)).double().numpy()
                worst = max(worst, np.abs(plain - c.sampling_logprobs).max())
    return worst


def adapter(folder: Path, expected: Sequence[Tensor]) -> str:
    """Whether LoRA on all linear layers trains, and off gives the model's own logprobs."""
    try:
        policy = load(folder, adapter=AdapterConfig(rank=2))
    except UserError as problem:
        return str(problem).partition(". ")[0]
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.adapter.tensors().values():
            parameter.normal_(std=0.1)
    adapted, grads = trained(policy)
    moved = max((adapted[n] - e).abs().max().item() for n, e in enumerate(expected))
    without = [
        n for n, p in policy.model.named_parameters() if p.requires_grad and (n not in grads or not grads[n].any())
    ]
    off = make_engine(policy.as_reference()).forward_only(random_sequences(), {"logprobs"})["logprobs"]
    back = max((off[n] - e).abs().max().item() for n, e in enumerate(expected))
    if moved < 1e-3 or back > 1e-4:
        return f"wrong: moves logprobs by {moved:.0e}, and off differs by {back:.0e}"
    if without:
        unused = sorted({name.partition(".lora_")[0].rpartition(".")[-1] for name in without})
        return f"works; the library does not call {', '.join(unused)}"
    return "works"


def saved(policy: Policy, folder: Path) -> bool:
    """Whether transformers loads from a saved folder what it loads from the first one, bit for bit."""
    save_policy(policy, AutoTokenizer.from_pretrained(folder), folder / "saved")
    again, first = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder / "saved", folder))
    return first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)


def run_ranks(root: Path) -> str:
    """What each of several processes does with every folder in `root`; rank 0 writes the gradients' errors."""
    torch.set_num_threads(1)
    ranks = join_ranks(backend="gloo", timeout_s=120, command_timeout_s=120)
    errors: dict[str, float | str] = {}
    for folder in sorted(path for path in root.iterdir() if (path / "gradient.pt").exists()):
        try:
            _, gradient = trained(load(folder, ranks=ranks), ranks)
            if ranks.is_rank0:
                errors[folder.name] = error(gradient, torch.load(folder / "gradient.pt"))
        except Exception as problem:  # on all ranks alike
            errors[folder.name] = f"{type(problem).__name__}: {problem}"
    if ranks.is_rank0:
        (root / "ranks.json").write_text(json.dumps(errors))
    leave_ranks()
    return ""


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


def measure_all(names: Sequence[str], root: Path) -> list[Row]:
    """One after the other, and then all with two processes."""
    rows = []
    for number, name in enumerate(names):
        rows.append(measure(name, root / f"{number:03}"))
        print(rows[-1], flush=True)
    errors = two_ranks(root)
    print(errors)
    return [
        replace(row, two_ranks=value if isinstance(value := errors.get(f"{number:03}"), float) else math.nan)
        for number, row in enumerate(rows)
    ]


_WAYS = {"shared": "shared prompts", "packed": "packed", "padded": "padded"}


def table(rows: Sequence[Row]) -> str:
    """As Markdown, with the reasons below."""
    reasons = list(dict.fromkeys(row.reason for row in rows if row.reason))
    notes = list(dict.fromkeys(row.adapter for row in rows if row.adapter != "works"))
    lines = [
        "| architecture | `model_type` | computed as | logprobs | gradient | checkpointing | 2 processes | sampler "
        "| LoRA | saved |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | --- | --- |",
    ]
    for row in rows:
        way = _WAYS[row.layout] + (f" ({reasons.index(row.reason) + 1})" if row.reason else "")
        way += "" if row.has_plain_head else ", full logits"
        numbers = (row.logprobs, row.gradient, row.checkpointing, row.two_ranks, row.sampler)
        cells = [
            f"{row.name}{' *' if row.has_routers else ''}",
            f"`{row.model_type}`",
            way,
            *(f"{number:.0e}" if math.isfinite(number) else "-" for number in numbers),
            "yes" if row.adapter == "works" else f"({chr(ord('a') + notes.index(row.adapter))})",
            "yes" if row.saved else "**no**",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "\\* a mixture of experts. Why the prompt is not shared:", ""]
    lines += [f"{n}. {reason}" for n, reason in enumerate(reasons, 1)]
    lines += ["", "What to know of LoRA with `targets: all-linear`:", ""]
    lines += [f"- ({chr(ord('a') + n)}) {note}" for n, note in enumerate(notes)]
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "transformers", "peft"))
    return "\n".join([*lines, "", f"Measured on a CPU in float32 with {versions}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="NAME")
    parser.add_argument("--write", type=Path, help="a page to put the table into, between its two marks")
    parser.add_argument("--ranks", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="seconds: to see that it runs")
    args = parser.parse_args()
    args.only = ["Llama"] if args.quick else args.only
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with quiet_transformers(), tempfile.TemporaryDirectory() as root:
        text = table(measure_all(args.only, Path(root))) if args.ranks is None else run_ranks(args.ranks)
    print(text)
    if args.write is not None:
        page = args.write.read_text()
        before, after = page.partition(BEGIN)[0], page.partition(END)[2]
        args.write.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


if __name__ == "__main__":
    main()
