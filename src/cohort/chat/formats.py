"""How the families of models write thoughts and tool calls, as data. The chat template's text tells the family."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Syntax = Literal[
    "json", "mistral", "llama", "pythonic", "lines", "bare", "xml", "glm", "deepseek", "kimi", "gemma", "harmony"
]

# What opens and closes thoughts. The first pair of which the chat template contains one part is the family's.
THOUGHTS: tuple[tuple[str, str], ...] = (
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel>thought", "<channel|>"),
    ("<think>", "</think>"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """Tags of calls with one tag per parameter."""

    name_end: str  # after the function's name
    parameter: str  # before a parameter's name
    parameter_name_end: str
    parameter_close: str
    trims_newlines: bool = False  # values stand on lines of their own


_PARAMETER_TAGS = Tags(
    name_end=">",
    parameter="<parameter=",
    parameter_name_end=">",
    parameter_close="</parameter>",
    trims_newlines=True,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Format:
    """How a family writes its tool calls. Texts are those that its chat template writes."""

    family: str  # for docs and messages
    example: str  # a call of `f` with the argument `a`
    syntax: Syntax  # the parser, of `cohort.chat.calls`
    markers: tuple[str, ...]  # the format belongs to chat templates that contain all of them
    opens: tuple[str, ...] = ()  # any of them starts a call
    close: str = ""  # ends a call; "": the last bracket does
    section: tuple[str, str] | None = None  # what stands around all calls of a turn
    shape: Literal["object", "list", "either"] = "object"  # of JSON: one call, or a list of calls
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _KEYS)  # of a call in JSON
    tags: Tags | None = None
    quote: str = '<|"|>'  # around the texts of Gemma
    marks: tuple[str, ...] = ()  # around the text of answers, which are no part of it

    @property
    def call_starts(self) -> tuple[str, ...]:
        """All texts that start a call."""
        return (self.section[0], *self.opens) if self.section else self.opens

    @property
    def own_texts(self) -> frozenset[str]:
        """Texts that end calls or stand around them."""
        return frozenset({*self.opens, self.close, *(self.section or ()), *self.marks}) - {""}


_KEYS: Mapping[str, tuple[str, ...]] = {"name": ("name",), "arguments": ("arguments",), "id": ("id",)}
_LLAMA_KEYS = {**_KEYS, "arguments": ("parameters", "arguments")}
_COMMAND_KEYS = {"name": ("tool_name", "name"), "arguments": ("parameters",), "id": ("tool_call_id",)}
_DSML = "｜DSML｜"

FORMATS: tuple[Format, ...] = (
    Format(
        family="gpt-oss",
        example='<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
        syntax="harmony",
        markers=("<|channel|>", "functions."),
    ),
    Format(
        family="Gemma 4",
        example="<|tool_call>call:f{a:1}<tool_call|>",
        syntax="gemma",
        markers=("<|tool_call>", "call:"),
        opens=("<|tool_call>",),
        close="<tool_call|>",
    ),
    Format(
        family="FunctionGemma",
        example="<start_function_call>call:f{a:1}<end_function_call>",
        syntax="gemma",
        markers=("<start_function_call>", "call:"),
        opens=("<start_function_call>",),
        close="<end_function_call>",
        quote="<escape>",
    ),
    *(
        Format(
            family=family,
            example=f'<{_DSML}{section}><{_DSML}invoke name="f"><{_DSML}parameter name="a" string="false">1'
            f"</{_DSML}parameter></{_DSML}invoke></{_DSML}{section}>",
            syntax="xml",
            markers=(f"{_DSML}{section}",),
            opens=(f'<{_DSML}invoke name="',),
            close=f"</{_DSML}invoke>",
            section=(f"<{_DSML}{section}>", f"</{_DSML}{section}>"),
            tags=Tags(
                name_end='">',
                parameter=f'<{_DSML}parameter name="',
                parameter_name_end=">",
                parameter_close=f"</{_DSML}parameter>",
            ),
        )
        for family, section in (("DeepSeek V3.2", "function_calls"), ("DeepSeek V4", "tool_calls"))
    ),
    Format(
        family="Step-3",
        example='<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">'
        '<steptml:parameter name="a">1</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>',
        syntax="xml",
        markers=("steptml:",),
        opens=('<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',),
        close="</steptml:invoke><｜tool_call_end｜>",
        section=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        tags=Tags(
            name_end='">',
            parameter='<steptml:parameter name="',
            parameter_name_end='">',
            parameter_close="</steptml:parameter>",
        ),
    ),
    Format(
        family="DeepSeek V3, R1, V3.1",
        example='<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        syntax="deepseek",
        markers=("<｜tool▁calls▁begin｜>",),
        opens=("<｜tool▁call▁begin｜>",),
        close="<｜tool▁call▁end｜>",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    Format(
        family="Kimi K2",
        example='<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        syntax="kimi",
        markers=("<|tool_calls_section_begin|>",),
        opens=("<|tool_call_begin|>",),
        close="<|tool_call_end|>",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    Format(
        family="MiniMax-M2",
        example='<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke></minimax:tool_call>',
        syntax="xml",
        markers=("<minimax:tool_call>",),
        opens=("<invoke name=",),  # vLLM takes names in either kind of quotes, or without
        close="</invoke>",
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
        tags=Tags(
            name_end=">",
            parameter="<parameter name=",
            parameter_name_end=">",
            parameter_close="</parameter>",
        ),
    ),
    Format(
        family="Seed-OSS",
        example="<seed:tool_call><function=f><parameter=a>1</parameter></function></seed:tool_call>",
        syntax="xml",
        markers=("<seed:tool_call>",),
        opens=("<function=",),
        close="</function>",
        section=("<seed:tool_call>", "</seed:tool_call>"),
        tags=_PARAMETER_TAGS,
    ),
    Format(
        family="Command R7B, Command A",
        example='<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}]<|END_ACTION|>',
        syntax="json",
        markers=("<|START_ACTION|>",),
        opens=("<|START_ACTION|>",),
        close="<|END_ACTION|>",
        shape="list",
        keys=_COMMAND_KEYS,
        marks=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    Format(
        family="Apertus",
        example='<|tools_prefix|>[{"f": {"a": 1}}]<|tools_suffix|>',
        syntax="json",
        markers=("<|tools_prefix|>",),
        opens=("<|tools_prefix|>",),
        close="<|tools_suffix|>",
        shape="list",
        keys={},  # the function's name is the only key
    ),
    Format(
        family="LFM2",
        example="<|tool_call_start|>[f(a=1)]<|tool_call_end|>",
        syntax="pythonic",
        markers=("<|tool_call_start|>",),
        opens=("<|tool_call_start|>",),
        close="<|tool_call_end|>",
    ),
    Format(
        family="Olmo 3",
        example="<function_calls>f(a=1)</function_calls>",
        syntax="lines",
        markers=("<function_calls>",),
        opens=("<function_calls>",),
        close="</function_calls>",
    ),
    Format(
        family="LongCat",
        example='<longcat_tool_call>{"name": "f", "arguments": {"a": 1}}</longcat_tool_call>',
        syntax="json",
        markers=("<longcat_tool_call>",),
        opens=("<longcat_tool_call>",),
        close="</longcat_tool_call>",
    ),
    Format(
        family="Nemotron-Nano-v2",
        example='<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>',
        syntax="json",
        markers=("<TOOLCALL>",),
        opens=("<TOOLCALL>",),
        close="</TOOLCALL>",
        shape="list",
    ),
    Format(
        family="Hunyuan-A13B",
        example='<tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>',
        syntax="json",
        markers=("<tool_calls>",),
        opens=("<tool_calls>",),
        close="</tool_calls>",
        shape="list",
        marks=("<answer>", "</answer>"),
    ),
    Format(
        family="InternLM 2, 3",
        example='<|action_start|><|plugin|>{"name": "f", "parameters": {"a": 1}}<|action_end|>',
        syntax="json",
        markers=("<|action_start|>", "<|plugin|>"),
        opens=("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
        close="<|action_end|>",
        keys=_LLAMA_KEYS,
    ),
    *(
        Format(
            family="Phi-4-mini",
            example='<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>',
            syntax="json",
            markers=markers,
            opens=("<|tool_call|>", "functools"),
            close="<|/tool_call|>",
            shape="list",
            keys=_LLAMA_KEYS,
        )
        for markers in (("functools[",), ("<|tool|>", "<|/tool|>"), ("<|/tool_call|>",))
    ),
    Format(
        family="Granite 3",
        example='<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]',
        syntax="json",
        markers=("<|tool_call|>",),
        opens=("<|tool_call|>", "<tool_call>"),
        shape="list",
    ),
    Format(
        family="Mistral, Ministral, Magistral, Devstral",
        example='[TOOL_CALLS]f[ARGS]{"a": 1}',
        syntax="mistral",
        markers=("[TOOL_CALLS]",),
        opens=("[TOOL_CALLS]",),
    ),
    Format(
        family="GLM-4.5 to 4.7",
        example="<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
        syntax="glm",
        markers=("<tool_call>", "<arg_key>"),
        opens=("<tool_call>",),
        close="</tool_call>",
    ),
    Format(
        family="Qwen3-Coder, Qwen3.5, Nemotron-3, Step-3.5",
        example="<tool_call><function=f><parameter=a>1</parameter></function></tool_call>",
        syntax="xml",
        markers=("<tool_call>", "<function="),
        opens=("<function=",),
        close="</function>",
        section=("<tool_call>", "</tool_call>"),
        tags=_PARAMETER_TAGS,
    ),
    *(
        Format(
            family=family,
            example='<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
            syntax="json",
            markers=("<tool_call>", "</tool_call>", *marks),
            opens=("<tool_call>",),
            close="</tool_call>",
            marks=marks,
        )
        for family, marks in (
            ("Ernie 4.5 Thinking", ("<response>", "</response>")),
            ("Qwen2.5, Qwen3, Hermes, Granite 4, SmolLM3, MiMo", ()),
        )
    ),
    Format(
        family="Llama 4",
        example="<|python_start|>[f(a=1)]<|python_end|>",
        syntax="llama",
        markers=("<|header_start|>",),
        opens=("<|python_start|>",),
        shape="either",
        keys=_LLAMA_KEYS,
        marks=("<|python_end|>",),
    ),
    Format(
        family="Llama 3.1 to 3.3",
        example='{"name": "f", "parameters": {"a": 1}}',
        syntax="llama",
        markers=("<|start_header_id|>", '"parameters": '),
        opens=("<|python_tag|>",),
        keys=_LLAMA_KEYS,
    ),
    *(
        Format(
            family="xLAM-2",
            example='[{"name": "f", "arguments": {"a": 1}}]',
            syntax="bare",
            markers=markers,
            opens=("[TOOL_CALLS]", "<tool_call>", "```json\n[", "```\n["),
        )
        for markers in (('[{"name": "',), ('[{\\"name\\": \\"',), ('[{"name":"',))
    ),
    Format(
        family="Llama 3.2, ToolACE",
        example="[f(a=1)]",
        syntax="llama",
        markers=("<|start_header_id|>", "[func"),
        shape="either",
        opens=("<|python_tag|>",),
        keys=_LLAMA_KEYS,
    ),
)


def find_format(chat_template: str) -> Format | None:
    """Return the first format all of whose markers the chat template contains, or None."""
    return next((form for form in FORMATS if all(marker in chat_template for marker in form.markers)), None)


def find_thoughts(chat_template: str, added_tokens: Iterable[str]) -> tuple[str, str] | None:
    """Return what opens and closes thoughts by the chat template, or else by the tokens; None if there are none."""
    tokens = set(added_tokens)
    by_template = (pair for pair in THOUGHTS if any(part in chat_template for part in pair))
    return next(by_template, None) or next((pair for pair in THOUGHTS if tokens.issuperset(pair)), None)
