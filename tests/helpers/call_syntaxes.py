"""How models of each family write tool calls, and what they write that is none."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

Calls = Sequence[tuple[str, dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Syntax:
    """A way to write calls."""

    write: Callable[[Calls], str]
    malformed: tuple[str, ...]  # at least four texts that start a call and are none
    also: tuple[tuple[str, Calls], ...] = ()  # other spellings that models write and vLLM accepts
    inside: str = ""  # a text that ends calls elsewhere and may stand in a string
    single: bool = False  # the chat template takes one call per turn
    alone: bool = False  # calls are the whole reply: with text before them, the reply is an answer


CATS = ("search", {"query": "cats", "limit": 2})
JUST_CATS = ("search", {"query": "cats"})


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def text_or_json(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def spoiled(key: str = "arguments") -> list[str]:
    """JSON calls without their end, and whose arguments are no object."""
    return [
        f'{{"name": "search", "{key}": {{"query": "cats"',
        f'{{"name": "search", "{key}": ["cats"]}}',
        f'{{"name": "search", "{key}": {{query: cats}}}}',
        f'{{"name": "search", "{key}": "cats"}}',
    ]


def json_calls(start: str, end: str, *, key: str = "arguments", join: str = "\n") -> Syntax:
    """Each call is an object between markers."""
    bodies = [*spoiled(key), f'{{"{key}": {{"query": "cats"}}}}', "search(cats)", '["search"]']
    bodies += [f'{{"name": "search", "parameters": {{"query": "cats"}}, "{key}": 2}}']
    if key == "arguments":
        bodies.append('{"name": "search", "parameters": {"query": "cats"}}')
    spaced = json.dumps({"name": "search", key: {"query": "für"}}, indent=2)
    return Syntax(
        write=lambda calls: join.join(
            f'{start}{{"name": "{name}", "{key}": {dumps(args)}}}{end}' for name, args in calls
        ),
        malformed=tuple(f"{start}{body}{end}" for body in bodies),
        also=((f"{start.strip()}{spaced}{end.strip()}", [("search", {"query": "für"})]),),
        inside=end.strip(),
    )


def array(start: str, end: str, *, item: str = "", more: Sequence[str] = ()) -> Syntax:
    """One JSON array of all calls of the turn, each of the form `item`."""
    bodies = [] if item else [f"[{body}{']' if body.endswith('}') else ''}" for body in spoiled()]
    form = item or '{"name": "NAME", "arguments": ARGUMENTS}'

    def write(calls: Calls) -> str:
        items = [
            form.replace("NUMBER", str(index)).replace("NAME", name).replace("ARGUMENTS", dumps(args))
            for index, (name, args) in enumerate(calls)
        ]
        return f"{start}[{', '.join(items)}]{end}"

    return Syntax(
        write=write,
        malformed=tuple(f"{start}{body}{end}" for body in [*bodies, *more]),
        inside="]" + end if end.startswith("</") else "",
    )


def xml(start: str, end: str, *, line: str = "\n", join: str = "\n") -> Syntax:
    """<function=f><parameter=a>1</parameter></function> between markers."""

    def write(calls: Calls) -> str:
        return join.join(
            f"{start}<function={name}>\n"
            + "".join(f"<parameter={key}>{line}{text_or_json(args[key])}{line}</parameter>\n" for key in args)
            + f"</function>{end}"
            for name, args in calls
        )

    return Syntax(
        write=write,
        malformed=(
            f'{start}{{"name": "search", "arguments": {{"query": "cats"}}}}{end}',
            f"{start}<function=search>\nquery: cats\n</function>{end}",
            f"{start}search{end}",
            f"{start}<function=>\n<parameter=query>\ncats\n</parameter>\n</function>{end}",
            f"{start}<parameter=query>\ncats\n</parameter>{end}",
            f"{start}<function=search>\n<parameter=query>\ncats\n</function>{end}",
        ),
        also=(
            (
                f"{start.strip()}<function=search><parameter=query>cats</parameter></function>{end.strip()}",
                [JUST_CATS],
            ),
            ("<function=search>\n<parameter=query>\ncats\n</parameter>\n</function>", [JUST_CATS]),
            (f"{start}<function=search>\n<parameter=query>\ncats\n</parameter>{end}", [JUST_CATS]),
        ),
        inside=end.strip(),
    )


def glm(line: str) -> Syntax:
    """<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>."""
    start, end = f"{line}<tool_call>", "</tool_call>"

    def write(calls: Calls) -> str:
        return "".join(
            f"{start}{name}{line}"
            + "".join(
                f"<arg_key>{key}</arg_key>{line}<arg_value>{text_or_json(value)}</arg_value>{line}"
                for key, value in args.items()
            )
            + end
            for name, args in calls
        )

    return Syntax(
        write=write,
        malformed=(
            f'{start}search{line}{{"query": "cats"}}{line}{end}',
            f"{start}search{line}<arg_key>query</arg_key>{line}cats{line}{end}",
            f"{start}<arg_key>query</arg_key>{line}<arg_value>cats</arg_value>{line}{end}",
            f"{start}search{line}<arg_value>cats</arg_value>{line}{end}",
            f"{start}search{line}<arg_key>query</arg_key>{line}<arg_value>cats{line}{end}",
            f"{start}search{line}<arg_key>query</arg_key>{line}<arg_value>cats</arg_value>",  # more may have followed
        ),
        inside=end,
    )


def python_literal(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{dumps(key)}: {python_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(python_literal, value)) + "]"
    return str(value) if value is None or isinstance(value, bool) else dumps(value)


def pythonic(start: str = "[", end: str = "]", *, join: str = ", ") -> Syntax:
    """[f(a=1), g()]."""

    def write(calls: Calls) -> str:
        texts = [f"{name}({', '.join(f'{k}={python_literal(v)}' for k, v in args.items())})" for name, args in calls]
        return start + join.join(texts) + end

    bodies = ['search(query="cats"', 'search("cats")', "search(query=cats)", 'search(query="cats" limit=2)']
    return Syntax(
        write=write,
        malformed=tuple(f"{start}{body}{end}" for body in [*bodies, 'search(query="a" + "b")']),
        also=((f"{start}search(query='c\\'ats', limit=-2){end}", [("search", {"query": "c'ats", "limit": -2})]),),
    )


def invoke(start: str, end: str, *, tag: str = "", string: bool = False) -> Syntax:
    """<invoke name="f"><parameter name="a">1</parameter></invoke> in one block."""

    def parameter(key: str, value: Any) -> str:
        kind = f' string="{"true" if isinstance(value, str) else "false"}"' if string else ""
        return f'<{tag}parameter name="{key}"{kind}>{text_or_json(value)}</{tag}parameter>\n'

    def write(calls: Calls) -> str:
        blocks = [
            f'<{tag}invoke name="{name}">\n{"".join(parameter(k, v) for k, v in args.items())}</{tag}invoke>\n'
            for name, args in calls
        ]
        return start + "".join(blocks) + end

    return Syntax(
        write=write,
        malformed=(
            f'{start}{{"name": "search", "arguments": {{"query": "cats"}}}}\n{end}',
            f'{start}<{tag}invoke name="search">\nquery: cats\n</{tag}invoke>\n{end}',
            f"{start}<{tag}invoke>\n{parameter('query', 'cats')}</{tag}invoke>\n{end}",
            f"{start}search\n{end}",
            f'{start}<{tag}invoke name="search">\n<{tag}parameter name="query">cats\n</{tag}invoke>\n{end}',
        ),
        also=(
            (
                f'{start.strip()}<{tag}invoke name="search"><{tag}parameter name="query">cats</{tag}parameter>'
                f"</{tag}invoke>{end}",
                [JUST_CATS],
            ),
            (f'{start}<{tag}invoke name="now">\n</{tag}invoke>', [("now", {})]),
        ),
        inside=end.strip(),
    )


def deepseek_v3(calls: Calls) -> str:
    texts = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(args)}\n```<｜tool▁call▁end｜>"
        for name, args in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(texts) + "<｜tool▁calls▁end｜>"


def per_call(start: str, end: str, head: str, tail: str, *, more: Sequence[str] = (), join: str = "") -> Syntax:
    """A name and a JSON object for each call; `head` has the place of the name and of the call's number."""
    bodies = ['{"query": "cats"', '["cats"]', "{query: cats}", "cats"]
    first = head.format(name="search", index=0)
    return Syntax(
        write=lambda calls: (
            start
            + join.join(
                head.format(name=name, index=index) + dumps(args) + tail for index, (name, args) in enumerate(calls)
            )
            + end
        ),
        malformed=tuple(f"{start}{body}{end}" for body in [*(f"{first}{body}{tail}" for body in bodies), *more]),
    )


