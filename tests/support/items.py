"""Items of every type of OpenAI's API that vLLM does not render itself, and of a client's own."""

from __future__ import annotations

from typing import Any

FILE = "data:image/png;base64,AAAA"
ITEMS: tuple[dict[str, Any], ...] = (
    {
        "type": "agent_message",
        "author": "/root/reader",
        "recipient": "/root",
        "content": [{"type": "input_text", "text": "the lamp is on"}],
    },
    {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "lamp"},
    },
    {"type": "file_search_call", "id": "fs_1", "status": "completed", "queries": ["lamp"]},
    {
        "type": "computer_call",
        "id": "cu_1",
        "call_id": "call_1",
        "status": "completed",
        "action": {"type": "screenshot"},
        "pending_safety_checks": [],
    },
    {
        "type": "computer_call_output",
        "call_id": "call_1",
        "output": {"type": "computer_screenshot", "image_url": FILE},
    },
    {
        "type": "tool_search_call",
        "call_id": "call_2",
        "execution": "client",
        "status": "completed",
        "arguments": {"query": "lamp"},
    },
    {
        "type": "tool_search_output",
        "call_id": "call_2",
        "execution": "client",
        "status": "completed",
        "tools": [],
    },
    {"type": "compaction_trigger"},
    {"type": "configuration_update", "reasoning": {"effort": "low"}},
    {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "AAAA"},
    {
        "type": "code_interpreter_call",
        "id": "ci_1",
        "status": "completed",
        "code": "1 + 1",
        "container_id": "c",
        "outputs": [{"type": "logs", "logs": "2"}],
    },
    {
        "type": "local_shell_call",
        "id": "ls_1",
        "call_id": "call_3",
        "status": "completed",
        "action": {"type": "exec", "command": ["ls"], "env": {}},
    },
    {"type": "local_shell_call_output", "id": "call_3", "output": "lamp.txt"},
    {"type": "shell_call", "call_id": "call_4", "action": {"commands": ["ls"]}},
    {
        "type": "shell_call_output",
        "call_id": "call_4",
        "output": [
            {"stdout": "lamp.txt", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
        ],
    },
    {
        "type": "apply_patch_call",
        "call_id": "call_5",
        "status": "completed",
        "operation": {"type": "delete_file", "path": "lamp.txt"},
    },
    {"type": "apply_patch_call_output", "call_id": "call_5", "status": "failed", "output": "no"},
    {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "house", "tools": []},
    {
        "type": "mcp_approval_request",
        "id": "mcpr_1",
        "server_label": "house",
        "name": "lamp",
        "arguments": "{}",
    },
    {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True},
    {
        "type": "mcp_call",
        "id": "mcp_1",
        "server_label": "house",
        "name": "lamp",
        "arguments": "{}",
        "output": "on",
    },
    {
        "type": "program",
        "id": "pr_1",
        "call_id": "call_6",
        "code": "lamp()",
        "fingerprint": "f",
    },
    {
        "type": "program_output",
        "id": "po_1",
        "call_id": "call_6",
        "result": "on",
        "status": "completed",
    },
)
