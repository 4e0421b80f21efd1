"""A completion token by token, and the texts of tokens."""

import json
import os
import re
from functools import cache
from math import exp

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from cohort_view.tokens import TokenTexts, completion, find_tokenizer
from completions_files import RunFolder, a_row, write_rows
from selection import examples

TEXTS = ["Hello wörld 𝟙 end\n", "naïve 日本語 text 123", "def f(x):\n\treturn x"]


@cache
def byte_level() -> Tokenizer:
    """As of GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>"), AddedToken("工具")])
    return tokenizer


BYTES = {f"<0x{i:02X}>": i + 1 for i in range(256)}


@cache
def byte_fallback() -> Tokenizer:
    """As of Gemma."""
    vocab = {"<unk>": 0} | BYTES | {"▁": 257, "a": 258, "▁a": 259}
    model = models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    return tokenizer


@cache
def sentencepiece(decoder: str) -> Tokenizer:
    """As of Llama 2: each text begins with a space that is no part of it."""
    pieces = ["▁", "a", "▁a", "▁日", "本", "e", "t", "▁te"]
    tokenizer = Tokenizer(models.Unigram([(t, -1.0) for t in ["<unk>", *BYTES, *pieces]], 0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = {
        "strip": [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)],
        "metaspace": [decoders.ByteFallback(), decoders.Metaspace()],
    }
    tokenizer.decoder = decoders.Sequence(parts[decoder])
    return tokenizer


@cache
def wordpiece() -> Tokenizer:
    """As of BERT: spaces stand between words."""
    vocab = {"[UNK]": 0, "play": 1, "##ing": 2, "a": 3, "##a": 4, ".": 5, "日": 6, "😀": 7}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


TOKENIZERS = {
    "byte-level": (byte_level, ""),
    "byte fallback": (byte_fallback, ""),
    "strip": (lambda: sentencepiece("strip"), " "),
    "metaspace": (lambda: sentencepiece("metaspace"), " "),
    "wordpiece": (wordpiece, " "),
}


def joined(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The texts of tokens, with their bytes joined to characters."""
    found = TokenTexts(tokenizer).columns(ids)
    raw = b""
    for text, partial in zip(found["texts"], found["bytes"], strict=True):
        unescaped = re.sub(rb"\\x([0-9a-f]{2})", lambda m: bytes.fromhex(m[1].decode()), text.encode())
        raw += unescaped if partial else text.encode()
    return raw.decode()


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(max_size=20) | st.text("a😀 日\nplaying.te", max_size=20))
@examples(60)
def test_joined_texts_are_the_text_that_the_library_decodes(name, text):
    make, leading = TOKENIZERS[name]
    ids = make().encode(text).ids
    assert joined(make(), ids).removeprefix(leading if ids else "") == make().decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", ["playing 😀 a. 日本語", "  two  spaces", " a", "👩‍👩‍👧", "té\n\ta"])
def test_texts_with_emoji_chinese_and_leading_spaces(name, text):
    make, leading = TOKENIZERS[name]
    ids = make().encode(text).ids
    whole = make().decode(ids, skip_special_tokens=False)
    assert joined(make(), ids) == leading + whole
    assert name == "wordpiece" or whole == text


def test_each_token_has_a_text_of_its_own():
    tokenizer = byte_level()
    added = [tokenizer.token_to_id(token) for token in ("<|end|>", "<tool>", "工具")]
    ids = [*tokenizer.encode("end 𝛼").ids, *added, 99_999, -1, 1 << 40]
    found = TokenTexts(tokenizer).columns(ids)
    assert found["texts"][-6:] == ["<|end|>", "<tool>", "工具", None, None, None]
    assert found["special"][-6:] == [True, False, False, False, False, False]
    assert "".join(found["texts"][:-6]) == r"end \xf0\x9d\x9b\xbc"
    assert ["\\x" in text for text in found["texts"][:-6]] == found["bytes"][:-6]


def test_every_byte_is_visible():
    ids = [byte_level().token_to_id(token) for token in sorted(pre_tokenizers.ByteLevel.alphabet())]
    found = TokenTexts(byte_level()).columns(ids)
    expected = {chr(byte) if byte < 128 else f"\\x{byte:02x}" for byte in range(256)}
    assert set(found["texts"]) == expected and sum(found["bytes"]) == 128
    found = TokenTexts(byte_fallback()).columns(list(range(1, 257)))
    assert found["texts"] == [chr(byte) if byte < 128 else f"\\x{byte:02x}" for byte in range(256)]


def test_tokens_without_a_decoder_and_with_an_end_of_word():
    tokenizer = Tokenizer(models.WordLevel({"go": 0, "on": 1}, unk_token="go"))
    assert TokenTexts(tokenizer).columns([0, 1])["texts"] == [" go", " on"]
    tokenizer.decoder = decoders.BPEDecoder(suffix="n")
    assert TokenTexts(tokenizer).columns([0, 1])["texts"] == ["go", "o "]


