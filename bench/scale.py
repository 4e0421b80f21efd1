"""What rank 0 does alone in a step, by stage and by processor time, for as many completions as many ranks sample.

    python bench/scale.py [--ranks 8 64] [--turns 1 8] [--quick]

Eight prompts per rank with 16 completions each of about 1,800 tokens (6,000 characters with a LaTeX answer), as in
docs/scaling.md. The engine has the completions at once; everything else is what a run does, with the vocabulary of a
tokenizer trained here. Ranks decode and score their shares, here one after another in this process: that is "all other
ranks". Seconds are of this process; "children" are those of the processes that grade answers, and "thread" is where
files are compressed and written while the run goes on.

With more than one turn, each of which but the last calls a tool, trajectories are as long together with the results
of the tool, and come as rollout workers send them, who decode. They are scored on rank 0's node in the same way.
"""

import argparse
import gc
import pickle
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from cohort.algorithms import assign_advantages, build_algorithm, build_sequences, drop_zero_gradient
from cohort.config import AlgorithmConfig, RewardConfig
from cohort.config.schema import RECENT_STEP_TOKENS
from cohort.health.reward_health import reward_health_metrics
from cohort.metrics.rollouts import rollout_metrics
from cohort.packing import pack
from cohort.records import (
    ForwardOnlyOutputs,
    Prompt,
    RolloutGroup,
    ScoredGroup,
    TrainSequence,
    Trajectory,
    TurnStats,
)
from cohort.rewards import RewardRunner, TrainerProgress, build_rewards
from cohort.rewards.per_group import GroupCalls, GroupScorer, GroupValues
from cohort.rollout import LocalEngine, RolloutCollector, SampledCompletion, SamplingParams, StepKey
from cohort.rollout.engines.base import PackedCompletions
from cohort.rollout.stop_strings import decode_text
from cohort.rollout.workers.packed_groups import read_group, read_message, write_group
from cohort.run.completions import prepare_completions_file, write_completions_file
from cohort.run.tokens import TokenRecords, prepare_tokens_file
from harness import machine, markdown

PROMPTS_PER_RANK, GENERATIONS, PROMPT_TOKENS, CHARACTERS, MAX_TOKENS = 8, 16, 256, 6_000, 8_192
REWARDS = (RewardConfig(use="math"),)
TOOL_CALL = {"name": "look_up", "arguments": {"name": "red kite"}}
TOOL_RESULT = "A few words about what was found. " * 4
PHRASES = (
    "We use the substitution $u = {a}x + {b}$, so that $du = {a}\\,dx$. ",
    "Hence $\\frac{{{a}}}{{{b}}} + \\sqrt{{{c}}} = {c}$ and the sum telescopes. ",
    "By the quadratic formula, $x = \\frac{{-{a} \\pm \\sqrt{{{b}}}}}{{{c}}}$. ",
    "Wait, let me check the case $n \\equiv {a} \\pmod{{{c}}}$ again. ",
    "\\[ \\sum_{{k=1}}^{{{b}}} k^{a} = {c} \\] ",
)


class OtherRanks:
    """Scores each rank's share here, and counts the seconds of all but the first."""

    def __init__(self, count: int, scorer: GroupScorer):
        self.count = count
        self.seconds = 0.0
        self._scorer = scorer

    def __call__(self, shares: Sequence[Sequence[GroupCalls]], progress: TrainerProgress) -> list[list[GroupValues]]:
        """See `OnRanks`: what is sent and received is pickled."""
        answers = [pickle.dumps(self._scorer.score(shares[0], progress))]
        for sent in [pickle.dumps((share, progress)) for share in shares[1:]]:
            start = time.process_time()
            answers.append(pickle.dumps(self._scorer.score(*pickle.loads(sent))))
            self.seconds += time.process_time() - start
        return [pickle.loads(answer) for answer in answers]


def packed(tokenizer: PreTrainedTokenizerFast, completions: Sequence[SampledCompletion]) -> PackedCompletions:
    """A rank's completions with their texts."""
    return PackedCompletions.of([replace(c, text=decode_text(tokenizer, c.token_ids)) for c in completions])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--quick", action="store_true", help="seconds: to see that it runs")
    args = parser.parse_args()
    if args.quick:
        args.ranks = [1]
    rng = random.Random(0)
    tokenizer = train_tokenizer([text(rng, 1) for _ in range(50)])
    print(machine())
    gc.collect()
    gc.freeze()  # as commands do after their imports
    # the first steps also get memory from the system, as in a run
    for turns in args.turns:
        columns = [measure(ranks, turns, tokenizer, num_steps=1 if args.quick else 3) for ranks in args.ranks]
        rows = [[stage, *(f"{seconds[stage]:.2f}" for seconds in columns)] for stage in columns[0]]
        print(markdown([f"seconds, {turns} turns", *(f"{ranks} ranks" for ranks in args.ranks)], rows))


