"""A completion token by token, and the texts of tokens."""

import json
from functools import cache
from math import exp

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from cohort_view.tokens import Vocabulary, completion, find_vocabulary, visible_text
from completions_files import RunFolder, a_row, write_rows
from selection import examples

TEXTS = ["Hello wörld 𝟙 end\n", "naïve 日本語 text 123", "def f(x):\n\treturn x"]


@cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>")])
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    vocab = {"<unk>": 0} | {f"<0x{i:02X}>": i + 1 for i in range(256)} | {"▁": 257, "a": 258, "▁a": 259}
    model = models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    return tokenizer


def write_tokens(run_path, rows, *, step=5, **columns):
    """Write recorded tokens: float lists, one per row."""
    path = run_path / f"tokens/step-{step:06d}.parquet"
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table({name: pa.array(values, pa.list_(pa.float32())) for name, values in columns.items()}), path)
    assert all(len(values) == rows for values in columns.values())
    return path


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@given(text=st.text(max_size=20))
@examples(60)
def test_bytes_of_tokens_are_those_of_the_text(make, text):
    tokenizer = make()
    vocabulary = Vocabulary(json.loads(tokenizer.to_str()))
    ids = tokenizer.encode(text).ids
    assert b"".join(vocabulary.token_bytes(i) for i in ids).decode() == tokenizer.decode(ids)


def test_each_token_has_a_text_of_its_own():
    tokenizer = byte_level()
    vocabulary = Vocabulary(json.loads(tokenizer.to_str()))
    ids = [*tokenizer.encode("end 𝛼\n").ids, 0, tokenizer.token_to_id("<tool>"), 99_999]
    found = vocabulary.columns(ids)
    assert "".join(found.texts[:-4]).startswith("end ")
    assert (found.texts[-3:], found.special[-3:]) == (["<|end|>", "<tool>", None], [True, False, False])
    partial = "".join(text for text, is_bytes in zip(found.texts, found.bytes, strict=True) if is_bytes)
    assert partial == r"\xf0\x9d\x9b\xbc" or r"\xbc" in partial
    assert visible_text(b"a\xe2\x82") == (r"a\xe2\x82", True)
    assert visible_text("é <b>".encode()) == ("é <b>", False)


def test_tokens_of_wordpiece_and_unigram():
    wordpiece = Vocabulary({"model": {"vocab": {"play": 0, "##ing": 1}}, "decoder": {"type": "WordPiece"}})
    assert wordpiece.columns([0, 1]).texts == [" play", "ing"]
    unigram = Vocabulary({"model": {"vocab": [["<s>", 0.0], ["▁go", -1.5]]}, "decoder": {"type": "Metaspace"}})
    assert unigram.columns([1]).texts == [" go"]


def test_a_tokenizer_is_found_in_final_then_the_newest_checkpoint_then_the_model(tmp_path):
    model = tmp_path / "model"
    config = {"model": {"path": str(model)}}
    run = tmp_path / "run"
    for folder in (model, run / "checkpoints/step-9", run / "checkpoints/step-20", run / "final"):
        folder.mkdir(parents=True)
        byte_level().save(str(folder / "tokenizer.json"))
        assert find_vocabulary(run, config)[1] == folder / "tokenizer.json"
    (run / "final/tokenizer.json").write_text("{")
    vocabulary, path, problems = find_vocabulary(run, config)
    assert (vocabulary is not None, path) == (True, run / "checkpoints/step-20/tokenizer.json")
    assert len(problems) == 1
    assert find_vocabulary(tmp_path / "none", None)[0] is None


def test_a_completion_without_recorded_tokens(tmp_path):
    write_rows(tmp_path, [a_row(1), a_row(2, 1.0, length=3, advantage=0.5)])
    found = completion(RunFolder(tmp_path), 5, "step", 1)
    assert (found.group, found.reward, found.advantage, found.length, found.recorded) == (1, 1.0, 0.5, 3, False)
    (sequence,) = found.sequences
    assert (sequence.prompt_tokens, sequence.prompt.ids, sequence.tokens.ids) == (2, [1, 2], [10, 11, 12])
    assert (sequence.sampling_logprobs, sequence.loss_mask) == ([-0.5] * 3, [True] * 3)
    assert (sequence.logprobs, sequence.ratios, sequence.entropies, sequence.tokens.texts) == (None,) * 4
    assert found.problems == (
        "Tokens are shown as ids: no tokenizer.json in final/, checkpoints/ or the folder of model.path.",
    )


