"""Files -> rows -> prompts -> order."""

import csv
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from cohort.data import PromptRenderer, PromptSet, PromptStream, build_prompts, read_rows
from cohort.errors import UserError
from cohort.records import Prompt

ROWS = [{"prompt": "two plus two", "answer": "007"}, {"prompt": "one", "answer": "1.0"}]
WORDS = ["<s>", "</s>", "<unk>", "[system]", "[user]", "[assistant]", "[think]", "be", "brief", "one", "two", "plus"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ ' [' + m.role + '] ' + m.content }}{% if m.name is defined %} name"
    "{% endif %}{% endfor %}{% if add_generation_prompt %} [assistant]{% endif %}{% if enable_thinking %} [think]"
    "{% endif %}"
)


def make_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per word; adds <s> in front of plain text, as Llama's does. Unknown words are <unk>."""
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = template
    return fast


def words(token_ids: np.ndarray) -> str:
    return " ".join(WORDS[token_id] for token_id in token_ids)


def rendered(value: object, **settings: object) -> str:
    _, token_ids = PromptRenderer(make_tokenizer(), **settings).render(value, where="data.prompt='prompt': row 1")
    assert token_ids.dtype == np.int64
    return words(token_ids)


def read(folder: Path, path: str, **options: str) -> list[dict]:
    return read_rows(path, field="data.path", base_dir=folder, **options)


def refusal(folder: Path, path: str, **options: str) -> str:
    with pytest.raises(UserError) as error:
        read(folder, path, **options)
    message = str(error.value)
    assert message.startswith(f"data.path={path!r}: ")
    return message


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


# Files


def write_file(file: Path) -> None:
    """Writes ROWS in the format that the ending names."""
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), file)
    elif file.suffix == ".csv":
        with file.open("w", newline="") as out:
            writer = csv.DictWriter(out, ["prompt", "answer"])
            writer.writeheader()
            writer.writerows(ROWS)
    elif file.suffix == ".json":
        file.write_text(json.dumps(ROWS, indent=2))
    else:
        file.write_text(lines(*ROWS))


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a.parquet", "a.csv"])
def test_every_file_format_gives_the_same_rows(tmp_path, name):
    write_file(tmp_path / name)
    assert read(tmp_path, name) == ROWS
    assert read(Path("/nowhere"), str(tmp_path / name)) == ROWS


def test_working_directory_is_the_second_place(tmp_path, monkeypatch):
    here, config_folder = tmp_path / "here", tmp_path / "config"
    here.mkdir()
    config_folder.mkdir()
    monkeypatch.chdir(here)
    (here / "a.jsonl").write_text(lines({"prompt": "here"}))
    assert read(config_folder, "a.jsonl") == [{"prompt": "here"}]
    (config_folder / "a.jsonl").write_text(lines({"prompt": "beside the configuration"}))
    assert read(config_folder, "a.jsonl") == [{"prompt": "beside the configuration"}]


def test_json_lines_skip_blank_lines_and_a_byte_order_mark(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        b'\xef\xbb\xbf{"prompt": "a\xe2\x80\xa8b"}\r\n\r\n  \n{"prompt": "c", "level": 2}'
    )
    assert read(tmp_path, "a.jsonl") == [{"prompt": "a\u2028b"}, {"prompt": "c", "level": 2}]


@pytest.mark.parametrize(
    "text", ['{"prompt": "a"}\n{"prompt": "b"}\n', '\n\ufeff\n [{"prompt": "a"}, {"prompt": "b"}]']
)
def test_json_is_lines_or_an_array(tmp_path, text):
    (tmp_path / "a.json").write_text(text.replace("\n\ufeff", "\ufeff\n"))
    assert read(tmp_path, "a.json") == [{"prompt": "a"}, {"prompt": "b"}]


