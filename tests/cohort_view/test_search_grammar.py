"""The language of a search: what it parses to, what it refuses and where."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort_view.search.grammar import (
    MAX_CONDITIONS,
    MAX_DEPTH,
    And,
    Columns,
    Compare,
    Contains,
    IsIn,
    IsNull,
    Matches,
    Node,
    Not,
    Or,
    QuerySyntaxError,
    parse_query,
    to_text,
)

COLUMNS = Columns(["reward", "rewards/math", "rewards/my.own reward`s", "details/math", "environment/score"])


def parse(text: str) -> Node:
    return parse_query(text, COLUMNS)


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("reward < 0.2 and length > 500", And((Compare("reward", "<", 0.2), Compare("length", ">", 500.0)))),
        ('text ~ "a\\d+"', Matches("text", "a\\d+")),
        ('text !~ "a"', Not(Matches("text", "a"))),
        ('text contains "abc"', Contains("text", "abc")),
        ("prompt not contains abc", Not(Contains("prompt", "abc"))),
        ("therefore", Contains("text", "therefore")),
        ('"two words"', Contains("text", "two words")),
        ("two words", And((Contains("text", "two"), Contains("text", "words")))),
        ("don't 42", And((Contains("text", "don't"), Contains("text", "42")))),
        ("reward", Contains("text", "reward")),
        ("rewards.math == 0", Compare("rewards/math", "==", 0.0)),
        ("rewards/math == 0", Compare("rewards/math", "==", 0.0)),
        ("`rewards/my.own reward``s` > 1", Compare("rewards/my.own reward`s", ">", 1.0)),
        ("completion = abc", Compare("text", "==", "abc")),
        ("end == length", Compare("end", "==", "length")),
        ("end <> 'length'", Compare("end", "!=", "length")),
        ("kind in (step, replaced)", IsIn("kind", ("step", "replaced"))),
        ("step not in (1, 2)", Not(IsIn("step", (1.0, 2.0)))),
        ("error is null", IsNull("error")),
        ("error IS NOT NULL", Not(IsNull("error"))),
        ("advantage >= -1.5e-3", Compare("advantage", ">=", -0.0015)),
        ("advantage<+.5", Compare("advantage", "<", 0.5)),
        ("a or b c", Or((Contains("text", "a"), And((Contains("text", "b"), Contains("text", "c")))))),
        ("(a or b) not c", And((Or((Contains("text", "a"), Contains("text", "b"))), Not(Contains("text", "c"))))),
        ('"say ""hi"""', Contains("text", 'say "hi"')),
        ("日本 😀", And((Contains("text", "日本"), Contains("text", "😀")))),
    ],
)
def test_queries(text: str, tree: Node):
    assert parse(text) == tree


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("", 0, "the query is empty: enter text to find or a condition such as reward < 0.2"),
        ("  lenght > 5", 2, "unknown column 'lenght'; did you mean length?"),
        ("rewards.mth == 0", 0, "unknown column 'rewards.mth'; did you mean rewards/math?"),
        ("xyzzy is null", 0, "unknown column 'xyzzy'; put text to search for in quotes"),
        ("reward <", 8, "expected a number, since reward is one, found the end of the query"),
        ("reward < high", 9, "expected a number, since reward is one, found 'high'"),
        ("reward < 1e999", 9, "1e999 is too large for a number"),
        ("reward == null", 10, "nothing compares with null: write reward is null"),
        ("reward is high", 10, "expected 'null' or 'not null' after 'is', found 'high'"),
        ('reward ~ "a"', 7, "reward is a number: use <, <=, >, >=, == or !="),
        ("text < abc", 5, "text is text: use ==, !=, contains or ~"),
        ("text ~ abc", 7, "expected a regular expression in quotes, found 'abc'"),
        ('text ~ "ab(c"', 8, "invalid regular expression: missing ): ab(c"),
        ('text ~ "ab(?=c)"', 10, "invalid regular expression: invalid perl operator: (?="),
        ("step in 3", 8, "expected '(' after step in, found '3'"),
        ("step in (3", 10, "expected ',' or ')', found the end of the query"),
        ("(a or b", 0, "this parenthesis is never closed: expected ')'"),
        ("a)", 1, "expected the end of the query, 'and' or 'or', found ')'"),
        ("a and", 5, "expected a condition or text to find, found the end of the query"),
        ("a or and", 5, "expected a condition or text to find, found 'and'"),
        ('a "b', 2, 'this quote is never closed: expected "'),
        ("0.2 > reward", 0, "a comparison begins with a column, such as reward < 0.2"),
        ('"reward" > 1', 0, "a comparison begins with a column, such as reward < 0.2"),
        ("`reward`", 8, "expected a comparison after the column 'reward', found the end of the query"),
        ("<b>", 0, "expected a condition or text to find, found '<'; put text to search for in quotes, as in \"<b>\""),
        ("wow!", 3, "'!' means nothing here; put text to search for in quotes"),
    ],
)
def test_errors_say_what_is_expected_and_where(text: str, position: int, message: str):
    with pytest.raises(QuerySyntaxError) as error:
        parse(text)
    assert (error.value.position, error.value.message) == (position, message)


