"""Multi-turn conversations over chat templates: what was sampled stays as it is, bit for bit.

The templates in `templates/` are small and behave like those of the models they are named after. The laws also hold for
the real templates, which TRL ships; they are tested where TRL is installed.
"""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_tokenizers import make_tokenizer, trl_templates
from cohort.chat import ChatTemplate
from cohort.errors import UserError
from cohort.records import join_calls
from conversations import CATS, FAMILIES, LOADERS, MORE, USER, Conversation, Family, answered
from selection import examples, mostly_slow, slow

over_families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
over_sources = pytest.mark.parametrize(
    "source", mostly_slow(LOADERS, "fixture", reason="the fixtures have the same control flow")
)

# The law: a call's context goes on from all earlier ids, or the template rewrites history and a new sequence starts.


@over_sources
@over_families
def test_law_contexts_extend_what_was_sampled_unless_the_template_rewrites_it(family: Family, source: str):
    chat = Conversation(family, source, [{"role": "user", "content": "find cats"}])
    turns = [("look", "", CATS), ("look again", "", family.calls), ("done", "Two cats.", []), ("bye", "Bye.", [])]
    rewrites = []
    for number, (reasoning, content, calls) in enumerate(turns):
        sampled = family.write(reasoning if family.reasons else "", content, calls)
        chat.sample(sampled)
        assert chat.reply.errors == ()
        assert [(call.name, call.arguments) for call in chat.reply.tool_calls] == list(calls)
        assert chat.reply.content == content
        assert chat.reply.reasoning == (reasoning if family.reasons else None)
        if number + 1 == len(turns):
            break
        new = chat.results() or [{"role": "user", "content": "thanks"}]
        # what was sampled is what the template itself would write, so the two texts can be compared
        whole = chat.rendered(new)
        rewritten = not whole.startswith(chat.text(chat.context_ids) + sampled)
        suffix = chat.add(*new)
        assert (suffix is None) == rewritten
        assert chat.text(chat.context_ids) == whole
        rewrites.append(rewritten)
    assert tuple(rewrites) == family.rewrites
    sequences = join_calls(chat.calls)
    assert len(sequences) == 1 + sum(rewrites)
    trained = np.concatenate([sequence.token_ids[sequence.loss_mask] for sequence in sequences])
    assert np.array_equal(trained, np.concatenate([call.token_ids for call in chat.calls]))


@over_sources
@over_families
def test_law_a_call_cut_by_length_gets_its_end_of_turn_token_from_the_suffix(family: Family, source: str):
    for content, calls in [("Two ca", []), ("", CATS)]:
        chat = Conversation(family, source, [{"role": "user", "content": "find cats"}])
        whole_turn = family.write("", content, calls)
        last = chat.ids(whole_turn)[-1]
        chat.sample(chat.ids(whole_turn)[:-1], finish_reason="length")
        new = chat.results() or [{"role": "user", "content": "go on"}]
        whole = chat.rendered(new)
        suffix = chat.add(*new)
        if not whole.startswith(chat.text(chat.calls[0].context_ids) + chat.text(chat.calls[0].token_ids)):
            assert suffix is None
            continue
        assert suffix is not None
        assert chat.text(chat.context_ids) == whole
        if whole_turn.endswith("<|return|>"):  # gpt-oss writes <|end|> in its place once another message follows
            assert chat.text(suffix).startswith("<|end|>")
        else:
            assert suffix[0] == last