def gemma(start: str, end: str, quote: str) -> Syntax:
    """call:f{a:1} with quotes of their own."""

    def value(item: Any) -> str:
        if isinstance(item, str):
            return f"{quote}{item}{quote}"
        if isinstance(item, dict):
            return "{" + ",".join(f"{key}:{value(inner)}" for key, inner in item.items()) + "}"
        if isinstance(item, list):
            return "[" + ",".join(map(value, item)) + "]"
        return dumps(item)

    return Syntax(
        write=lambda calls: "".join(f"{start}call:{name}{value(args)}{end}" for name, args in calls),
        malformed=(
            f"{start}call:search{{query:{quote}cats{quote}{end}",
            f"{start}call:search{{query:{quote}cats}}{end}",
            f'{start}call:search(query="cats"){end}',
            f"{start}call:search{end}",
            f"{start}search{{query:{quote}cats{quote}}}{end}",
        ),
    )


def harmony(calls: Calls) -> str:
    [(name, args)] = calls
    return f" to=functions.{name}<|channel|>commentary json<|message|>{dumps(args)}<|call|>"


def cohere(calls: Calls) -> str:
    lines = [
        f'    {{"tool_call_id": "{index}", "tool_name": "{name}", "parameters": {dumps(args)}}}'
        for index, (name, args) in enumerate(calls)
    ]
    return "<|START_ACTION|>[\n" + ",\n".join(lines) + "\n]<|END_ACTION|>"