def test_recorded_tokens_of_a_completion(tmp_path):
    write_rows(tmp_path, [a_row(1), a_row(1, 1.0)])
    nan = float("nan")
    columns = {"entropies": [None, [0.1, 2.0]], "advantages": [[0, 0], [1, 1]], "loss_weights": [[0, 0], [0.25, 1e-30]]}
    write_tokens(tmp_path, 2, logprobs=[[None, None], [-0.25, nan]], **columns)
    run = RunFolder(tmp_path)
    sequence = completion(run, 5, "step", 1).sequences[0]
    assert (sequence.logprobs, sequence.entropies) == ([-0.25, None], [0.1, 2.0])
    assert sequence.ratios == [pytest.approx(exp(0.25), rel=1e-5), None]
    assert (sequence.advantages, sequence.loss_weights, sequence.reference_logprobs) == ([1, 1], [0.25, 1e-30], None)
    other = completion(run, 5, "step", 0)  # not trained: nothing was computed
    assert (other.recorded, other.trained, other.sequences[0].logprobs) == (True, False, [None, None])
    assert completion(run, 5, "step", 1).trained is True


def test_turns_with_masked_tokens_and_a_rewritten_history(tmp_path):
    row = a_row(1, completion_token_ids=[5, 6, 7, 8], sampling_logprobs=[-1.0, -2.0, -3.0, -4.0])
    row["sequence_token_ids"] = [[1, 2, 5, 6, 30, 7], [1, 40, 8]]
    row["loss_mask"] = [[False, False, True, True, False, True], [False, False, True]]
    broken = a_row(1, None, completion_token_ids=[], sampling_logprobs=[], sequence_token_ids=[], loss_mask=[])
    write_rows(tmp_path, [row, broken])
    write_tokens(tmp_path, 2, logprobs=[[None, None, -1, -2, None, -2, None, None, -4], None])
    run = RunFolder(tmp_path)
    first, second = completion(run, 5, "step", 0).sequences
    assert (first.prompt.ids, first.tokens.ids, first.loss_mask) == ([1, 2], [5, 6, 30, 7], [True, True, False, True])
    assert (first.sampling_logprobs, first.logprobs) == ([-1, -2, None, -3], [-1, -2, None, -2])
    assert first.ratios == [1.0, 1.0, None, pytest.approx(exp(1), rel=1e-5)]
    assert (second.prompt.ids, second.tokens.ids, second.sampling_logprobs) == ([1, 40], [8], [-4])
    assert completion(run, 5, "step", 1).sequences == []
    part = completion(run, 5, "step", 0, offset=3, limit=2)
    assert [(s.offset, s.tokens.ids, s.num_tokens) for s in part.sequences] == [(3, [7], 4), (0, [8], 1)]
    assert (part.num_tokens, part.offset, part.limit) == (5, 3, 2)


def test_recorded_tokens_that_do_not_fit_are_left_out(tmp_path):
    write_rows(tmp_path, [a_row(1), a_row(1, sampling_logprobs=[-0.5])])
    run = RunFolder(tmp_path)
    write_tokens(tmp_path, 2, logprobs=[[-1], [-1, -1]])
    found = completion(run, 5, "step", 0)
    assert (found.sequences[0].logprobs, found.problems[0]) == (None, "Recorded logprobs have 1 values for 2 tokens.")
    found = completion(run, 5, "step", 1)
    assert (found.sequences[0].sampling_logprobs, found.sequences[0].logprobs) == (None, [-1, -1])
    assert found.problems[0].endswith("the row has 1 sampling logprobs for 2 sampled tokens.")
    path = write_tokens(tmp_path, 1, logprobs=[[-1, -1]])
    assert (
        "tokens/step-000005.parquet has 1 rows, the completions file has 2." in completion(run, 5, "step", 0).problems
    )
    path.write_bytes(path.read_bytes()[:-10])
    found = completion(run, 5, "step", 0)
    assert (found.recorded, found.problems[0]) == (False, "tokens/step-000005.parquet is truncated.")


def test_a_long_completion_is_sent_in_parts(tmp_path):
    write_rows(tmp_path, [a_row(1, length=100_000)])
    found = completion(RunFolder(tmp_path), 5, "step", 0)
    assert (found.num_tokens, len(found.sequences[0].tokens.ids)) == (100_000, 20_000)
    rest = completion(RunFolder(tmp_path), 5, "step", 0, offset=99_999)
    assert (rest.sequences[0].tokens.ids, rest.sequences[0].offset) == ([100_009], 99_999)


def test_a_row_that_does_not_exist(tmp_path):
    write_rows(tmp_path, [a_row(1)])
    run = RunFolder(tmp_path)
    for row in (-1, 1):
        assert completion(run, 5, "step", row).problems == (
            f"completions/step-000005.parquet has no row {row}: it has 1.",
        )
    missing = "No completions of step 6: the step is not done, or the file was deleted."
    assert completion(run, 6, "step", 0).problems == (missing,)


def test_ids_are_numbers_of_their_row_group(tmp_path):
    write_rows(tmp_path, [a_row(i, length=i) for i in range(1, 40)], row_group_size=7)
    for row in (0, 6, 7, 38):
        assert len(completion(RunFolder(tmp_path), 5, "step", row).sequences[0].tokens.ids) == row + 1
    assert np.array_equal(completion(RunFolder(tmp_path), 5, "step", 20).length, 21)