def test_csv_values_stay_strings(tmp_path):
    long_text = "x" * 200_000
    (tmp_path / "a.csv").write_text(
        f'prompt,answer,note\n"a, ""b""\nc",007,\n\n{long_text},1e3,NA\n', encoding="utf-8-sig"
    )
    csv.field_size_limit(131_072)
    assert read(tmp_path, "a.csv") == [
        {"prompt": 'a, "b"\nc', "answer": "007", "note": ""},
        {"prompt": long_text, "answer": "1e3", "note": "NA"},
    ]
    assert csv.field_size_limit() == 131_072


def test_missing_file_names_similar_files(tmp_path):
    (tmp_path / "train.jsonl").write_text(lines(*ROWS))
    message = refusal(tmp_path, "trian.jsonl")
    assert f"no such file: not in the folder {tmp_path}. Similarly named there: train.jsonl." in message
    assert "Data files there: train.jsonl." in refusal(tmp_path, "questions.parquet")
    assert f"the folder {tmp_path / 'gone'} does not exist" in refusal(tmp_path, "gone/train.jsonl")
    assert "no such file" in refusal(tmp_path, "./folder/of/files")


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("a.jsonl", b"", ["the file is empty (0 bytes)"]),
        ("a.jsonl", b"\n \n", ["has no rows"]),
        ("a.json", b"[]", ["has no rows"]),
        ("a.csv", b"prompt,answer\n", ["has no rows"]),
        (
            "a.jsonl",
            b'{"p": 1}\n\n{"p": 2,, "q": 3}\n',
            ["line 3 is not valid JSON", "character 9", '{"p": 2,, "q": 3}'],
        ),
        ("a.json", b'[{"p": 1},\n {"p": }]', ["the file is not valid JSON", "line 2, character 8", '{"p": }']),
        ("a.json", b'{\n "data": []\n}', ["line 1 is not valid JSON", "one array of objects"]),
        ("a.jsonl", b'{"p": 1}\n["p", 2]\n', ['line 2 holds ["p", 2], which is not an object', '{"prompt":']),
        ("a.json", b'[{"p": 1}, "p"]', ['element 2 holds "p", which is not an object']),
        ("a.jsonl", '{"p": "é"}'.encode("latin-1"), ["line 1 is not UTF-8 text (byte 8)"]),
        ("a.jsonl", b"[" * 100_000, ["line 1 cannot be read as JSON"]),
        ("a.csv", b"p,q\n1,2\n\n1,2,3\n", ["line 4 has 3 values", "names 2 columns (p, q)", "double quotes"]),
        ("a.csv", b'p,q\n1,"2', ["line 2 is not valid CSV"]),
        ("a.csv", b"p,p\n1,2\n", ["names the column 'p' more than once"]),
        ("a.csv", b"p\n\xff\xfe\n", ["not UTF-8"]),
        ("a.parquet", b"PAR1 this is not Parquet", ["not a readable Parquet file"]),
        ("a.txt", b"hello", ["the ending '.txt' is not supported", ".jsonl, .ndjson, .json, .parquet, .csv"]),
        ("a.tar", b"hello", ["the ending '.tar' is not supported"]),
    ],
)
def test_broken_files_say_what_is_wrong(tmp_path, name, content, parts):
    (tmp_path / name).write_bytes(content)
    message = refusal(tmp_path, name)
    for part in parts:
        assert part in message


def test_parquet_without_rows_is_refused(tmp_path):
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "a.parquet")
    assert "has no rows" in refusal(tmp_path, "a.parquet")


def test_options_without_effect_are_refused_for_files(tmp_path):
    write_file(tmp_path / "a.jsonl")
    assert read(tmp_path, "a.jsonl", split="test") == ROWS  # the default of the evaluation's split
    assert "split='validation' has no effect" in refusal(tmp_path, "a.jsonl", split="validation")
    assert "name='main' has no effect" in refusal(tmp_path, "a.jsonl", name="main")
    assert "is empty. Give a .jsonl" in refusal(tmp_path, "")