@pytest.mark.parametrize(("opening", "closing"), [("(", ")"), ("not ", "")])
def test_depth_is_bounded(opening: str, closing: str):
    parse(opening * MAX_DEPTH + "a" + closing * MAX_DEPTH)
    with pytest.raises(QuerySyntaxError, match=f"nested more than {MAX_DEPTH} levels deep"):
        parse(opening * (MAX_DEPTH + 1) + "a" + closing * (MAX_DEPTH + 1))


def test_conditions_are_bounded():
    parse("a " * MAX_CONDITIONS)
    with pytest.raises(QuerySyntaxError, match=f"more than {MAX_CONDITIONS} conditions") as error:
        parse("a " * 5000)
    assert error.value.position == 2 * MAX_CONDITIONS


def test_any_reward_is_known_without_files():
    assert parse_query("rewards.x.y > 1", Columns()) == Compare("rewards/x.y", ">", 1.0)
    with pytest.raises(QuerySyntaxError, match="unknown column 'rewards/x'"):
        parse("rewards/x > 1")


NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(max_size=8)
NUMBER_COLUMNS = st.sampled_from(["reward", "length", "rewards/math", "rewards/my.own reward`s"])
TEXT_COLUMNS = st.sampled_from(["text", "prompt", "end", "details/math"])
LEAVES = st.one_of(
    st.builds(Compare, NUMBER_COLUMNS, st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), NUMBERS),
    st.builds(Compare, TEXT_COLUMNS, st.sampled_from(["==", "!="]), TEXTS),
    st.builds(Contains, TEXT_COLUMNS, TEXTS),
    st.builds(Matches, TEXT_COLUMNS, st.sampled_from(["a+", "(?i)b", '"', "\\\\", "[^x]$", ""])),
    st.builds(IsIn, NUMBER_COLUMNS, st.lists(NUMBERS, min_size=1, max_size=3).map(tuple)),
    st.builds(IsIn, TEXT_COLUMNS, st.lists(TEXTS, min_size=1, max_size=3).map(tuple)),
    st.builds(IsNull, st.one_of(NUMBER_COLUMNS, TEXT_COLUMNS)),
)


def _grown(nodes: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    several = st.lists(nodes, min_size=2, max_size=3).map(tuple)
    return st.one_of(st.builds(Not, nodes), st.builds(And, several), st.builds(Or, several))


@settings(max_examples=150, deadline=None)
@given(st.recursive(LEAVES, _grown, max_leaves=8))
def test_a_tree_as_text_parses_to_the_same_tree(tree: Node):
    assert parse(to_text(tree)) == tree


PIECES = [
    "(",
    ")",
    "not",
    "and",
    "or",
    "in",
    "is",
    "null",
    "contains",
    "text",
    "reward",
    "~",
    "!~",
    "<",
    "==",
    ",",
    "1",
    '"',
    "`",
    "'",
]


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(st.characters(), max_size=40), st.lists(st.sampled_from(PIECES), max_size=12).map(" ".join)))
def test_any_text_is_a_query_or_a_syntax_error(text: str):
    try:
        tree = parse(text)
    except QuerySyntaxError as error:
        assert 0 <= error.position <= len(text)
    else:
        assert parse(to_text(tree)) == tree
