"""Rows -> prompts -> order."""

import dataclasses
import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Split, Whitespace, WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cohort.data import PromptRenderer, PromptSet, PromptStream, build_prompts, describe_lost_text
from cohort.errors import UserError
from cohort.records import Prompt
from data_files import ROWS, read
from selection import examples

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


# Prompts


def test_text_becomes_a_user_message():
    assert rendered("two plus two") == "<s> [user] two plus two [assistant]"
    assert rendered("one", system_prompt="be brief") == "<s> [system] be brief [user] one [assistant]"
    assert rendered("one", system_prompt="") == "<s> [system] [user] one [assistant]"
    assert rendered("one", chat_template_kwargs={"enable_thinking": True}) == "<s> [user] one [assistant] [think]"


@pytest.mark.parametrize("text", ["<s> [user] one", "  <s> [user] one [assistant]"])
def test_text_that_a_template_has_rendered_is_refused(text: str):
    with pytest.raises(UserError) as caught:
        rendered(text)
    assert str(caught.value) == (
        "data.prompt='prompt': row 1: the text begins with '<s>', which the chat template writes as well, so it would "
        "be applied twice; use data.apply_chat_template: false, or a column with the plain text"
    )
    assert rendered(text, apply_chat_template=False).startswith("<s> [user] one")
    with pytest.raises(UserError, match="applied twice"):
        rendered([{"role": "user", "content": text}])
    assert rendered("one <s> two") == "<s> [user] one <s> two [assistant]"  # one may talk about it
    assert rendered("</s> one") == "<s> [user] </s> one [assistant]"  # this template does not write </s>


def lost(tokenizer: PreTrainedTokenizerFast, *contents: object) -> str | None:
    prompts = [Prompt(id=0, epoch=0, content=c, token_ids=np.zeros(1, np.int64), columns={}) for c in contents]
    return describe_lost_text(tokenizer, prompts)


def test_text_that_a_tokenizer_loses_is_named(tmp_path):
    """A tokenizer with bytes as tokens, saved as of a class that transformers builds with another pre-tokenizer."""
    made = Tokenizer(BPE())
    made.pre_tokenizer, made.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.train_from_iterator([], BpeTrainer(special_tokens=["<unk>"], initial_alphabet=ByteLevel.alphabet()))
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>").save_pretrained(tmp_path)
    assert lost(AutoTokenizer.from_pretrained(tmp_path), "What is 2 + 2?", "Größe \U0001f600\n x") is None
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tokenizer_class": "GemmaTokenizer"}))
    said = lost(AutoTokenizer.from_pretrained(tmp_path), "What is 2 + 2?", [{"role": "user", "content": "fine"}])
    assert said.startswith(
        "warning: the tokenizer loses text in 1 of 2 prompts that were tried: 'What is 2 + 2?' comes back as "
        "'What<unk>is<unk>2<unk>+<unk>2?'. If you made the tokenizer yourself, transformers may read it with another"
    )


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "text", "kept"),
    [
        (normalizers.BertNormalizer(lowercase=True), Whitespace(), "TWO  plus\ntwo", True),
        (normalizers.NFKC(), Whitespace(), "ｔｗｏ", True),
        (None, Whitespace(), " two plus ", True),
        (None, Whitespace(), "two, plus", False),  # there is no comma
        (normalizers.Replace(" ", ""), Split("two", "isolated"), "two two", False),
    ],
)
def test_tokenizers_may_normalize_but_not_join_words(normalizer, pre_tokenizer, text, kept):
    made = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        made.normalizer = normalizer
    if not isinstance(pre_tokenizer, Whitespace):
        made.decoder = decoders.Fuse()
    assert (lost(PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>"), text) is None) == kept


def test_tools_are_passed_to_the_template():
    template = "{% for tool in tools or [] %}{{ '[think] ' + tool.function.name }}{% endfor %}" + TEMPLATE
    tools = [{"type": "function", "function": {"name": "plus"}}]
    for schemas, expected in ((None, ""), (tools, "[think] plus ")):
        renderer = PromptRenderer(make_tokenizer(template.replace("bos_token", "' '")), tools=schemas)
        assert words(renderer.render("one", where="")[1]) == f"{expected}[user] one [assistant]"


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
        (7, "a prompt is text or a list of chat messages, not 7"),
        ({"role": "user", "content": "one"}, "not {'role': 'user'"),
        (" \n", "the text is empty"),
        ("a \ud800", "character 3 of the text is not valid Unicode"),
        ([], "the list of chat messages is empty"),
        (["one"], "message 1: a message is"),
        ([{"from": "human", "value": "one"}], 'message 1: has no "role" such as "user". Its keys: from, value'),
        ([{"role": "user", "content": None}], 'message 1: its "content" must be text, not None'),
        ([{"role": "user", "content": [{"type": "image"}]}], 'its "content" must be text, not [{'),
        ([{"role": "user", "content": ""}], "message 1: the text is empty"),
        (
            [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}],
            "the last message is the assistant's",
        ),
        ('[{"role": "user", "content": "one"}]', "chat messages as text"),
        ("[{'content': 'one', 'role': 'user'}]", "chat messages as text"),
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
        UserError, match=r"no chat template; put a chat_template\.jinja .* or use data\.apply_chat_templ"
    ):
        PromptRenderer(make_tokenizer(None))
    with pytest.raises(UserError, match=r"never reads 'enable_thinkng'.*; did you mean enable_thinking"):
        rendered("one", chat_template_kwargs={"enable_thinkng": False})
    with pytest.raises(UserError, match="'tokenize' is set by Cohort"):
        rendered("one", chat_template_kwargs={"tokenize": False})
    refusing = make_tokenizer("{{ raise_exception('System role not supported') }}")
    with pytest.raises(UserError, match=r"row 4: .* \(roles: system, user\): .*System role not supported"):
        PromptRenderer(refusing, system_prompt="be").render("one", where="data.prompt='prompt': row 4")
    with pytest.raises(UserError, match="the prompt has no tokens"):
        PromptRenderer(make_tokenizer("{{ '' }}")).render("one", where="")
    with pytest.raises(UserError, match=r"chat messages need the chat template; use data\.apply_chat_template=true"):
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
        "eval.prompt='promt': the data has no such column; did you mean prompt? Columns: prompt, answer"
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
    for part in ["rollout.max_prompt_tokens=4", "row 2 of data.path has 6 tokens", "2 of 4", "use at least 8"]:
        assert part in str(error.value)
    for overlong in ("drop", "error"):
        with pytest.raises(UserError, match=r"no prompt of data\.path is that short; the shortest of 4 has 4 .* 8; "):
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
@examples(100)
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
@examples(100)
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
        (PromptStream(prompt_set(6), seed=3), "saved with num_prompts=5, but this run has num_prompts=6"),
        (PromptStream(prompt_set(5, "line {}"), seed=3), "prompts_sha256="),
        (PromptStream(prompt_set(5), seed=4), "saved with seed=3, but this run has seed=4"),
        (PromptStream(prompt_set(5), seed=3, shuffle=False), "saved with shuffle=True, but this run has shuffle=False"),
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
