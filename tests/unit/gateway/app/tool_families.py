"""How families of models write calls of tools: chat templates, answers, and tools to call."""

from __future__ import annotations

import copy
from typing import Any

from tokenizers import AddedToken

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
}
CALLS = {
    "llama": '{"name": "add", "parameters": {"a": 1, "b": "é"}}',
    "mistral": '[TOOL_CALLS]add[ARGS]{"a": 1, "b": "é"}[TOOL_CALLS]look[ARGS]{}',
    "old mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": "é"}}, {"name": "look", "arguments": {}}]',
    "qwen": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>',
}
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
        own.add_special_tokens({"additional_special_tokens": [AddedToken(name, special=True) for name in names]})
    return own
