"""LangChain's class of the Responses API, as an application uses it; fails where anything does.

Run by the Python of an environment with ``langchain-openai``: its arguments are the server's base
URL and the model.
"""

# mypy: ignore-errors

import asyncio
import sys
from typing import Literal

from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

BASE, MODEL = sys.argv[1:]
# A random model says one word, and ends.
SPEAKS = {"structured_outputs": {"choice": ["on"]}}


def model(**options):
    options = {"max_tokens": 100, "extra_body": SPEAKS, **options}
    return ChatOpenAI(
        model=MODEL,
        base_url=BASE,
        api_key="one",
        use_responses_api=True,
        max_retries=0,
        timeout=120,
        **options,
    )


def lamp(on: bool) -> str:
    """Switch the lamp."""
    return f"the lamp is {'on' if on else 'off'}"


class Answer(BaseModel):
    """An answer."""

    word: Literal["yes", "no"]


def asked_and_streamed():
    answer = model().invoke("hello")
    assert answer.text == "on", answer
    assert answer.response_metadata["status"] == "completed"
    assert answer.usage_metadata["input_tokens"] > 0
    whole = AIMessageChunk("")
    for chunk in model().stream("hello"):
        whole += chunk
    assert whole.text == "on", whole
    assert whole.usage_metadata["output_tokens"] == answer.usage_metadata["output_tokens"]


async def at_once():
    asked = model()
    answers = await asyncio.gather(*(asked.ainvoke("hello") for _ in range(4)))
    assert [answer.text for answer in answers] == ["on"] * 4
    assert [event async for event in asked.astream_events("hello", version="v2")]


def turns(kind, **options):
    """Turns whose history the client, the server or a carrier keeps."""
    asked = model(**options)
    history = [SystemMessage("be short"), HumanMessage("one")]
    tokens = []
    for text in ("two", "three", ""):
        answer = asked.invoke(history)
        assert answer.text == "on", (kind, answer)
        history += [answer, HumanMessage(text)]
        tokens.append(answer.usage_metadata["input_tokens"])
    assert tokens == sorted(set(tokens)), (kind, tokens)
    return tokens


def tools():
    asked = model(extra_body=None, max_tokens=300, use_previous_response_id=True)
    forced = asked.bind_tools([lamp], tool_choice="lamp", strict=True)
    history = [HumanMessage("light, please")]
    call = forced.invoke(history)
    (made,) = call.tool_calls
    assert made["name"] == "lamp"
    assert set(made["args"]) == {"on"}
    history += [call, ToolMessage(lamp(**made["args"]), tool_call_id=made["id"])]
    answer = model(use_previous_response_id=True).bind_tools([lamp]).invoke(history)
    assert answer.text == "on", answer


def check_structured_output():
    asked = model(extra_body=None).with_structured_output(Answer, method="json_schema")
    assert asked.invoke("well?").word in {"yes", "no"}


asked_and_streamed()
asyncio.run(at_once())
by_client = turns("client", output_version="responses/v1")
assert by_client == turns("older form", output_version="v0")
assert by_client == turns("newer form", output_version="v1")
assert by_client == turns("server", use_previous_response_id=True)
encrypted = {"store": False, "include": ["reasoning.encrypted_content"]}
assert by_client == turns("carrier", output_version="responses/v1", **encrypted)
turns("compacted", context_management=[{"type": "compaction", "compact_threshold": 1000}])
tools()
check_structured_output()
