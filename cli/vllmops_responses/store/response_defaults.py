"""What a response object has where neither the request nor vLLM says anything else."""

from __future__ import annotations

from typing import Any

import msgspec

# OpenAI's documented defaults, of every field that the API's types require.
DEFAULTS: dict[str, Any] = {
    "background": False,
    "completed_at": None,
    "error": None,
    "frequency_penalty": 0.0,
    "incomplete_details": None,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": None,
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "usage": None,
}
NULL = msgspec.Raw(b"null")


def fill_defaults(stored_fields: dict[str, Any]) -> dict[str, Any]:
    """A stored response object with the defaults where a field is missing or null.

    For a body from before vllmops filled in its fields, or one that is damaged.

    Args:
        stored_fields: the object; its values may be raw JSON.
    """
    said = {
        name: value for name, value in stored_fields.items() if value is not None and value != NULL
    }
    return {**stored_fields, **DEFAULTS, **said}
