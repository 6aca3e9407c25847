"""What each client is used for when its requests are recorded.

Each function takes the server's URL, the model's name and the folder of its weights, checks what
the client read, and returns that.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

KEY = "any"
QUESTION = [{"role": "user", "content": "Is it warm in Oslo?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Oslo", "Rome"]},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


def use_litellm(url: str, model: str, weights: Path) -> Any:
    """Chats, streams, completions and tools of litellm."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    options: dict[str, Any] = {
        "model": f"openai/{model}",
        "api_base": url,
        "api_key": KEY,
        "seed": 1,
        "max_tokens": 400,
    }
    answer = litellm.completion(messages=QUESTION, **options)
    assert answer.usage.completion_tokens > 0
    pieces = list(litellm.completion(messages=QUESTION, stream=True, **options))
    streamed = "".join(each.choices[0].delta.content or "" for each in pieces)
    assert streamed == answer.choices[0].message.content
    named = {"type": "function", "function": {"name": "weather"}}
    called: list[Any] = []
    for choice in ("required", named, "auto", "none"):
        response = litellm.completion(
            messages=QUESTION, tools=[WEATHER], tool_choice=choice, **options
        )
        calls = response.choices[0].message.tool_calls or []
        called.append([json.loads(each.function.arguments) for each in calls])
    assert called[0][0]["city"] and called[1][0]["city"] and not called[2] and not called[3]
    chunks = litellm.completion(
        messages=QUESTION, tools=[WEATHER], tool_choice="required", stream=True, **options
    )
    rebuilt = litellm.stream_chunk_builder(list(chunks), messages=QUESTION)
    first = rebuilt.choices[0].message.tool_calls[0].function
    assert first.name == "weather" and json.loads(first.arguments)["city"]
    history = [
        *QUESTION,
        response_message(first.name, first.arguments),
        {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"},
    ]
    litellm.completion(messages=history, tools=[WEATHER], **options)
    schema = WEATHER["function"]["parameters"]  # type: ignore[index]
    wanted = {"type": "json_schema", "json_schema": {"name": "w", "schema": schema, "strict": True}}
    exact = litellm.completion(messages=QUESTION, response_format=wanted, **options)
    loose = litellm.completion(
        messages=QUESTION, response_format={"type": "json_object", "schema": schema}, **options
    )
    texts = [each.choices[0].message.content for each in (exact, loose)]
    assert all(set(json.loads(text)) == {"city", "unit"} for text in texts), texts
    text = litellm.text_completion(prompt="Oslo is", **{**options, "max_tokens": 8}, logprobs=2)
    return {"tools": called, "texts": texts, "completion": text.choices[0].text}


def response_message(name: str, arguments: str) -> dict[str, Any]:
    """An assistant's message that calls a tool."""
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def use_langchain(url: str, model: str, weights: Path) -> Any:
    """Chats, streams, tools and structured output of langchain-openai."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel, ConfigDict

    class weather(BaseModel):
        """The weather in a city"""

        model_config = ConfigDict(extra="forbid")
        city: Literal["Oslo", "Rome"]
        unit: Literal["celsius", "fahrenheit"]

    chat = ChatOpenAI(base_url=url, model=model, api_key=KEY, seed=1, max_tokens=400)
    question = HumanMessage("Is it warm in Oslo?")
    answer = chat.invoke([question])
    streamed = "".join(str(each.content) for each in chat.stream([question]))
    assert streamed == answer.content and answer.usage_metadata["output_tokens"] > 0
    results = {}
    for method in ("function_calling", "json_schema"):
        results[method] = chat.with_structured_output(weather, method=method).invoke([question])
        assert isinstance(results[method], weather)
    chat.bind(response_format={"type": "json_object"}).invoke([question])
    bound = chat.bind_tools([weather], tool_choice="any")
    reply = bound.invoke([question])
    (call,) = reply.tool_calls[:1]
    assert call["name"] == "weather" and call["args"]["city"]
    chunks = list(bound.stream([question]))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    assert whole.tool_calls[0]["name"] == "weather"
    results_of = [
        ToolMessage("12 degrees", tool_call_id=each["id"], name=each["name"])
        for each in reply.tool_calls
    ]
    chat.bind_tools([weather]).invoke([question, reply, *results_of])
    return {name: value.model_dump() for name, value in results.items()} | {"call": call["args"]}


def use_instructor(url: str, model: str, weights: Path) -> Any:
    """Response models of instructor by tools, by JSON schema and by JSON."""
    import instructor
    import openai
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: Literal["Oslo", "Rome"]
        warm: bool

    results = {}
    for mode in ("TOOLS", "JSON_SCHEMA"):
        client = instructor.from_openai(
            openai.OpenAI(base_url=url, api_key=KEY, max_retries=0), mode=instructor.Mode[mode]
        )
        answer = client.chat.completions.create(
            model=model,
            messages=QUESTION,
            response_model=Weather,
            max_tokens=400,
            seed=1,
            max_retries=1,
        )
        results[mode] = answer.model_dump()
    return results


QUESTIONS = [
    ("The capital of France is", [" Paris", " a small village in the mountains", " blue"]),
    ("Water freezes at zero degrees", [" Celsius", " Fahrenheit of course", " of happiness"]),
]
TASKS = {
    "choice": "output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: answer\n"
    'target_delimiter: ""\nmetric_list:\n  - metric: acc\n',
    "rolling": "output_type: loglikelihood_rolling\ndoc_to_target: question\n"
    "metric_list:\n  - metric: word_perplexity\n",
    "until": 'output_type: generate_until\ndoc_to_target: ""\n'
    'generation_kwargs:\n  until: ["."]\n  max_gen_toks: 12\n  do_sample: false\n'
    "metric_list:\n  - metric: exact_match\n",
}


def use_lm_eval(url: str, model: str, weights: Path) -> Any:
    """Multiple choice, rolling log-likelihood and generation; equal to lm-eval's hf backend."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    import lm_eval
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [{"question": q, "choices": c, "answer": 0} for q, c in QUESTIONS]
        (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for task, text in TASKS.items():
            head = (
                f"task: local_{task}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n"
                f"    test: {folder / 'data.jsonl'}\ntest_split: test\n"
                f'doc_to_text: "{"" if task == "rolling" else "{{question}}"}"\n'
            )
            (folder / f"{task}.yaml").write_text(head + text)
        tasks = TaskManager(include_path=str(folder), include_defaults=False)

        def evaluate(kind: str, **more: Any) -> dict[str, list[Any]]:
            results = lm_eval.simple_evaluate(
                model=kind,
                model_args=more,
                tasks=[f"local_{task}" for task in TASKS],
                task_manager=tasks,
                bootstrap_iters=0,
            )
            return {
                task: [
                    each if isinstance(each, str | float) else each[0]
                    for sample in sorted(
                        results["samples"][f"local_{task}"], key=lambda each: each["doc_id"]
                    )
                    for each in sample["filtered_resps"]
                ]
                for task in TASKS
            }

        ours = evaluate(
            "local-completions",
            base_url=f"{url}/completions",
            model=model,
            tokenizer=str(weights),
            tokenizer_backend="huggingface",
            num_concurrent=1,
            max_length=512,
        )
        theirs = evaluate("hf", pretrained=str(weights), dtype="float32", device="cpu")
    assert ours["until"] == theirs["until"], (ours["until"], theirs["until"])
    apart = {
        task: max(abs(float(a) - float(b)) for a, b in zip(ours[task], theirs[task], strict=True))
        for task in ("choice", "rolling")
    }
    assert max(apart.values()) < 1e-3, apart
    return {"largest difference to the hf backend in nats": apart, "texts": ours["until"]}


CALLS: dict[str, Callable[[str, str, Path], Any]] = {
    "litellm": use_litellm,
    "langchain-openai": use_langchain,
    "instructor": use_instructor,
    "lm-eval": use_lm_eval,
}