@over_sources
@over_families
def test_law_other_spellings_of_a_turn_get_the_same_suffix(family: Family, source: str):
    """JSON with other spaces, spaces around the turn, and any tokenization of the same text."""
    canonical = family.write("", "", CATS)
    suffixes = []
    for sampled in (canonical, canonical.replace('": ', '":  ').replace("<tool_call>", " <tool_call> ")):
        for split in (False, True):
            chat = Conversation(family, source, [{"role": "user", "content": "find cats"}])
            ids = chat.ids(sampled)
            if split:  # every merged token byte by byte
                added = chat.tokenizer.added_tokens_decoder
                pieces = [
                    [i]
                    if int(i) in added
                    else chat.tokenizer.convert_tokens_to_ids(list(chat.tokenizer.convert_ids_to_tokens(int(i))))
                    for i in ids
                ]
                ids = np.array([i for piece in pieces for i in piece], dtype=np.int64)
            chat.sample(ids)
            assert [(call.name, call.arguments) for call in chat.reply.tool_calls] == CATS, sampled
            suffix = chat.add(*[{**result, "tool_call_id": "call00000"} for result in chat.results()])
            assert suffix is not None
            assert np.array_equal(chat.context_ids[: -len(suffix)], np.concatenate([chat.calls[0].context_ids, ids]))
            suffixes.append(suffix.tolist())
    assert all(suffix == suffixes[0] for suffix in suffixes)


@over_sources
@over_families
@examples(300, quick=5)
@given(data=st.data())
def test_law_any_sampled_ids_survive(family: Family, source: str, data: st.DataObject):
    chat = Conversation(family, source, [{"role": "user", "content": "find cats"}])
    pieces = st.one_of(
        st.sampled_from([*family.tokens[0][:1], *family.tokens[1], "{", '"name": "search"', "}", "\n", "too", " "]),
        st.sampled_from([family.write("why", "", CATS), family.write("", "some text", [])]),
        st.text(max_size=5),
    )
    for _ in range(2):
        text = "".join(data.draw(st.lists(pieces, max_size=6)))
        noise = data.draw(st.lists(st.integers(0, len(chat.tokenizer) - 1), max_size=6))
        ids = np.concatenate([chat.ids(text.encode(errors="ignore").decode()), np.array(noise, dtype=np.int64)])
        chat.sample(ids, finish_reason=data.draw(st.sampled_from(["stop", "length"])))
        new = chat.results()[:1] or [{"role": "user", "content": "go on"}]
        chat.add(*new)
        previous = np.concatenate([chat.calls[-1].context_ids, ids])
        extends = np.array_equal(chat.context_ids[: len(previous)], previous)
        assert extends or chat.text(chat.context_ids) == chat.rendered([])


@slow("the laws above have a template of each family")
def test_law_every_template_of_trl_keeps_what_was_sampled_or_starts_a_new_sequence():
    """Answers with and without reasoning, ended by the first control token that the template writes after them."""
    num_continued = num_rewritten = 0
    for name, template in trl_templates().items():
        special = sorted({"<|im_end|>", "<s>", *re.findall(r"<[|｜]?[A-Za-z_/▁]+[|｜]?>|\[/?[A-Z_]+\]", template)})
        tokenizer = make_tokenizer(template, (special, []))
        chat = ChatTemplate(tokenizer)
        for keys in ({}, {"reasoning_content": "because"}):
            history = answered(**keys)
            try:
                context_ids, whole = chat.render([USER]), tokenizer.decode(chat.render([*history, MORE]).tolist())
            except UserError:  # wants lists of parts, as templates for images do
                continue
            context = tokenizer.decode(context_ids.tolist())
            kept = whole.startswith(context) and all(text in whole for text in ("hello", *keys.values()))
            turn = whole[len(context) :]
            content_end = turn.index("hello") + len("hello") if kept else 0
            turn_end = re.compile("|".join(map(re.escape, special))).search(turn, content_end).end() if kept else 0
            for end, finish_reason in ((turn_end, "stop"), (content_end, "length")):
                ids = np.array(tokenizer(turn[:end] or "?", add_special_tokens=False)["input_ids"], dtype=np.int64)
                suffix = chat.suffix(history, [MORE], sampled_ids=ids, finish_reason=finish_reason)
                assert (suffix is not None) == kept, name
                if suffix is not None:
                    assert tokenizer.decode(np.concatenate([context_ids, ids, suffix]).tolist()) == whole, name
            num_continued += kept
            num_rewritten += not kept
    assert num_continued > 50
    assert num_rewritten > 30