def measure(ranks: int, turns: int, tokenizer: PreTrainedTokenizerFast, *, num_steps: int) -> dict[str, float]:
    """Processor seconds of the last of some steps by stage."""
    rng = random.Random(ranks)
    answers = [rng.randrange(2, 10_000) for _ in range(ranks * PROMPTS_PER_RANK)]
    prompts = [
        Prompt(
            id=n,
            epoch=0,
            content="What is it?",
            token_ids=np.arange(PROMPT_TOKENS) % 100,
            columns={"answer": f"\\frac{{{answer}}}{{7}}"},
        )
        for n, answer in enumerate(answers)
    ]
    if turns > 1:
        groups = [
            RolloutGroup(
                prompt=prompt,
                trajectories=tuple(play(tokenizer, rng, prompt, answer, turns) for _ in range(GENERATIONS)),
            )
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        sent = [write_group(number, group, is_held=False) for number, group in enumerate(groups)]
        del groups
        return [measure_turns(ranks, prompts, sent) for _ in range(num_steps)][-1]
    sampled = [sample(tokenizer, text(rng, answer)) for answer in answers for _ in range(GENERATIONS)]
    return [measure_single(ranks, tokenizer, prompts, sampled) for _ in range(num_steps)][-1]


def measure_turns(ranks: int, prompts: Sequence[Prompt], sent: Sequence[bytes]) -> dict[str, float]:
    """Processor seconds by stage, from the messages of rollout workers."""
    seconds: dict[str, float] = {}
    with timed(seconds, "read groups"):
        groups = [
            read_group(read_message(message), prompt, environment=lambda index: None)
            for message, prompt in zip(sent, prompts, strict=True)
        ]
    return measure_step(seconds, ranks, groups)


def measure_single(
    ranks: int, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[Prompt], sampled: Sequence[SampledCompletion]
) -> dict[str, float]:
    """Processor seconds by stage, from what each rank has sampled."""
    bounds = [len(sampled) * rank // ranks for rank in range(ranks + 1)]
    seconds: dict[str, float] = {}
    own, *others_own = [sampled[start:end] for start, end in pairwise(bounds)]
    with timed(seconds, "decode and pack its share"):
        shares = [pickle.dumps(packed(tokenizer, own))]
    with timed(seconds, "all other ranks, decode and pack"):
        shares += [pickle.dumps(packed(tokenizer, share)) for share in others_own]
    with timed(seconds, "unpickle completions"):
        completions = [completion for share in shares for completion in pickle.loads(share).unpack()]
    params = SamplingParams(num_generations=GENERATIONS, max_completion_tokens=MAX_TOKENS, temperature=1.0)
    answers = iter(completions)
    engine = LocalEngine(lambda requests: [next(answers) for request in requests for _ in request.keys])
    collector = RolloutCollector(engine, tokenizer)
    with timed(seconds, "collect groups"):
        groups = collector.collect(prompts, params, StepKey(purpose="train", seed=0, step=0))
    collector.close()
    return measure_step(seconds, ranks, groups)


def measure_step(seconds: dict[str, float], ranks: int, groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Add processor seconds by stage of what follows once groups are sampled."""
    functions = build_rewards(REWARDS, columns=["prompt", "answer"], max_completion_tokens=MAX_TOKENS)
    rewards = RewardRunner(functions, columns=["prompt", "answer"], prompt_column="prompt")
    algorithm = build_algorithm(AlgorithmConfig(), max_completion_tokens=MAX_TOKENS)
    rewards.on_ranks = others = OtherRanks(ranks, rewards.scorer)
    before_s = children_s()
    with timed(seconds, "rewards"):
        scored = rewards.score(groups)
    seconds["all other ranks, rewards"] = others.seconds
    seconds["rewards"] -= others.seconds
    seconds["rewards, children"] = children_s() - before_s
    with timed(seconds, "metrics"):
        rollout_metrics(scored)
        reward_health_metrics(scored)
    scored = [replace(group, rewards=np.random.default_rng(0).random(GENERATIONS)) for group in scored]  # all learn
    with timed(seconds, "sequences, advantages"):
        sequences = assign_advantages(
            scored,
            algorithm,
            build_sequences(scored),
            ForwardOnlyOutputs(),
            reward_weights=rewards.weights,
            coefficients=algorithm.coefficients(algorithm.initial_coefficients),
        )
    with timed(seconds, "pack"):
        learned = drop_zero_gradient(sequences, algorithm)
        batches = pack(learned, micro_batch_tokens=8192, dp_size=ranks, share_prompts=True, padded=False)
    with timed(seconds, "pickle sequences"):
        for batch in batches:
            pickle.dumps(batch)
    write_files(seconds, scored, sequences)
    own_s = [s for stage, s in seconds.items() if not stage.endswith(("children", "thread")) and "other" not in stage]
    return {**seconds, "rank 0": sum(own_s)}


def write_files(seconds: dict[str, float], groups: Sequence[ScoredGroup], sequences: Sequence[TrainSequence]) -> None:
    """Write what a run writes of a step, with what ranks have sent of the tokens in the first groups."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        records = TokenRecords(path, max_bytes=10**9, max_step_tokens=RECENT_STEP_TOKENS)
        write_completions_file(path / "first.parquet", step=1, groups=groups[:1])  # imports, which no step makes
        with timed(seconds, "prepare completions file"):
            write_completions = prepare_completions_file(
                path / "step.parquet", step=1, groups=groups, sequences=sequences
            )
        with timed(seconds, "prepare tokens file"):
            recorded = records.chosen(sequences)
        first_pass = {s.index: s.sampling_logprobs for s in recorded}
        sent = [pickle.dumps(first_pass) for _ in ("logprobs", "entropies")]
        with timed(seconds, "prepare tokens file"):
            logprobs, entropies = map(pickle.loads, sent)
            write_tokens = prepare_tokens_file(
                records.file(1),
                num_trajectories=len(sequences),
                sequences=recorded,
                outputs=ForwardOnlyOutputs(logprobs=logprobs, entropies=entropies),
                with_context=False,
            )
        with timed(seconds, "compress and write files, thread"):
            write_completions()
            write_tokens()


def children_s() -> float:
    """Processor seconds of the processes that grade answers, so far."""
    return sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children(recursive=True))


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Add the processor time of this process, all threads included."""
    start = time.process_time()
    yield
    seconds[stage] = seconds.get(stage, 0.0) + time.process_time() - start


def text(rng: random.Random, answer: int) -> str:
    """A solution of about 6,000 characters with a LaTeX answer."""
    parts, length = [], 0
    while length < CHARACTERS:
        numbers = {name: rng.randrange(2, 100) for name in "abc"}
        parts.append(rng.choice(PHRASES).format(**numbers))
        length += len(parts[-1])
    return f"{''.join(parts)}The answer is $\\boxed{{\\frac{{{answer}}}{{{rng.choice((7, 7, 9))}}}}}$."


def play(tokenizer: PreTrainedTokenizerFast, rng: random.Random, prompt: Prompt, answer: int, turns: int) -> Trajectory:
    """A trajectory whose turns but the last call a tool."""
    solution = text(rng, answer)
    size = -(-len(solution) // turns)
    context, calls, messages = prompt.token_ids, [], []
    for turn in range(turns):
        said = solution[turn * size : (turn + 1) * size]
        calls.append(replace(sample(tokenizer, said), text=said).model_call(context, policy_version=0))
        messages.append({"role": "assistant", "content": said})
        if turn < turns - 1:
            messages[-1]["tool_calls"] = [{"id": f"call_{turn}", "type": "function", "function": TOOL_CALL}]
            messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": TOOL_RESULT})
            result = np.array(tokenizer.encode(TOOL_RESULT), dtype=np.int64)
            context = np.concatenate([context, calls[-1].token_ids, result])
    return Trajectory(
        calls=tuple(calls),
        messages=tuple(messages),
        text=solution,
        end="answer",
        stats=TurnStats(tool_calls=turns - 1),
    )


def sample(tokenizer: PreTrainedTokenizerFast, solution: str) -> SampledCompletion:
    token_ids = np.array(tokenizer.encode(solution), dtype=np.int64)
    logprobs = -np.linspace(0.1, 2, len(token_ids), dtype=np.float32).astype(np.float64)
    return SampledCompletion(token_ids=token_ids, sampling_logprobs=logprobs, finish_reason="stop")


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE that needs about 3.4 characters a token, as those of models do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1_000, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


if __name__ == "__main__":
    main()
