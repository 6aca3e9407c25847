"""`tools` and `tool_choice` of a chat request: checks, constraints of answers, and history.

Answers call tools in the format of Hermes and Qwen: `<tool_call>` with a JSON object of `name` and
`arguments`. A named tool's answer is its arguments alone, required tools' a JSON list of calls.
Does not depend on HTTP or templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.inference.constrain.grammar import WHITESPACE
from workers.inference.server.http.errors import ApiError

CALL, CALL_END = "<tool_call>", "</tool_call>"
RESULT, RESULT_END = "<tool_response>", "</tool_response>"
MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# as the models of this format were trained (huggingface.co/NousResearch, Hermes 2 Pro)
_INSTRUCTIONS = """\
# Tools

You may call one or more functions. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>

For each call return a JSON object with its name and arguments within <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-as-object>}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions of a request as sent, and their parameters' schemas by name.

    `choice` is auto, required, or the `name` of the function to call.
    """

    tools: tuple[Mapping[str, Any], ...]
    schemas: Mapping[str, Any]
    choice: str
    name: str | None = None
    parallel: bool = True

    @property
    def constraint(self) -> dict[str, Any]:
        """The parameter of SamplingParams that makes answers calls of these functions."""
        if self.choice == "named":
            return {"json_schema": self.schemas[str(self.name)]}
        definitions: dict[str, Any] = {}
        call = _call_schema(self.schemas, definitions)
        if self.choice == "required":
            limits = {"minItems": 1} if self.parallel else {"minItems": 1, "maxItems": 1}
            return {"json_schema": {"type": "array", "items": call, **limits, **definitions}}
        return {"grammar": _grammar({**call, **definitions}, parallel=self.parallel)}


def parse_tools(fields: Mapping[str, Any], *, parallel: bool) -> ToolUse | None:
    """The tools that an answer may call; None for none. Raises ApiError."""
    tools, choice = fields.get("tools", []), fields.get("tool_choice")
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise ApiError(f"tools must be a list of at most {MAX_TOOLS} functions", param="tools")
    if not tools:
        if choice not in (None, "none"):
            raise ApiError("tool_choice requires tools", param="tool_choice")
        return None
    schemas: dict[str, Any] = {}
    for place, tool in enumerate(tools):
        name, schema = _function(tool, f"tools[{place}]")
        if name in schemas:
            raise ApiError(f"tools[{place}] has the name {name} again", param="tools")
        schemas[name] = schema
    if choice in (None, "auto", "required"):
        return ToolUse(tuple(tools), schemas, choice or "auto", parallel=parallel)
    if choice == "none":
        return None
    function = choice.get("function") if isinstance(choice, dict) else None
    named = function.get("name") if isinstance(function, dict) else None
    if named not in schemas or choice.get("type") != "function":
        raise ApiError(
            f"tool_choice is {str(choice)[:80]}; it must be none, auto, required, or "
            f'{{"type": "function", "function": {{"name": ...}}}} of one of '
            f"{', '.join(sorted(schemas))}",
            param="tool_choice",
        )
    return ToolUse(tuple(tools), schemas, "named", named, parallel=False)


def template_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates read them: the arguments of earlier calls as objects.

    Raises ApiError for a call or a tool's answer that is not one.
    """
    return [_history(message, f"messages[{place}]") for place, message in enumerate(messages)]


def plain_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
) -> list[dict[str, Any]]:
    """Messages for a template without tools: all in texts, signatures in the system's."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools=listed)
    plain: list[dict[str, Any]] = []
    for message in messages:
        content = str(message.get("content") or "")
        if message["role"] == "tool":
            text = f"{RESULT}\n{content}\n{RESULT_END}"
            if plain and plain[-1].get("results"):
                plain[-1]["content"] += f"\n{text}"
            else:
                plain.append({"role": "user", "content": text, "results": True})
            continue
        for call in message.get("tool_calls") or ():
            function = call["function"]
            shown = {"name": function["name"], "arguments": function["arguments"]}
            text = f"{CALL}\n{json.dumps(shown, ensure_ascii=False)}\n{CALL_END}"
            content = f"{content}\n{text}" if content else text
        plain.append({"role": message["role"], "content": content})
    if tools and plain and plain[0]["role"] == "system":
        plain[0]["content"] += f"\n\n{instructions}"
    elif tools:
        plain.insert(0, {"role": "system", "content": instructions})
    return [{"role": each["role"], "content": each["content"]} for each in plain]


def _function(tool: Any, where: str) -> tuple[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise ApiError(
            f'{where} must be {{"type": "function", "function": {{"name", "parameters"}}}}',
            param="tools",
        )
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ApiError(
            f"{where}.function.name is {str(name)[:80]!r}; it must have 1 to 64 letters, digits, _ "
            "and -",
            param="tools",
        )
    if schema is None:
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(schema, dict):
        raise ApiError(f"{where}.function.parameters must be a JSON schema", param="tools")
    return name, schema if "type" in schema or "$ref" in schema else {"type": "object", **schema}


def _call_schema(schemas: Mapping[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of one call; definitions of the parameters' schemas move to `definitions`."""
    calls = []
    for name, schema in schemas.items():
        inner = dict(schema)
        for key in ("$defs", "definitions"):
            for own, value in inner.pop(key, {}).items():
                known = definitions.setdefault(key, {})
                if known.setdefault(own, value) != value:
                    raise ApiError(
                        f"tools: {key} has two schemas named {own}; rename one", param="tools"
                    )
        call = {"name": {"const": name}, "arguments": inner}
        calls.append(
            {
                "type": "object",
                "properties": call,
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _grammar(call: dict[str, Any], *, parallel: bool) -> str:
    """Any text, and from `<tool_call>` on only calls; in llguidance's Lark."""
    body = {"x-guidance": {"whitespace_pattern": WHITESPACE}, **call}
    more = f'(SPACE? "{CALL}" SPACE? call SPACE? "{CALL_END}")*' if parallel else ""
    return (
        "start: text | before calls\n"
        f'before[suffix="{CALL}"]: /(?s:.*)/\n'
        f'calls: SPACE? call SPACE? "{CALL_END}" {more} SPACE?\n'
        "text: TEXT?\n"
        "SPACE: /[ \\n]{1,12}/\n"
        f"TEXT: /(?s:.+)/ & ~/(?s:.*){CALL}(?s:.*)/\n"
        f"call: %json {json.dumps(body)}\n"
    )


def _history(message: dict[str, Any], where: str) -> dict[str, Any]:
    if message["role"] == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise ApiError(f"{where} is a tool's answer and needs tool_call_id", param=where)
    calls = message.get("tool_calls")
    if not calls:
        return message
    if message["role"] != "assistant" or not isinstance(calls, list):
        raise ApiError(f"{where}.tool_calls must be a list in an assistant's message", param=where)
    return {**message, "tool_calls": [_earlier_call(call, where) for call in calls]}


def _earlier_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(f"{where}.tool_calls needs a function with a name in each", param=where)
    arguments = function.get("arguments")
    try:
        value = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
    except ValueError:
        raise ApiError(
            f"{where}.tool_calls: the arguments of {function['name']} are not JSON", param=where
        ) from None
    return {**call, "function": {**function, "arguments": value}}
