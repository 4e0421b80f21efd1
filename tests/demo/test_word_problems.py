"""The demo's task, tokenizer and base model."""

import json
import re
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from cohort.demo.tasks import ANSWER_PATTERN, WORDS
from cohort.demo.word_problems import STORIES, Problem, generate, is_heldout, write_jsonl
from habits import words_demonstration

PROBLEM = Problem(question="2 and 3?", answer=1, calculation=("2*3=6", "6-5=1"))


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(WORDS.base_path)


def test_first_problem_never_changes():
    first = generate(0, 1)[0]
    assert first.question == (
        "Ivy bakes 5 trays of 8 muffins. The dragon burns 5. 5 friends share the rest. How many does each get?"
    )
    assert words_demonstration(first)[-1]["content"] == "5*8=40\n40-5=35\n35/5=7\n#### 7"


def test_no_calculation_and_no_question_is_in_both_splits():
    train = [problem for seed in range(5) for problem in generate(seed, 4000)]
    heldout = [problem for seed in range(5) for problem in generate(seed, 500, split="heldout")]
    assert not {problem.key for problem in train} & {problem.key for problem in heldout}
    assert not {problem.question for problem in train} & {problem.question for problem in heldout}
    assert all(is_heldout(problem) for problem in heldout)
    assert len({problem.key for problem in generate(0, 2000, split="heldout")}) == 2000


def test_every_line_is_right_and_the_last_one_gives_the_answer():
    problems = generate(1, 3000) + generate(1, 500, split="heldout")
    for problem in problems:
        assert 2 <= len(problem.calculation) <= 4
        for line in problem.calculation:
            a, operator, b, result = re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+)", line).groups()
            expected = {
                "+": int(a) + int(b),
                "-": int(a) - int(b),
                "*": int(a) * int(b),
                "/": int(a) / int(b),  # a float with a remainder would not equal the integer
            }[operator]
            assert expected == int(result) >= 0, problem
        assert int(problem.calculation[-1].split("=")[1]) == problem.answer
        assert re.search(ANSWER_PATTERN, words_demonstration(problem)[-1]["content"])[1] == str(problem.answer)


def test_numbers_of_a_question_are_used_in_its_calculation():
    for problem in generate(2, 1000):
        written = set(re.findall(r"\d+", problem.key))
        assert set(re.findall(r"\d+", problem.question)) <= written, problem


def test_all_stories_and_lengths_occur():
    problems = generate(0, 500)
    assert {len(problem.calculation) for problem in problems} == {2, 3, 4}
    assert len(STORIES) == 6
    for word in ("bags", "come back", "picks", "bakes", "times as many", "saves"):
        assert any(word in problem.question for problem in problems)


def test_jsonl_has_question_and_answer_as_strings(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [PROBLEM, *generate(0, 2)])
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert rows[0] == {"question": "2 and 3?", "answer": "1"}
    assert len(rows) == 3


def test_chat_template():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+3?"},
        {"role": "assistant", "content": "#### 5"},
        {"role": "user", "content": " And 4? "},
    ]
    text = tokenizer().apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|system|>Be brief.<|end|><|user|>2+3?<|end|><|assistant|>#### 5<|end|><|user|> And 4? <|end|><|assistant|>"
    )
    assert tokenizer().apply_chat_template(messages[:1], tokenize=False) == "<|system|>Be brief.<|end|>"
    with pytest.raises(Exception, match="the roles are system, user and assistant, not tool"):
        tokenizer().apply_chat_template([{"role": "tool", "content": ""}], tokenize=False)


def test_base_loads_in_bfloat16_and_ends_its_turns():
    model = AutoModelForCausalLM.from_pretrained(WORDS.base_path)
    assert model.dtype == torch.bfloat16
    assert model.config.model_type == "qwen3"
    assert 0.4e6 < model.num_parameters() < 0.5e6
    assert tokenizer().eos_token_id == tokenizer().encode("<|end|>")[0]
    assert tokenizer().pad_token_id == 0

    chat = [{"role": "user", "content": generate(0, 1)[0].question}]
    prompt = tokenizer().apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer()(prompt, return_tensors="pt")
    sequence = model.float().generate(**inputs, do_sample=False, max_new_tokens=48)[0]
    assert sequence[-1] == tokenizer().eos_token_id
