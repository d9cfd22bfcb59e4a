"""What users and models said, in the lines of logs and in exceptions' messages."""

from __future__ import annotations

import json

import pytest

from vllmops.redaction.redactor import MARK, Redactor

HEAD = "(APIServer pid=7) INFO 11-20 19:05:14 [logger.py:41] "
TEXTS = (
    "PLANTED tell me a story",
    "Please PLANTED it's mine, isn't it?",
    'He said "PLANTED" to me',
    "PLANTED\nin two lines",
    "PLANTED, a = f(x); {'b': [1]}",
)
# {!r} as Python quotes it, {j} as JSON does.
LINES = (
    "Received request cmpl-1: prompt: {r}, params: SamplingParams(n=1), prompt_token_ids: [1], lora_request: None.",
    "Generated response cmpl-1: output: {r}, finish_reason: stop",
    "ValueError: The prompt {r} is too long: 5000 tokens",
    "ValueError: the input {r} has no images",
    "ValueError: prompt {r} could not be tokenized",
    "RuntimeError: failed to parse tool call from {r}",
    "jinja2.exceptions.TemplateError: the message {r} has no role",
    "vllm.exceptions.VLLMValidationError: can't handle {r} in this model",
    "json.decoder.JSONDecodeError: can't decode {r}: line 1 column 1 (char 0)",
    "  Input should be a valid list [type=list_type, input_value={r}, input_type=str]",
    "  Value error [type=value_error, input_value={{'model': 'm', 'prompt': {r}}}, input_type=dict]",
    "pydantic: {{'type': 'missing', 'loc': ('body', 'messages'), 'msg': 'Field required', 'input': {{'prompt': {r}}}}}",
    'Request body: {{"model": "m", "messages": [{{"role": "user", "content": {j}}}]}}',
    'Request 1 JSON body: {{"prompt": {j}, "max_tokens": 5}}',
    '{{"role": "user", "content": {j}}}',
    "{{'role': 'user', 'content': {r}}}",
    "ChatCompletionRequest(messages=[{{'role': 'user', 'content': {r}}}], model='m')",
    "ResponsesRequest(input={r}, model='m')",
    'body={{"input": {j}}}',
    'response: {{"choices": [{{"message": {{"content": {j}}}}}]}}',
    "tool call arguments: {j}",
    "user message: {r}",
    "system prompt: {r}",
    "The user asked {r}",
    "delta={{'content': {r}}}",
)


@pytest.mark.parametrize("line", LINES)
def test_prompts_and_answers_are_redacted_completely(line: str) -> None:
    for text in TEXTS:
        shown = line.format(r=repr(text), j=json.dumps(text))
        for written in (shown, HEAD + shown):
            assert "PLANTED" not in Redactor().redact_log(written), written
            assert "story" not in Redactor().redact_log(written), written


def test_around_it_all_stays() -> None:
    for before, after in (
        ("ValueError: The prompt ", " is too long: 5000 tokens"),
        (f"{HEAD}Received request r: prompt: ", ", params: SamplingParams(n=1)"),
        ("  Input should be a list [type=list_type, input_value=", ", input_type=str]"),
    ):
        assert (
            Redactor().redact_log(f"{before}'tell me a story'{after}") == f"{before}{MARK}{after}"
        )
