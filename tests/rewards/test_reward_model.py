"""The reward `model`: the values of transformers, in this process and behind a URL."""

import json
import math

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from builtin_rewards import configured, load_builtin
from cohort.config.rewards import ModelSettings
from cohort.errors import UserError
from cohort.rewards import RewardRunner, build_rewards
from cohort.rewards.sequence_classifier import Classifier
from json_server import serving
from reward_models import MESSAGES, naive_scores, save_reward_model
from reward_samples import group, reward
from tiny import VOCAB_SIZE, make_tokenizer, save_model_folder
from waiting import free_port

TEXTS = ["4", "a longer answer " * 8, "", "?", "4", "b" * 100, "no"]
PROMPTS = [MESSAGES] * len(TEXTS)
COMPLETIONS = [[{"role": "assistant", "content": text}] for text in TEXTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_reward_model(tmp_path_factory.mktemp("rm"))


@pytest.fixture(scope="module")
def three_labels(tmp_path_factory):
    return save_reward_model(tmp_path_factory.mktemp("rm3"), num_labels=3)


def model_reward(**args):
    return load_builtin("model", args, device="cpu")


def scores_of(path, **args):
    return model_reward(path=str(path), **args)(PROMPTS, COMPLETIONS)


@pytest.mark.parametrize("batch_tokens", [1, 200, 16384])
def test_scores_are_those_of_single_sequences(folder, batch_tokens):
    naive = naive_scores(folder, PROMPTS, COMPLETIONS)
    assert max(naive) - min(naive) > 0.1
    scores = scores_of(folder, batch_tokens=batch_tokens)
    torch.testing.assert_close(scores, naive, atol=1e-5, rtol=1e-5)
    assert scores[0] == scores[4]  # equal completions, equal scores: no advantage from rounding


def test_label_by_name_and_index(three_labels):
    naive = naive_scores(three_labels, PROMPTS, COMPLETIONS, label=2)
    for label in (2, "LABEL_2"):
        torch.testing.assert_close(scores_of(three_labels, label=label), naive, atol=1e-5, rtol=1e-5)


def test_without_a_padding_token_each_row_is_a_batch(tmp_path):
    folder = save_reward_model(tmp_path, pad_token_id=None)
    naive = naive_scores(folder, PROMPTS, COMPLETIONS)
    torch.testing.assert_close(scores_of(folder), naive, atol=1e-5, rtol=1e-5)


def test_a_negative_padding_token_is_none(tmp_path):
    """As the first Llama models have it."""
    folder = save_reward_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": -1}))
    naive = naive_scores(folder, PROMPTS, COMPLETIONS)
    torch.testing.assert_close(scores_of(folder), naive, atol=1e-5, rtol=1e-5)


def test_an_output_that_is_not_finite_is_not_judged(folder, monkeypatch):
    monkeypatch.setattr(Classifier, "score", lambda self, texts, **_: [1.5, math.nan, math.inf])
    f = model_reward(path=str(folder))
    assert f(PROMPTS[:3], COMPLETIONS[:3]) == [1.5, None, None]
    assert f.last_counts == {"not_judged": 2, "not_finite": 2}
    assert "try args.dtype: bfloat16 or float32" in f.warnings[0]


def test_an_encoder_without_a_template_scores_plain_text(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(**sizes, vocab_size=VOCAB_SIZE, num_labels=1, initializer_range=0.5, pad_token_id=0)
    model = BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    make_tokenizer(chat_template=None).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = ["2+2?\n\n" + text for text in ("4", "twenty-two", "4, I think")]
    with torch.no_grad():
        naive = [model(**tokenizer(t, return_tensors="pt", return_token_type_ids=False)).logits.item() for t in texts]
    prompts = ["2+2?", MESSAGES, MESSAGES]
    completions = ["4", *([{"role": "assistant", "content": text}] for text in ("twenty-two", "4, I think"))]
    scores = model_reward(path=str(tmp_path))(prompts, completions)
    torch.testing.assert_close(scores, naive, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_long_texts_are_cut_and_counted(folder, side):
    model = model_reward(path=str(folder), max_tokens=20, truncate=side)
    told = []
    model.on_progress = lambda *how: told.append(how)
    scores = model(PROMPTS, COMPLETIONS)
    assert told == [(6, 6)]  # one batch; two of the 7 are equal
    assert model.last_counts == {"truncated": 2}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([*MESSAGES, *COMPLETIONS[1]], tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    classifier = Classifier(ModelSettings(path=str(folder), truncate=side, max_tokens=20), torch.device("cpu"))
    kept = ids[-20:] if side == "left" else ids[:20]
    assert classifier._token_ids(text, truncate=True) == kept
    expected = classifier.model(input_ids=torch.tensor([kept])).logits.item()
    assert scores[1] == pytest.approx(expected, abs=1e-5)


def test_the_model_is_frozen_and_loaded_once(folder):
    model = model_reward(path=str(folder))
    model(PROMPTS, COMPLETIONS)
    classifier = model._classifier
    assert not classifier.model.training and not any(p.requires_grad for p in classifier.model.parameters())
    assert classifier.model.dtype == torch.float32
    model(PROMPTS, COMPLETIONS)
    assert model._classifier is classifier


def test_batches_are_halved_when_memory_runs_out(folder, monkeypatch):
    classifier = Classifier(ModelSettings(path=str(folder)), torch.device("cpu"))
    rows = [[5, 6], [7, 8, 9], [10, 11, 12, 13]]
    expected = classifier._forward(rows)
    forward = classifier._forward

    def limited(rows):
        if len(rows) > limit:
            raise torch.OutOfMemoryError
        return forward(rows)

    monkeypatch.setattr(classifier, "_forward", limited)
    limit = 1
    assert classifier._forward_with_retry(rows) == pytest.approx(expected, abs=1e-5)
    limit = 0
    with pytest.raises(UserError, match=r"runs out of memory on cpu with one text of 2 tokens; set args.max_tokens"):
        classifier._forward_with_retry(rows)


def checked(**args):
    return build_rewards(configured({"use": "model", "args": args}), columns=[], max_completion_tokens=8)


def test_wrong_arguments_of_a_model_in_this_process(folder, three_labels, tmp_path):
    causal = save_model_folder(tmp_path / "causal")
    headless = save_reward_model(tmp_path / "headless")
    from safetensors.torch import load_file, save_file

    weights = load_file(headless / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, headless / "model.safetensors", metadata={"format": "pt"})
    cases = [
        ({"path": str(tmp_path / "none" / "x" / "y")}, "no such folder"),
        ({"path": str(causal)}, "is LlamaForCausalLM, which has no classification head"),
        ({"path": str(headless)}, r"has no weights for score.weight; its scores would be random"),
        ({"path": str(three_labels)}, "label: the model has 3 outputs; choose one of LABEL_0, LABEL_1, LABEL_2"),
        ({"path": str(three_labels), "label": "LABEL_9"}, "label: the model has no output 'LABEL_9'; did you mean"),
        ({"path": str(folder), "device": "gpu"}, "args.device: 'gpu': must be train, cpu, cuda or cuda:N"),
        (
            {"path": str(folder), "dtype": "int8"},
            "args.dtype: 'int8': input should be 'auto', 'float32', 'bfloat16' or 'float16'",
        ),
        ({"path": str(folder), "truncate": "middle"}, "args.truncate: 'middle': input should be 'left' or 'right'"),
        ({"path": str(folder), "max_tokens": 0}, "args.max_tokens: 0: input should be greater than or equal to 1"),
        ({"path": str(folder), "api": "json"}, "api: has no effect with path; remove it"),
        ({"path": str(folder), "url": "http://x"}, "path or url: give one of them"),
        ({}, "path or url: give one of them"),
        ({"url": "http://x", "dtype": "float32"}, "dtype: has no effect with url; remove it"),
        ({"url": "http://x", "api": "json", "label": 1}, "label: has no effect with api: json"),
        ({"url": f"http://127.0.0.1:{free_port()}"}, "/pooling does not answer .*start the server first"),
    ]
    for args, message in cases:
        with pytest.raises(UserError, match=rf"rewards(\[0\].args: reward 'model': .*|\.0\..*){message}"):
            checked(**args)
    assert checked(path=str(folder))[0].name == "model"


def lengths(body):
    return {"scores": [None if c == "none" else len(c) / 2 for c in body["completions"]]}


def test_the_json_form(folder):
    with serving(lengths) as server:
        (built,) = checked(url=f"{server.url}/score", api="json")
        runner = RewardRunner([built])
        (scored,) = runner.score([group("q", ["a", "none", "abc"] + ["x"] * 20)])
        assert scored.rewards[[0, 2, 22]].tolist() == [0.5, 1.5, 0.5] and scored.rewards[1] != scored.rewards[1]
        assert server.bodies[0] == {"prompts": ["2+2?"], "completions": ["4"]}  # at the start
        assert sorted(len(body["completions"]) for body in server.bodies[1:]) == [7, 16]
        assert set(server.paths) == {"/score"}


def test_the_pooling_form():
    def pooling(body):
        assert (body["task"], body["use_activation"], body["model"]) == ("classify", False, "rm")
        assert (body["truncate_prompt_tokens"], body["truncation_side"]) == (-1, "right")
        return {"data": [{"index": 0, "data": [0.0, float(len(body["messages"][-1]["content"]))]}]}

    with serving(pooling) as server:
        args = {"url": server.url, "model": "rm", "label": 1, "truncate": "right"}
        (built,) = checked(**args)
        (scored,) = RewardRunner([built]).score([group(MESSAGES, ["a", "abc"])])
        assert scored.rewards.tolist() == [1.0, 3.0]
        assert server.bodies[-1]["messages"][0] == MESSAGES[0] and set(server.paths) == {"/pooling"}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"scores": [1.0, 2.0]}, "expected a list of 1 scores"),
        ({"scores": [float("nan")]}, "the score nan is neither a finite number nor null"),
        ({"scores": ["good"]}, "the score 'good' is neither"),
        ({"rewards": [1.0]}, "'scores'"),
    ],
)
def test_answers_of_another_form_are_errors_at_the_start(answer, message):
    with serving(lambda body: answer) as server, pytest.raises(UserError, match=f"answers a test request.*{message}"):
        checked(url=server.url, api="json")