def write_tokens(run_path, rows, *, step=5, **columns):
    """Write recorded tokens: float lists, one per row."""
    path = run_path / f"tokens/step-{step:06d}.parquet"
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table({name: pa.array(values, pa.list_(pa.float32())) for name, values in columns.items()}), path)
    assert all(len(values) == rows for values in columns.values())
    return path


def test_a_tokenizer_is_found_in_final_then_the_newest_checkpoint_then_the_model(tmp_path):
    model, run = tmp_path / "model", tmp_path / "run"

    def found() -> str | None:
        """The name of the folder whose tokenizer is found."""
        texts, _ = find_tokenizer(run, {"model": {"path": str(model)}})
        return texts and texts.columns([0])["texts"][0].strip()

    for folder in (model, run / "checkpoints/step-9", run / "checkpoints/step-20", run / "final"):
        folder.mkdir(parents=True)
        tokenizer = Tokenizer(models.WordLevel({folder.name: 0}, unk_token=folder.name))
        tokenizer.save(str(folder / "tokenizer.json"))
        assert found() == folder.name
    (run / "final/tokenizer.json").write_text("{")
    assert (found(), len(find_tokenizer(run, None)[1])) == ("step-20", 1)
    damaged = json.loads(byte_level().to_str())
    damaged["model"]["continuing_subword_prefix"] = "longer than any token"  # a panic of the library
    (run / "checkpoints/step-20/tokenizer.json").write_text(json.dumps(damaged))
    assert found() == "step-9"
    assert find_tokenizer(tmp_path / "none", None)[0] is None


def test_only_a_models_own_folder_may_link_to_its_tokenizer(tmp_path):
    """A snapshot in the cache of Hugging Face does."""
    blob, snapshot, run = tmp_path / "blobs/1a2b", tmp_path / "snapshots/main", tmp_path / "run"
    for folder in (blob.parent, snapshot, run / "final"):
        folder.mkdir(parents=True)
    byte_level().save(str(blob))
    for folder in (snapshot, run / "final"):
        (folder / "tokenizer.json").symlink_to(blob)
    texts, problems = find_tokenizer(run, {"model": {"path": str(snapshot)}})
    assert (texts is None, len(problems)) == (False, 1)
    assert "a link that leads outside of the run folder" in problems[0]
    (snapshot / "tokenizer.json").unlink()
    os.mkfifo(snapshot / "tokenizer.json")
    assert find_tokenizer(run, {"model": {"path": str(snapshot)}})[0] is None


def test_a_completion_without_recorded_tokens(tmp_path):
    write_rows(tmp_path, [a_row(1), a_row(2, 1.0, length=3, advantage=0.5)])
    found = completion(RunFolder(tmp_path), 5, "step", 1)
    assert [found[name] for name in ("row", "num_tokens", "recorded", "trained")] == [1, 3, False, None]
    (sequence,) = found["sequences"]
    assert (sequence["prompt_tokens"], sequence["prompt"]["ids"], sequence["tokens"]["ids"]) == (
        2,
        [1, 2],
        [10, 11, 12],
    )
    assert (sequence["sampling_logprobs"], sequence["loss_mask"]) == ([-0.5] * 3, [True] * 3)
    assert (sequence["logprobs"], sequence["ratios"], sequence["entropies"], sequence["tokens"]["texts"]) == (None,) * 4
    assert found["problems"] == [
        "Tokens are shown as ids: no tokenizer.json in final/, checkpoints/ or the folder of model.path."
    ]


def test_recorded_tokens_of_a_completion(tmp_path):
    write_rows(tmp_path, [a_row(1), a_row(1, 1.0)])
    nan = float("nan")
    columns = {"entropies": [None, [0.1, 2.0]], "advantages": [[0, 0], [1, 1]], "loss_weights": [[0, 0], [0.25, 1e-30]]}
    write_tokens(tmp_path, 2, logprobs=[[None, None], [-0.25, nan]], **columns)
    run = RunFolder(tmp_path)
    sequence = completion(run, 5, "step", 1)["sequences"][0]
    assert (sequence["logprobs"], sequence["entropies"]) == ([-0.25, None], [0.1, 2.0])
    assert sequence["ratios"] == [pytest.approx(exp(0.25), rel=1e-5), None]
    assert (sequence["advantages"], sequence["loss_weights"], sequence["reference_logprobs"]) == (
        [1, 1],
        [0.25, 1e-30],
        None,
    )
    other = completion(run, 5, "step", 0)  # not trained: nothing was computed
    assert (other["recorded"], other["trained"], other["sequences"][0]["logprobs"]) == (True, False, [None, None])
    assert completion(run, 5, "step", 1)["trained"] is True


