"""Frames of vLLM's tool and reasoning parsers, which run on the API server's event loop."""

from __future__ import annotations

FUNCTIONS = ("extract_tool_calls", "extract_reasoning")
FOLDERS = ("/vllm/tool_parsers/", "/vllm/reasoning/", "/openai/tool_parsers/")


def is_parser_call(function: str, file: str) -> bool:
    """Whether a call is one of a parser.

    Args:
        function: its name, qualified or not.
        file: the path of its source.
    """
    name = function.rpartition(".")[2]
    return name.startswith(FUNCTIONS) or any(folder in file for folder in FOLDERS)