# Folders and ids


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path_factory, monkeypatch):
    """`datasets` copies what it reads into its cache: keep that out of the home folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "cache")


def test_folder_saved_by_datasets(tmp_path):
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=data, test=data.select([1])).save_to_disk(tmp_path / "two")
    assert read(tmp_path, "one") == ROWS
    assert read(tmp_path, "two") == ROWS
    assert read(tmp_path, "two", split="test") == ROWS[1:]
    assert "has no split 'dev'. Splits: train, test." in refusal(tmp_path, "two", split="dev")
    assert "split='dev' has no effect" in refusal(tmp_path, "one", split="dev")
    assert "name='main' has no effect" in refusal(tmp_path, "one", name="main")
    next((tmp_path / "one").glob("*.arrow")).unlink()
    assert "cannot be read" in refusal(tmp_path, "one")


@pytest.mark.parametrize("ending", [".parquet", ".csv", ".jsonl", ".json"])
def test_folder_of_data_files(tmp_path, ending):
    folder = tmp_path / "questions"
    folder.mkdir()
    write_file(folder / f"train-0{ending}")
    write_file(folder / f"train-1{ending}")
    write_file(folder / f"test{ending}")
    assert read(tmp_path, "questions") == ROWS + ROWS
    assert read(tmp_path, "questions", split="test") == ROWS
    assert "has no split 'dev'. Splits: train, test." in refusal(tmp_path, "questions", split="dev")


def test_folder_of_other_files_and_slices(tmp_path):
    text, questions, table = tmp_path / "text", tmp_path / "questions", tmp_path / "table"
    for folder in (text, questions, table):
        folder.mkdir()
    (text / "train.txt").write_text("one\ntwo\n")
    write_file(questions / "train.jsonl")
    write_file(table / "train.csv")
    assert read(tmp_path, "text") == [{"text": "one"}, {"text": "two"}]
    assert read(tmp_path, "questions", split="train[1:]") == ROWS[1:]
    assert "slices of CSV folders (split='train[1:]') are not supported" in refusal(
        tmp_path, "table", split="train[1:]"
    )


def test_broken_folders_say_what_is_wrong(tmp_path):
    empty, broken = tmp_path / "empty", tmp_path / "broken"
    empty.mkdir()
    broken.mkdir()
    (broken / "train.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    assert "should hold .jsonl" in refusal(tmp_path, "empty")
    assert "file 'train.jsonl': line 2 is not valid JSON" in refusal(tmp_path, "broken")
    assert "'main' not found" in refusal(tmp_path, "broken", name="main")


def test_hub_id(tmp_path, monkeypatch):
    asked = []

    def load_dataset(path: str, *, name: str | None, split: str) -> datasets.Dataset:
        asked.append((path, name, split))
        if path == "nobody/nothing":
            raise ConnectionError("Couldn't reach 'nobody/nothing' on the Hub\nTraceback ...")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read(tmp_path, "openai/gsm8k", name="main", split="test") == ROWS
    assert read(tmp_path, "user/math-v1.5") == ROWS
    assert asked == [("openai/gsm8k", "main", "test"), ("user/math-v1.5", None, "train")]
    message = refusal(tmp_path, "nobody/nothing")
    assert "ConnectionError: Couldn't reach 'nobody/nothing' on the Hub. Nor is it a file or folder here" in message


# Prompts


def test_text_becomes_a_user_message():
    assert rendered("two plus two") == "<s> [user] two plus two [assistant]"
    assert rendered("one", system_prompt="be brief") == "<s> [system] be brief [user] one [assistant]"
    assert rendered("one", system_prompt="") == "<s> [system] [user] one [assistant]"
    assert rendered("one", chat_template_kwargs={"enable_thinking": True}) == "<s> [user] one [assistant] [think]"


def test_messages_keep_their_own_system_message():
    user = {"role": "user", "content": "one"}
    own = [{"role": "system", "content": "be"}, user]
    assert rendered([user], system_prompt="be brief") == "<s> [system] be brief [user] one [assistant]"
    assert rendered(own, system_prompt="be brief") == "<s> [system] be [user] one [assistant]"
    assert own == [{"role": "system", "content": "be"}, user]  # not changed


def test_without_template_text_is_tokenised_once_with_the_tokenizers_own_special_tokens():
    assert rendered("two plus", apply_chat_template=False) == "<s> two plus"
    assert rendered("<s> two plus", apply_chat_template=False) == "<s> two plus"
    assert PromptRenderer(make_tokenizer(None), apply_chat_template=False).render("one", where="")[0] == "one"


def test_tokenizer_truncation_does_not_cut_prompts():
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(2)
    for apply_chat_template in (True, False):
        renderer = PromptRenderer(tokenizer, apply_chat_template=apply_chat_template)
        assert words(renderer.render("one plus two", where="")[1]).count("one plus two") == 1


def test_arrow_structs_are_messages(tmp_path):
    table = pa.Table.from_pylist(
        [
            {"prompt": [{"role": "user", "content": "one", "name": "x"}], "answer": "1"},
            {"prompt": [{"role": "system", "content": "be"}, {"role": "user", "content": "two"}], "answer": "2"},
        ]
    )
    pq.write_table(table, tmp_path / "a.parquet")
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    for path in ("a.parquet", "saved"):
        rows = read(tmp_path, path)
        prompts = build_prompts(rows, PromptRenderer(make_tokenizer()), max_prompt_tokens=99, overlong="error").prompts
        # Arrow gives each message the key `name`; where it is null, the template must not see it.
        assert prompts[1].content == [{"role": "system", "content": "be"}, {"role": "user", "content": "two"}]
        assert words(prompts[1].token_ids) == "<s> [system] be [user] two [assistant]"
        assert words(prompts[0].token_ids) == "<s> [user] one <unk> [assistant]"


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (None, "a prompt is text or a list of chat messages, not missing"),
        (7, "a prompt is text or a list of chat messages, not int 7"),
        ({"role": "user", "content": "one"}, "not dict"),
        (" \n", "the text is empty"),
        ("a \ud800", "character 3 of the text is not valid Unicode"),
        ([], "the list of chat messages is empty"),
        (["one"], "message 1: a message is"),
        ([{"from": "human", "value": "one"}], 'message 1: has no "role" such as "user". Its keys: from, value.'),
        ([{"role": "user", "content": None}], 'message 1: its "content" must be text, not NoneType'),
        ([{"role": "user", "content": [{"type": "image"}]}], 'its "content" must be text, not list'),
        ([{"role": "user", "content": ""}], "message 1: the text is empty"),
        (
            [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}],
            "the last message is the assistant's",
        ),
        ('[{"role": "user", "content": "one"}]', "chat messages written out as text"),
        ("[{'content': 'one', 'role': 'user'}]", "chat messages written out as text"),
    ],
)
def test_malformed_prompts_name_their_row(value, part):
    with pytest.raises(UserError) as error:
        build_prompts(
            [{"prompt": "one"}, {"prompt": value}],
            PromptRenderer(make_tokenizer()),
            max_prompt_tokens=99,
            overlong="drop",
        )
    assert str(error.value).startswith("data.prompt='prompt': row 2")
    assert part in str(error.value)


def test_text_that_only_mentions_messages_is_a_prompt():
    assert rendered('[{"role": "user"}] what is this').startswith("<s> [user] <unk>")


def test_template_errors_are_explained():
    with pytest.raises(
        UserError, match=r"no chat template\. Put a chat_template\.jinja .* or set data\.apply_chat_templ"
    ):
        PromptRenderer(make_tokenizer(None))
    with pytest.raises(UserError, match=r"never reads 'enable_thinkng'.* Did you mean 'enable_thinking'"):
        rendered("one", chat_template_kwargs={"enable_thinkng": False})
    with pytest.raises(UserError, match="'tokenize' is set by Cohort"):
        rendered("one", chat_template_kwargs={"tokenize": False})
    refusing = make_tokenizer("{{ raise_exception('System role not supported') }}")
    with pytest.raises(UserError, match=r"row 4: .* \(roles: system, user\): .*System role not supported"):
        PromptRenderer(refusing, system_prompt="be").render("one", where="data.prompt='prompt': row 4")
    with pytest.raises(UserError, match="the prompt has no tokens"):
        PromptRenderer(make_tokenizer("{{ '' }}")).render("one", where="")
    with pytest.raises(UserError, match=r"chat messages need the chat template\. Set data\.apply_chat_template=true"):
        rendered([{"role": "user", "content": "one"}], apply_chat_template=False)


def test_columns_are_the_union_over_rows():
    rows = [{"prompt": "one", "answer": "1"}, {"prompt": "two", "level": 3}]
    prompts = build_prompts(rows, PromptRenderer(make_tokenizer()), max_prompt_tokens=99, overlong="error").prompts
    assert [prompt.columns for prompt in prompts] == [{"answer": "1", "level": None}, {"answer": None, "level": 3}]
    assert [(prompt.id, prompt.epoch, prompt.content) for prompt in prompts] == [(0, 0, "one"), (1, 0, "two")]


def test_missing_prompt_column_names_the_nearest():
    renderer = PromptRenderer(make_tokenizer(), prompt_column="promt")
    with pytest.raises(UserError) as error:
        build_prompts(ROWS, renderer, max_prompt_tokens=99, overlong="drop", field="eval.path")
    assert str(error.value) == (
        "eval.prompt='promt': the data has no such column. Did you mean 'prompt'? Columns: prompt, answer."
    )
    with pytest.raises(UserError, match=r"eval\.path: the data has no rows"):
        build_prompts([], renderer, max_prompt_tokens=99, overlong="drop", field="eval.path")


def test_overlong_prompts_are_dropped_or_refused():
    rows = [{"prompt": "one"}, {"prompt": "one plus two"}, {"prompt": "two"}, {"prompt": "one plus two plus one"}]
    renderer = PromptRenderer(make_tokenizer())
    kept = build_prompts(rows, renderer, max_prompt_tokens=4, overlong="drop")
    assert [prompt.id for prompt in kept.prompts] == [0, 2]
    assert kept.num_dropped_overlong == 2
    assert build_prompts(rows, renderer, max_prompt_tokens=8, overlong="error").num_dropped_overlong == 0
    with pytest.raises(UserError) as error:
        build_prompts(rows, renderer, max_prompt_tokens=4, overlong="error")
    for part in ["rollout.max_prompt_tokens=4", "row 2 of data.path has 6 tokens", "2 of 4", "Raise it to 8"]:
        assert part in str(error.value)
    for overlong in ("drop", "error"):
        with pytest.raises(UserError, match=r"no prompt of data\.path is that short\. The shortest of 4 has 4 .* 8\. "):
            build_prompts(rows, renderer, max_prompt_tokens=3, overlong=overlong)


# Order


def prompt_set(num_prompts: int, content: str = "row {}") -> PromptSet:
    """Rows with gaps in their numbers, as after dropping."""
    prompts = tuple(
        Prompt(id=2 * row, epoch=0, content=content.format(row), token_ids=np.array([row]), columns={})
        for row in range(num_prompts)
    )
    return PromptSet(prompts=prompts, num_dropped_overlong=num_prompts)


def visits(prompts: list[Prompt]) -> list[tuple[int, int]]:
    return [(prompt.epoch, prompt.id) for prompt in prompts]


def test_order_is_pinned():
    """A changed order would break the resumption of saved runs: these numbers must never change."""
    stream = PromptStream(prompt_set(5), seed=7)
    assert [prompt.id for prompt in stream.take(10)] == [8, 6, 4, 2, 0, 2, 8, 6, 4, 0]
    assert visits(PromptStream(prompt_set(3), seed=7, shuffle=False).take(4)) == [(0, 0), (0, 2), (0, 4), (1, 0)]


@given(num_prompts=st.integers(1, 12), seed=st.integers(0, 2**70), sizes=st.lists(st.integers(0, 30), max_size=12))
@settings(max_examples=100, deadline=None)
def test_every_epoch_visits_each_prompt_once(num_prompts, seed, sizes):
    prompts = prompt_set(num_prompts)
    stream = PromptStream(prompts, seed=seed)
    taken = [visit for size in sizes for visit in visits(stream.take(size))]
    assert taken == visits(PromptStream(prompts, seed=seed).take(sum(sizes)))
    assert len(set(taken)) == len(taken)
    for epoch in range(len(taken) // num_prompts):
        visited = taken[epoch * num_prompts : (epoch + 1) * num_prompts]
        assert sorted(visited) == [(epoch, prompt.id) for prompt in prompts.prompts]


@given(
    num_prompts=st.integers(1, 12),
    seed=st.integers(0, 2**32),
    shuffle=st.booleans(),
    before=st.integers(0, 40),
    used=st.integers(0, 40),
)
@settings(max_examples=100, deadline=None)
def test_resume_anywhere_continues_the_uninterrupted_order(num_prompts, seed, shuffle, before, used):
    stream = PromptStream(prompt_set(num_prompts), seed=seed, shuffle=shuffle)
    stream.take(before)
    state = json.loads(json.dumps(stream.state()))
    assert (state["epoch"], state["position"]) == divmod(before, num_prompts)
    resumed = PromptStream(prompt_set(num_prompts), seed=seed, shuffle=shuffle)
    resumed.take(used)  # whatever the stream did before, only the state counts
    resumed.restore(state)
    assert visits(resumed.take(30)) == visits(stream.take(30))
    assert resumed.state() == stream.state()


def test_epochs_and_seeds_differ():
    stream = PromptStream(prompt_set(50), seed=0)
    first, second = ([prompt.id for prompt in stream.take(50)] for _ in range(2))
    other = [prompt.id for prompt in PromptStream(prompt_set(50), seed=1).take(50)]
    assert len({tuple(order) for order in (first, second, other, sorted(first))}) == 4


@pytest.mark.parametrize(
    ("other", "part"),
    [
        (PromptStream(prompt_set(6), seed=3), "saved with num_prompts=5, this run has num_prompts=6"),
        (PromptStream(prompt_set(5, "line {}"), seed=3), "prompts_sha256="),
        (PromptStream(prompt_set(5), seed=4), "saved with seed=3, this run has seed=4"),
        (PromptStream(prompt_set(5), seed=3, shuffle=False), "saved with shuffle=True, this run has shuffle=False"),
    ],
)
def test_state_of_another_order_is_refused(other, part):
    stream = PromptStream(prompt_set(5), seed=3)
    stream.take(7)
    with pytest.raises(UserError) as error:
        other.restore(stream.state())
    assert str(error.value).startswith("data.path: ")
    assert part in str(error.value)
    assert other.state()["epoch"] == 0


def test_a_date_in_the_template_does_not_prevent_resuming():
    today = PromptStream(prompt_set(4), seed=0)
    today.take(3)
    prompts = tuple(dataclasses.replace(p, token_ids=np.append(p.token_ids, 9)) for p in prompt_set(4).prompts)
    tomorrow = PromptStream(PromptSet(prompts=prompts, num_dropped_overlong=0), seed=0)
    tomorrow.restore(today.state())
    assert visits(tomorrow.take(5)) == visits(today.take(5))


def test_import_is_light():
    code = "import sys, cohort.data; print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