def test_turns_with_masked_tokens_and_a_rewritten_history(tmp_path):
    row = a_row(1, completion_token_ids=[5, 6, 7, 8], sampling_logprobs=[-1.0, -2.0, -3.0, -4.0])
    row["sequence_token_ids"] = [[1, 2, 5, 6, 30, 7], [1, 40, 8]]
    row["loss_mask"] = [[False, False, True, True, False, True], [False, False, True]]
    broken = a_row(1, None, completion_token_ids=[], sampling_logprobs=[], sequence_token_ids=[], loss_mask=[])
    write_rows(tmp_path, [row, broken])
    write_tokens(tmp_path, 2, logprobs=[[None, None, -1, -2, None, -2, None, None, -4], None])
    run = RunFolder(tmp_path)
    first, second = completion(run, 5, "step", 0)["sequences"]
    assert (first["prompt"]["ids"], first["tokens"]["ids"], first["loss_mask"]) == (
        [1, 2],
        [5, 6, 30, 7],
        [True, True, False, True],
    )
    assert (first["sampling_logprobs"], first["logprobs"]) == ([-1, -2, None, -3], [-1, -2, None, -2])
    assert first["ratios"] == [1.0, 1.0, None, pytest.approx(exp(1), rel=1e-5)]
    assert (second["prompt"]["ids"], second["tokens"]["ids"], second["sampling_logprobs"]) == ([1, 40], [8], [-4])
    assert completion(run, 5, "step", 1)["sequences"] == []
    part = completion(run, 5, "step", 0, offset=3, limit=2)
    assert [(s["offset"], s["tokens"]["ids"], s["num_tokens"]) for s in part["sequences"]] == [(3, [7], 4), (0, [8], 1)]
    assert (part["num_tokens"], part["offset"], part["limit"]) == (5, 3, 2)


def test_columns_that_do_not_fit_are_one_sentence(tmp_path):
    turns = {"sequence_token_ids": [[1, 10, 11]], "loss_mask": [[False, True]]}
    rows = [a_row(1, sequence_token_ids=None, loss_mask=None), a_row(1, **turns), a_row(1, **turns)]
    rows[2] |= {"loss_mask": [[False, True, True]], "sampling_logprobs": [-0.5] * 3}
    write_rows(tmp_path, rows)
    run = RunFolder(tmp_path)
    write_tokens(tmp_path, 3, logprobs=[[-1], None, None])
    different = "the row's columns, or those in tokens/, have different numbers of tokens"
    for row, reason in enumerate((different, different, "shape mismatch")):
        found = completion(run, 5, "step", row)
        assert (found["sequences"], len(found["problems"])) == ([], 2)
        assert found["problems"][0].startswith(f"completions/step-000005.parquet cannot be read: {reason}")
    path = write_tokens(tmp_path, 1, logprobs=[[-1, -1]])
    assert (
        "tokens/step-000005.parquet has 1 rows, the completions file has 3."
        in completion(run, 5, "step", 0)["problems"]
    )
    path.write_bytes(path.read_bytes()[:-10])
    found = completion(run, 5, "step", 0)
    assert not found["recorded"] and found["problems"][0].startswith("tokens/step-000005.parquet cannot be read: ")


def test_why_a_row_of_a_large_step_has_no_recorded_tokens(tmp_path):
    write_rows(tmp_path, [a_row(1), a_row(2), a_row(3, end="environment_error")])
    write_tokens(tmp_path, 3, logprobs=[[-1], None, None])
    run = RunFolder(tmp_path)
    run.config = {"run": {"record_tokens": "auto"}}
    why = "Not recorded: run.record_tokens: auto records the first groups of large steps; true records all."
    assert [why in completion(run, 5, "step", row)["problems"] for row in range(3)] == [False, True, False]


def test_a_long_completion_is_sent_in_parts(tmp_path):
    write_rows(tmp_path, [a_row(1, length=100_000)])
    found = completion(RunFolder(tmp_path), 5, "step", 0)
    assert (found["num_tokens"], len(found["sequences"][0]["tokens"]["ids"])) == (100_000, 20_000)
    rest = completion(RunFolder(tmp_path), 5, "step", 0, offset=99_999)
    assert (rest["sequences"][0]["tokens"]["ids"], rest["sequences"][0]["offset"]) == ([100_009], 99_999)


def test_a_row_that_does_not_exist(tmp_path):
    write_rows(tmp_path, [a_row(1)])
    run = RunFolder(tmp_path)
    for row in (-1, 1):
        assert completion(run, 5, "step", row)["problems"] == (
            f"completions/step-000005.parquet has no row {row}: it has 1.",
        )
    missing = "No completions of step 6: the step is not done, its file is still being written, or it was deleted."
    assert completion(run, 6, "step", 0)["problems"] == (missing,)


def test_ids_are_numbers_of_their_row_group(tmp_path):
    write_rows(tmp_path, [a_row(i, length=i) for i in range(1, 40)], row_group_size=7)
    for row in (0, 6, 7, 38):
        assert len(completion(RunFolder(tmp_path), 5, "step", row)["sequences"][0]["tokens"]["ids"]) == row + 1
