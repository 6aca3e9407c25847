"""Tools: the openai client's calls of every choice, the reader of calls, history, refusals."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from llguidance import LLMatcher

from tests.workers.inference.server.conftest import Serving
from tests.workers.inference.untrained import BYTES, untrained_folder
from workers.inference.constrain.guide import Guides
from workers.inference.sampling.parameters import SamplingParams
from workers.inference.server.http.errors import ApiError
from workers.inference.server.http.request_handler import readable_messages
from workers.inference.server.http.tools import ToolUse, parse_tools, template_messages
from workers.inference.server.tool_calls import ToolCallReader
from workers.inference.text.tokenizer import ByteTokenizer

KNOWS_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}: "
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.n }}!{% endfor %}"
    "{% endfor %}>"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}>"
PARAMETERS = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in ("add", "take")
]
QUESTION: list[Any] = [{"role": "user", "content": "go"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"n": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    untrained_folder(folder, {**BYTES, "max_seq_len": 1024})
    (folder / "chat_template.jinja").write_text(KNOWS_TOOLS)
    created = Serving(tmp_path_factory.mktemp("tools"), folder, max_seqs=4)
    yield created
    created.request_action("stop", grace_s=0)
    created.wait()


def test_named_and_required_tools_are_called(server):
    client = server.client()
    options: dict[str, Any] = {
        "model": server.event("serving")["model"],
        "messages": QUESTION,
        "tools": TOOLS,
        "max_tokens": 200,
        "seed": 1,
        "parallel_tool_calls": False,
    }
    named = {"type": "function", "function": {"name": "take"}}
    for choice, reason in ((named, "stop"), ("required", "tool_calls")):
        answer = client.chat.completions.create(**options, tool_choice=choice).choices[0]
        (call,) = answer.message.tool_calls
        assert answer.finish_reason == reason and answer.message.content is None
        assert json.loads(call.function.arguments)["n"] in (1, 2)
        assert call.type == "function" and call.id.startswith("call_")
        assert call.function.name == "take" or choice == "required"
        deltas = [
            each.choices[0]
            for each in client.chat.completions.create(**options, tool_choice=choice, stream=True)
        ]
        pieces = [piece for each in deltas for piece in each.delta.tool_calls or ()]
        assert pieces[0].function.name == call.function.name and pieces[0].id
        assert "".join(each.function.arguments for each in pieces) == call.function.arguments
        assert deltas[-1].finish_reason == reason
        assert not any(each.delta.content for each in deltas)
    for choice in ("auto", "none"):
        answer = client.chat.completions.create(
            **{**options, "max_tokens": 20}, tool_choice=choice
        ).choices[0]
        assert answer.message.tool_calls is None and isinstance(answer.message.content, str)
    history = [
        *QUESTION,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "add", "arguments": '{"n": 2}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]
    more = client.chat.completions.create(**{**options, "messages": history, "max_tokens": 5})
    text = json.dumps(TOOLS, ensure_ascii=False) + "user: goassistant: 2!tool: 3>"
    assert more.usage.prompt_tokens == len(text)


def use(**options: Any) -> ToolUse:
    parsed = parse_tools({"tools": TOOLS, **options}, parallel=options.pop("parallel", True))
    assert parsed is not None
    return parsed


@pytest.mark.parametrize("size", [1, 3, 200])
def test_calls_are_read_from_any_pieces_of_text(size):
    second = CALL.replace("add", "take").replace('"n": 1', '"n": "}<\\"]"')
    cases = [
        ("auto", "no call <tool>", "no call <tool>", []),
        ("auto", CALL, "", [("add", '{"n": 1}')]),
        (
            "auto",
            f"Well.{CALL}\n{second}",
            "Well.",
            [
                ("add", '{"n": 1}'),
                ("take", '{"n": "}<\\"]"}'),
            ],
        ),
        ("auto", CALL[:-15], "", [("add", '{"n": 1')]),
        (
            "required",
            '[{"name": "add", "arguments": {"n": 1}} , {"name":"take","arguments":{}}]',
            "",
            [
                ("add", '{"n": 1}'),
                ("take", "{}"),
            ],
        ),
    ]
    for choice, text, content, calls in cases:
        reader = ToolCallReader(use(tool_choice=choice))
        shown, pieces = "", []
        for first in range(0, len(text), size):
            more, new = reader.add(text[first : first + size], end=first + size >= len(text))
            shown += more
            pieces += new
        assert (shown, reader.content) == (content, content), text
        assert [(each.name, each.arguments) for each in reader.calls] == calls
        assert [piece.call.name for piece in pieces if piece.call] == [name for name, _ in calls]
        for index, (_, arguments) in enumerate(calls):
            assert "".join(p.arguments for p in pieces if p.index == index) == arguments
        assert reader.finish == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("any text, <b> and <tool_", True),
        (CALL, True),
        (f"I will.{CALL}\n{CALL}", True),
        ('<tool_call>{"name": "no"', False),
        ('<tool_call>{"name": "add", "arguments": {"n": 3', False),
        (f"{CALL} and more", False),
    ],
)
def test_auto_allows_text_and_only_calls_that_match(text, fits):
    guides = Guides(ByteTokenizer(), (0,), vocab=256)
    guide = guides.open(SamplingParams(**use().constraint))
    matcher: LLMatcher = guide._matcher
    count = matcher.try_consume_tokens(list(text.encode()))
    assert (count == len(text)) is fits


def test_a_template_without_tools_gets_them_as_text():
    messages = template_messages(
        [
            {"role": "system", "content": "Be kind."},
            *QUESTION,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": '{"n": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "2"},
            {"role": "tool", "tool_call_id": "2", "content": "4"},
        ]
    )
    tokenizer = ByteTokenizer(PLAIN)
    text = tokenizer.chat(readable_messages(tokenizer, messages, TOOLS), tools=TOOLS)
    assert text.startswith("system: Be kind.\n\n# Tools") and json.dumps(TOOLS[1]) in text
    assert f"assistant: {CALL}\n" in text
    results = "<tool_response>\n2\n</tool_response>\n<tool_response>\n4\n</tool_response>"
    assert text.endswith(f"user: {results}\n>")
    knows = ByteTokenizer(KNOWS_TOOLS)
    assert readable_messages(knows, messages, TOOLS) is messages


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": {}}, "tools must be a list"),
        ({"tools": [{"type": "web"}]}, r"tools\[0\] must be"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "'a b'"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "the name add again"),
        ({"tool_choice": "auto"}, "tool_choice requires tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice is any"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "of one of add, take",
        ),
    ],
)
def test_wrong_tools_are_refused(fields, message):
    with pytest.raises(ApiError, match=message):
        parse_tools(fields, parallel=True)


def test_wrong_history_and_two_constraints_are_refused(server):
    client = server.client()
    model = server.event("serving")["model"]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{"}}
    for message, text in (
        ({"role": "tool", "content": "3"}, "needs tool_call_id"),
        ({"role": "assistant", "content": "", "tool_calls": [call]}, "of add are not JSON"),
        ({"role": "user", "content": "", "tool_calls": [call]}, "in an assistant"),
    ):
        with pytest.raises(openai.BadRequestError, match=text):
            client.chat.completions.create(model=model, messages=[message])
    with pytest.raises(openai.BadRequestError, match="both constrain the answer"):
        client.chat.completions.create(
            model=model, messages=QUESTION, tools=TOOLS, response_format={"type": "json_object"}
        )