def test_a_server_that_fails_later_is_not_judged():
    with serving(lengths) as server:
        args = {"url": server.url, "api": "json", "retries": 0}
        (built,) = checked(**args)
        server.faults = [(503, {})]
        judge = reward(lambda completions: [1.0] * len(completions), name="other")
        runner = RewardRunner([built, judge])
        (scored,) = runner.score([group("q", ["a"])])
        assert scored.reward_parts["model"].tolist() != [0.0] and scored.rewards.tolist() == [1.0]
        assert runner.counts() == {"model/not_judged": 1, "model/http_503": 1}
        assert "1 completions were not judged (http_503), for example: http" in runner.warnings()[0]
        server.faults = [(404, {})]  # the server restarts behind a proxy
        runner.score([group("q", ["a"])])
        assert runner.counts() == {"model/not_judged": 1, "model/http_404": 1}


def test_a_score_too_large_for_a_float_is_not_judged():
    with serving(lambda body: {"scores": [10**400 if body["completions"] == ["huge"] else 1.0]}) as server:
        (built,) = checked(url=server.url, api="json", retries=0)
        runner = RewardRunner([built, reward(lambda completions: [1.0] * len(completions), name="other")])
        (scored,) = runner.score([group("q", ["huge"])])
        assert math.isnan(scored.reward_parts["model"][0]) and scored.rewards.tolist() == [1.0]
        assert runner.counts() == {"model/not_judged": 1, "model/invalid_answer": 1}


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
RESULT = {"role": "tool", "content": "4"}


@pytest.mark.parametrize(
    ("prompt", "completion", "messages"),
    [
        ("2+2?", "4", [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]),
        (MESSAGES, [CALL, RESULT], [*MESSAGES, CALL, RESULT]),
    ],
)
def test_the_exact_messages_that_a_model_is_sent(prompt, completion, messages):
    with serving(lambda body: {"data": [{"data": [1.0]}]} if "task" in body else {"scores": [1.0]}) as server:
        assert model_reward(url=server.url)([prompt], [completion]) == [1.0]
        assert server.bodies[-1]["messages"] == messages
        assert model_reward(url=server.url, api="json")([prompt], [completion]) == [1.0]
        assert server.bodies[-1] == {"prompts": [prompt], "completions": [completion]}
