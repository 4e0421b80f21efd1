"""Stop strings: where completions end, with any engine, batch and tokenizer, and what is kept of them."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from chat_tokenizers import CHATML, make_tokenizer
from cohort.records import ModelCall, Prompt, Trajectory
from cohort.rollout import LocalEngine, RolloutCollector, Sampler, SampleRequest, SamplingParams, StepKey
from cohort.rollout.engines.base import PackedCompletions
from cohort.rollout.stop_strings import cut_at_stop
from playing import play, turns_tokenizer
from selection import mostly_slow
from tiny import make_policy

TOKENIZER = make_tokenizer("", CHATML)
SAMPLING = SamplingParams(num_generations=4, max_completion_tokens=40, temperature=1.0)
KEY = StepKey(purpose="train", seed=1, step=0)


def call_of(text: str) -> ModelCall:
    ids = np.array(TOKENIZER(text, add_special_tokens=False)["input_ids"])
    return ModelCall(
        context_ids=np.array([1]),
        token_ids=ids,
        sampling_logprobs=-np.arange(1.0, 1 + len(ids)),
        finish_reason="length",
        policy_version=3,
    )


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("I say 5</answer> and so on", ["</answer>"], "I say 5</answer>"),  # ten tokens
        ("a tool box", ["too"], "a tool"),  # inside a token, which is kept whole
        ("ab cd ef", ["ef", "b c"], "ab c"),  # the first in the text, whichever it is
        ("die Größe 答案 is", ["ö"], "die Grö"),  # characters of several tokens
        ("die Größe 答案 is", ["案"], "die Größe 答案"),
        ("bye<|im_end|>more", ["<|im_end|>"], "bye<|im_end|>"),
        ("a<tool_call>b", ["l>"], "a<tool_call>"),
        ("aaa", ["aaaa", "completions are shorter than this"], None),
        ("aaa", [], None),
    ],
)
def test_a_call_ends_with_the_token_that_completes_a_stop_string(text: str, stop: list[str], kept: str | None):
    call = call_of(text)
    cut = cut_at_stop(call, stop, TOKENIZER)
    if kept is None:
        assert cut is call
        return
    length = len(cut.token_ids)
    assert TOKENIZER.decode(cut.token_ids) == kept
    assert cut.token_ids.tolist() == call.token_ids[:length].tolist()
    assert cut.sampling_logprobs.tolist() == call.sampling_logprobs[:length].tolist()
    assert cut.finish_reason == "stop"
    assert cut_at_stop(cut, stop, TOKENIZER).token_ids.tolist() == cut.token_ids.tolist()


@pytest.fixture(scope="module")
def sampler() -> Callable[[int], Sampler]:
    policy = make_policy(vocab_size=len(TOKENIZER), eos_token_id=TOKENIZER.eos_token_id)
    ends = frozenset({TOKENIZER.eos_token_id})
    return lambda seqs: Sampler(policy, end_token_ids=ends, max_num_seqs=seqs, tokenizer=TOKENIZER)


PROMPTS = [Prompt(id=n, epoch=0, content="", token_ids=np.arange(2, 9 + n), columns={}) for n in range(6)]


def sample(sampler: Sampler, sampling: SamplingParams, prompts: Sequence[Prompt] = PROMPTS) -> list[Trajectory]:
    with closing(RolloutCollector(LocalEngine(sampler.sample), TOKENIZER)) as collector:
        groups = collector.collect(prompts, sampling, KEY)
    return [t for group in sorted(groups, key=lambda group: group.prompt.id) for t in group.trajectories]


def naive(trajectory: Trajectory, stop: Sequence[str]) -> int:
    """Length at which a completion that went on should have ended: the text of each of its beginnings is looked at."""
    ids = trajectory.sampled_token_ids
    ends = [n for n in range(1, len(ids) + 1) if any(s in TOKENIZER.decode(ids[:n]) for s in stop)]
    return min(ends, default=len(ids))


STOPS = [("e",), ("1", "}", "Ġ", "é"), ("<tool_call>",), ("no such text",)]


@pytest.mark.parametrize("stop", mostly_slow(STOPS, STOPS[1], reason="several strings of one character"))
def test_the_local_engine_samples_what_it_would_without_them_up_to_the_stop(sampler, stop: tuple[str, ...]):
    whole = sample(sampler(64), SAMPLING)
    lengths = [naive(trajectory, stop) for trajectory in whole]
    assert stop == ("no such text",) or lengths != [len(t.sampled_token_ids) for t in whole]
    for seqs, prompts in [(64, PROMPTS), (5, PROMPTS[::-1]), (4, PROMPTS[2:3])]:
        found = sample(sampler(seqs), replace(SAMPLING, stop=stop), prompts)
        expected = list(zip(whole, lengths, strict=True))
        expected = expected if len(prompts) > 1 else expected[8:12]
        for trajectory, (full, length) in zip(found, expected, strict=True):
            assert trajectory.sampled_token_ids.tolist() == full.sampled_token_ids[:length].tolist()
            np.testing.assert_allclose(trajectory.sampling_logprobs, full.sampling_logprobs[:length], rtol=0, atol=2e-6)
            is_stopped = any(s in TOKENIZER.decode(full.sampled_token_ids[:length]) for s in stop)
            assert trajectory.finish_reason == ("stop" if is_stopped else full.finish_reason)
            assert trajectory.text == TOKENIZER.decode(trajectory.sampled_token_ids, skip_special_tokens=True)


def test_the_local_engine_stops_there_itself(sampler):
    """At most a few tokens later: what a caller cuts was not sampled in vain."""
    stop = ("e", "1", "}", "a")
    requests = [
        SampleRequest(
            token_ids=prompt.token_ids,
            sampling=replace(SAMPLING, stop=stop if prompt.id else ()),
            keys=tuple(KEY.call(prompt, index) for index in range(4)),
        )
        for prompt in PROMPTS
    ]
    completions = sampler(64).sample(requests)
    texts = [TOKENIZER.decode(completion.token_ids) for completion in completions]
    assert any(s in text[:-8] for text in texts[:4] for s in stop)  # of the prompt without stop strings
    stopped = [(c, text) for c, text in zip(completions[4:], texts[4:], strict=True) if any(s in text for s in stop)]
    assert len(stopped) > 10
    for completion, _ in stopped:
        assert completion.finish_reason == "stop"
        assert not any(s in TOKENIZER.decode(completion.token_ids[:-1]) for s in stop)
    # what other ranks send is what they sampled, with its text
    single = [
        replace(c, sampling_logprobs=c.sampling_logprobs.astype(np.float32).astype(np.float64)) for c in completions
    ]
    double = [replace(c, sampling_logprobs=c.sampling_logprobs + 1e-9) for c in completions]
    for sampled, dtype in ((single, np.float32), (double, np.float64), ([], np.float32)):
        packed = PackedCompletions.of(sampled)
        assert packed.sampling_logprobs.dtype == dtype
        for before, after in zip(sampled, packed.unpack(), strict=True):
            assert after.text == TOKENIZER.decode(before.token_ids, skip_special_tokens=True)
            assert (after.finish_reason, after.token_ids.tolist()) == (before.finish_reason, before.token_ids.tolist())
            assert after.sampling_logprobs.tolist() == before.sampling_logprobs.tolist()


def test_environments_get_the_text_with_the_stop_string_and_their_own_without(tmp_path: Path):
    (tmp_path / "e.py").write_text(
        "async def run(row, model):\n"
        "    first = await model.chat('one')\n"
        "    second = await model.chat([*row['prompt'], {'role': 'user', 'content': 'b'}], stop=['END', ''])\n"
        "    assert [first.content, second.content] == ['a</answer>', 'b '], (first.content, second.content)\n"
        "    third = await model.chat('three', stop=['END'])\n"
        "    assert third.content == 'c</answer>', third.content\n"
        "    return 1.0\n"
    )
    replies = ["a</answer> b", "b END </answer>", "c</answer>"]
    row = {"prompt": [{"role": "user", "content": "hi"}]}
    script = lambda context, key: replies[key.turn]  # noqa: E731
    (group,) = play(tmp_path, script, [row], environment="e.py:run", stop=["</answer>"], max_turns=3)
    for trajectory in group.trajectories:
        assert trajectory.error is None
        texts = [turns_tokenizer().decode(call.token_ids) for call in trajectory.calls]
        assert texts == ["a</answer>", "b END", "c</answer>"]
        assert {call.finish_reason for call in trajectory.calls} == {"stop"}


def test_a_turn_that_a_stop_string_ended_is_continued_with_its_end(tmp_path: Path):
    """Also where a token of its own completes the string: nothing that was sampled is tokenized again."""
    (tmp_path / "e.py").write_text(
        "async def run(row, model):\n"
        "    messages = [{'role': 'user', 'content': row['prompt']}]\n"
        "    for _ in range(2):\n"
        "        reply = await model.chat(messages)\n"
        "        messages += [reply.message, {'role': 'user', 'content': 'more'}]\n"
    )
    for stop, reply in [("</answer>", "a</answer>b"), ("<tool_call>", "a<tool_call>b")]:
        options = {"environment": "e.py:run", "stop": [stop], "rewards": [{"use": "overlong", "buffer_tokens": 4}]}
        (group,) = play(tmp_path, lambda context, key, r=reply: r, [{"prompt": "hi"}], **options)
        for trajectory in group.trajectories:
            assert trajectory.error is None
            first, second = trajectory.calls
            before = [*first.context_ids.tolist(), *first.token_ids.tolist()]
            assert second.context_ids.tolist()[: len(before)] == before
            new = turns_tokenizer().decode(second.context_ids[len(before) :])
            assert new == "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
