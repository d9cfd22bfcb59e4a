"""LlamaIndex's class of the Responses API, as an application uses it; fails where anything does.

Run by the Python of an environment with ``llama-index-llms-openai``: its arguments are the
server's base URL and the model.
"""

# mypy: ignore-errors

import asyncio
import sys
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai import OpenAIResponses
from pydantic import BaseModel

BASE, MODEL = sys.argv[1:]
# A random model says one word, and ends.
SPEAKS = {"extra_body": {"structured_outputs": {"choice": ["on"]}}}
QUESTION = ChatMessage(role="user", content="one")


def model(**options):
    options = {"additional_kwargs": SPEAKS, "max_output_tokens": 100, **options}
    return OpenAIResponses(
        model=MODEL,
        api_base=BASE,
        api_key="one",
        max_retries=0,
        timeout=120,
        context_window=4096,
        **options,
    )


def lamp(on: bool) -> str:
    """Switch the lamp."""
    return f"the lamp is {'on' if on else 'off'}"


class Answer(BaseModel):
    """An answer."""

    word: Literal["yes", "no"]


def asked_and_streamed():
    assert model().complete("hello").text == "on"
    assert list(model().stream_complete("hello"))[-1].text == "on"
    assert model().chat([QUESTION]).message.content == "on"
    assert list(model().stream_chat([QUESTION]))[-1].message.content == "on"


async def at_once():
    asked = model()
    answers = await asyncio.gather(*(asked.achat([QUESTION]) for _ in range(4)))
    assert [answer.message.content for answer in answers] == ["on"] * 4
    assert [item async for item in await asked.astream_chat([QUESTION])][-1].message.content == "on"


def turns(*, kept: bool, **options):
    """Turns whose history the server or the client keeps."""
    asked = model(track_previous_responses=kept, **options)
    history, tokens = [QUESTION], []
    for text in ("two", "three", ""):
        answer = asked.chat(history)
        assert answer.message.content == "on", answer
        new = ChatMessage(role="user", content=text)
        history = [new] if kept else [*history, answer.message, new]
        tokens.append(answer.raw.usage.input_tokens)
    assert tokens == sorted(set(tokens)), tokens
    return tokens


def tools():
    asked = model(additional_kwargs={}, max_output_tokens=300)
    tool = FunctionTool.from_defaults(lamp)
    answer = asked.chat_with_tools([tool], user_msg="light, please", tool_required=True)
    calls = asked.get_tool_calls_from_response(answer)
    assert {call.tool_name for call in calls} == {"lamp"}
    results = [
        ChatMessage(role="tool", content="it is on", additional_kwargs={"call_id": call.tool_id})
        for call in calls
    ]
    answer = model().chat([QUESTION, answer.message, *results])
    assert answer.message.content == "on", answer


def check_structured_output():
    asked = model(additional_kwargs={})
    assert asked.structured_predict(Answer, PromptTemplate("well?")).word in {"yes", "no"}


asked_and_streamed()
asyncio.run(at_once())
assert turns(kept=True) == turns(kept=False)
turns(kept=False, store=False, include=["reasoning.encrypted_content"])
tools()
check_structured_output()