def steptml(calls: Calls) -> str:
    texts = []
    for name, args in calls:
        inner = "".join(
            f'<steptml:parameter name="{key}">{text_or_json(value)}</steptml:parameter>' for key, value in args.items()
        )
        texts.append(
            f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">{inner}</steptml:invoke>'
            "<｜tool_call_end｜>"
        )
    return "<｜tool_calls_begin｜>" + "".join(texts) + "<｜tool_calls_end｜>"


HERMES = json_calls("<tool_call>\n", "\n</tool_call>")
HERMES_TIGHT = json_calls("<tool_call>", "</tool_call>")
GROQ = replace(
    HERMES,
    write=lambda calls: "\n".join(
        f'<tool_call>\n{{"id": {index}, "name": "{name}", "arguments": {dumps(args)}}}\n</tool_call>'
        for index, (name, args) in enumerate(calls)
    ),
)
ERNIE = json_calls("\n<tool_call>\n", "\n</tool_call>\n", join="")
LONGCAT = json_calls("<longcat_tool_call>\n", "\n</longcat_tool_call>")
XML = xml("<tool_call>\n", "\n</tool_call>")
XML_INLINE = xml("<tool_call>\n", "\n</tool_call>", line="", join="")
SEED = xml("\n<seed:tool_call>\n", "\n</seed:tool_call>", line="", join="")
GLM = glm("\n")
GLM_TIGHT = glm("")
LLAMA = Syntax(
    write=lambda calls: "".join(f'{{"name": "{name}", "parameters": {dumps(args)}}}' for name, args in calls),
    malformed=tuple(spoiled("parameters")),
    also=(
        ('{"name": "search", "arguments": {"query": "cats"}}', [JUST_CATS]),
        ('{"parameters": {"query": "cats"}, "name": "search"}', [JUST_CATS]),
        (
            '<|python_tag|>{"type": "function", "name": "search", "parameters": {"query": "cats"}}',
            [JUST_CATS],
        ),
    ),
    single=True,
)
LLAMA4_JSON = replace(LLAMA, also=LLAMA.also[:2])
PYTHONIC = replace(pythonic(), alone=True)
LLAMA4 = pythonic("<|python_start|>[", "]<|python_end|>")
LLAMA4 = replace(LLAMA4, alone=True, also=(*LLAMA4.also, ("[search(query='cats')]", [JUST_CATS])))
LFM2 = pythonic("<|tool_call_start|>[", "]<|tool_call_end|>")
OLMO3 = pythonic("<function_calls>", "</function_calls>", join="\n")
HARMONY = Syntax(
    write=harmony,
    malformed=(
        *(f" to=functions.search<|channel|>commentary json<|message|>{body}<|call|>" for body in ("cats", '["cats"]')),
        ' to=functions.search<|channel|>commentary json<|message|>{"query": "cats"<|call|>',
        " to=functions.search<|channel|>commentary json<|message|>{query: cats}<|call|>",
        ' to=search<|channel|>commentary json<|message|>{"query": "cats"}<|call|>',
        ' to=stock code<|message|>{"query": "cats"}<|call|>',
    ),
    also=(
        (
            '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "cats"}<|call|>',
            [JUST_CATS],
        ),
        (
            ' to=functions.search code<|message|>{"query": "cats"}<|call|>',
            [JUST_CATS],
        ),
    ),
    single=True,
)
MISTRAL = array(
    "[TOOL_CALLS]",
    "",
    item='{"name": "NAME", "arguments": ARGUMENTS, "id": "abcdefghNUMBER"}',
    more=[f"[{body}{']' if body.endswith('}') else ''}" for body in spoiled()],
)
_ONE = '{"name": "search", "arguments": {"query": "cats"}}'
MISTRAL = replace(MISTRAL, also=((f"[TOOL_CALLS] [{_ONE}]", [JUST_CATS]), (f"[TOOL_CALLS]{_ONE}", [JUST_CATS])))
MISTRAL_ARGS = per_call("", "", "[TOOL_CALLS]{name}[ARGS]", "", more=['[TOOL_CALLS][ARGS]{"query": "cats"}'])
MISTRAL_IDS = per_call("", "", "[TOOL_CALLS]{name}[CALL_ID]abcdefgh{index}[ARGS]", "")
DEEPSEEK_V3 = Syntax(
    write=deepseek_v3,
    malformed=tuple(
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        for body in (
            'function<｜tool▁sep｜>search\n```json\n{"query": "cats"\n```',
            'function<｜tool▁sep｜>search\n```json\n["cats"]\n```',
            "function<｜tool▁sep｜>search\ncats",
            "search(cats)",
            'function<｜tool▁sep｜>\n```json\n{"query": "cats"}\n```',
        )
    ),
)
DEEPSEEK_V3_1 = per_call(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    more=[
        '<｜tool▁call▁begin｜>search{"query": "cats"}<｜tool▁call▁end｜>',
        '<｜tool▁call▁begin｜><｜tool▁sep｜>{"query": "cats"}<｜tool▁call▁end｜>',
    ],
)
DSML = invoke("\n\n<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>", tag="｜DSML｜", string=True)
DSML_V4 = invoke("\n\n<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>", tag="｜DSML｜", string=True)
MINIMAX = invoke("<minimax:tool_call>\n", "</minimax:tool_call>")
MINIMAX = replace(
    MINIMAX,
    also=(
        *MINIMAX.also,
        ("<minimax:tool_call>\n<invoke name='now'>\n</invoke>\n</minimax:tool_call>", [("now", {})]),
        (
            "<minimax:tool_call>\n<invoke name=search>\n<parameter name=query>cats</parameter>\n</invoke>\n"
            "</minimax:tool_call>",
            [JUST_CATS],
        ),
    ),
)
GEMMA4 = gemma("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = gemma("<start_function_call>", "<end_function_call>", "<escape>")
KIMI = per_call(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    more=['<|tool_call_begin|>functions.search:0{"query": "cats"}<|tool_call_end|>'],
)
PHI4_MINI = array("<|tool_call|>", "<|/tool_call|>")
FUNCTOOLS = array("functools", "")
COHERE = Syntax(
    write=cohere,
    malformed=tuple(
        f"<|START_ACTION|>{body}<|END_ACTION|>"
        for body in (
            '[\n    {"tool_call_id": "0", "tool_name": "search", "parameters": {"query": "cats"}\n',
            '[{"tool_call_id": "0", "tool_name": "search", "parameters": ["cats"]}]',
            '[{"tool_call_id": "0", "parameters": {"query": "cats"}}]',
            "search(cats)",
        )
    ),
)
GRANITE_3_0 = array("<|tool_call|> ", "")
GRANITE_3_3 = replace(array("<|tool_call|>", ""), also=((f"<tool_call>[{_ONE}]", [JUST_CATS]),))
NEMOTRON = array("<TOOLCALL>", "</TOOLCALL>")
XLAM = replace(array("", ""), alone=True)
TOOL_CALLS = array("<tool_calls>", "</tool_calls>")
APERTUS = array(
    "<|tools_prefix|>",
    "<|tools_suffix|>",
    item='{"NAME": ARGUMENTS}',
    more=['[{"search": {"query": "cats"}', '[{"search": ["cats"]}]', '[{"search": "cats"}]', "[search(cats)]"],
)
INTERNLM = json_calls("<|action_start|><|plugin|>\n", "<|action_end|>", key="parameters", join="")
STEP3 = Syntax(
    write=steptml,
    malformed=tuple(
        f"<｜tool_calls_begin｜><｜tool_call_begin｜>{body}<｜tool_call_end｜><｜tool_calls_end｜>"
        for body in (
            'function<｜tool_sep｜>{"name": "search", "arguments": {"query": "cats"}}',
            'function<｜tool_sep｜><steptml:invoke name="search">query: cats</steptml:invoke>',
            'function<｜tool_sep｜><steptml:invoke><steptml:parameter name="query">c</steptml:parameter>',
            "search(cats)",
        )
    ),
)
