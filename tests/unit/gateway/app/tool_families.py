"""How families of models write calls of tools: chat templates, answers, and tools to call."""

from __future__ import annotations

import copy
import re
from random import Random
from typing import Any

from tokenizers import AddedToken

from swarm_gateway.answers.answer_reader import AnswerPiece, AnswerReader

TURNS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if tools %}{% for t in tools %}{{ t.function.name }} {{ t.function.parameters | tojson }}{% endfor %}"
)
TEMPLATES = {  # as far as they matter here, beginning with what tells the format
    "llama": TURNS + '{{ \'{"name": function name, "parameters": dictionary of argument name and its value}\' }}',
    "mistral": TURNS + "{{ '[TOOL_CALLS]name[ARGS]' }}",
    "old mistral": TURNS + "{{ '[TOOL_CALLS]' }}",
    "qwen": TURNS + '{{ "<tool_call>\\n{\\"name\\": <n>, \\"arguments\\": <args-json-object>}\\n</tool_call>" }}',
    "gpt-oss": TURNS + '{{ "<|channel|>analysis<|message|>" }}',
    "deepseek v3": TURNS + "{{ '<｜tool▁sep｜>' }}{{ '```json' }}",
    "deepseek v3.1": TURNS + "{{ '<｜tool▁sep｜>' }}",
    "deepseek v3.2": TURNS + "{{ '<｜DSML｜function_calls>' }}",
    "deepseek v4": TURNS + "{% set dsml = '｜DSML｜' %}{{ '<' ~ dsml ~ 'tool_calls>' }}",
    "kimi": TURNS + "{{ '<|tool_call_argument_begin|>' }}",
    "glm": TURNS + "{{ '<tool_call>name\\n<arg_key>' }}",
    "minimax": TURNS + "{{ '<minimax:tool_call>' }}",
    "seed": TURNS + "{{ '<seed:tool_call>\\n<function=f>\\n<parameter=p>' }}",
    "qwen coder": TURNS + "{{ '<tool_call>\\n<function=f>\\n<parameter=p>' }}",
}
DSML = (
    '<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="b" string="true">é</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="look">\n</｜DSML｜invoke>\n'
)
CALLS = {
    "llama": '{"name": "add", "parameters": {"a": 1, "b": "é"}}',
    "mistral": '[TOOL_CALLS]add[ARGS]{"a": 1, "b": "é"}[TOOL_CALLS]look[ARGS]{}',
    "old mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": "é"}}, {"name": "look", "arguments": {}}]',
    "qwen": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>',
    "gpt-oss": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": "é"}<|call|>',
    "deepseek v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1, "b": "é"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek v3.1": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": "é"}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>look<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek v3.2": f"\n\n<｜DSML｜function_calls>\n{DSML}</｜DSML｜function_calls>",
    "deepseek v4": f"\n\n<｜DSML｜tool_calls>\n{DSML}</｜DSML｜tool_calls>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"a": 1, "b": "é"}<|tool_call_end|><|tool_call_begin|>functions.look:1<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    "glm": "\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>é</arg_value>\n</tool_call>\n<tool_call>look\n</tool_call>",
    "minimax": '\n<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
    '<parameter name="b">é</parameter>\n</invoke>\n<invoke name="look">\n</invoke>\n</minimax:tool_call>',
    "seed": "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n<parameter=b>é</parameter>\n</function>\n"
    "</seed:tool_call><seed:tool_call>\n<function=look>\n</function>\n</seed:tool_call>",
    "qwen coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\né\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=look>\n</function>\n</tool_call>",
}
SINGLE = ("llama", "gpt-oss")  # their answers have one call at most
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/letter"}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"letter": {"enum": ["x", "é"]}},
}
LOOK = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD, "strict": True}},
    {"type": "function", "function": {"name": "look", "parameters": LOOK}},
]


def tokenizer_of(family: str, tokenizer: Any, *, special: bool = False) -> Any:
    own = copy.deepcopy(tokenizer)
    own.chat_template = TEMPLATES[family] + "{% endif %}assistant:"
    if special:
        names = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]
        names += re.findall("<[|｜][^<]*[|｜]>|</?arg_[a-z]*>", CALLS[family])
        own.add_special_tokens({"additional_special_tokens": [AddedToken(name, special=True) for name in names]})
    return own


def read_in_parts(reader: AnswerReader, text: str, seed: int) -> AnswerPiece:
    """What the reader makes of a text that comes in parts of any size."""
    random, found, place = Random(seed), AnswerPiece(), 0
    while place < len(text):
        part = text[place : place + random.randint(1, 9)]
        found += reader.put(part)
        place += len(part)
    return found + reader.end()
