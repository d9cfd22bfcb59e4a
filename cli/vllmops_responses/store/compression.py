"""JSON made small: bodies of responses have much in common, and a dictionary says it once.

Some 5 microseconds for each KB. The first byte tells how the rest was packed, so a better
dictionary gets a number of its own, and the old one stays.
"""

from __future__ import annotations

import asyncio
import zlib

PLAIN, DEFLATED = b"\x00", b"\x02"
LEVEL = 1
# zlib clears its tables first, which took longer than all else for a short body at its default, 8.
TABLES = 6
# Below the one it takes longer than it saves; from the other on it takes milliseconds, and is done
# beside the event loop.
SHORT, LARGE = 96, 1 << 16
SOON_UNPACKED = LARGE // 4
# What is frequent stands at the end, where it costs least.
FIRST = (
    b'{"type":"response.output_text.delta","sequence_number":1,"item_id":"msg_","output_index":0,'
    b'"content_index":0,"delta":" ","logprobs":[]},{"type":"response.function_call_arguments.delta"'
    b',"item_id":"fc_"},{"type":"response.reasoning_text.delta"},{"type":"response.in_progress",'
    b'"response":{},{"type":"response.output_item.added","item":{"type":"response.output_item.done"'
    b',{"type":"response.content_part.added","part":{"type":"response.content_part.done",'
    b'{"type":"response.output_text.done",{"type":"response.completed"'
    b'{"type":"mcp_call","arguments":"{}","approval_request_id":null,"error":null,"name":"",'
    b'"server_label":""}{"type":"function_call_output","call_id":"call_","output":"{}"}'
    b'{"type":"function","name":"","description":"","strict":true,"parameters":{"type":"object",'
    b'"properties":{"title":"","type":"string","description":""},"required":[""],'
    b'"additionalProperties":false}}'
    b'{"arguments":"{}","call_id":"call_","name":"","type":"function_call","id":"fc_","status":'
    b'{"id":"rs_","summary":[],"type":"reasoning","content":[{"text":"","type":"reasoning_text"}],'
    b'"encrypted_content":null,"status":"completed"}'
    b'"incomplete_details":{"reason":"max_output_tokens"},"status":"incomplete","status":"queued",'
    b'"error":{"code":"server_error","message":""},"status":"failed","status":"cancelled"'
    b'[{"role":"user","content":[{"type":"input_text","text":""},{"type":"input_image","detail":'
    b'"auto","image_url":"data:image/png;base64,"}],"type":"message"}]'
    b'[{"type":"message","role":"user","content":""}][{"role":"user","content":""}]'
    b'{"id":"resp_","created_at":17,"incomplete_details":null,"instructions":null,"metadata":null,'
    b'"model":"","object":"response","output":[{"id":"msg_","content":[{"annotations":[],"text":"",'
    b'"type":"output_text","logprobs":null}],"role":"assistant","status":"completed","type":"message'
    b'","phase":null}],"parallel_tool_calls":true,"temperature":1.0,"tool_choice":"auto","tools":[],'
    b'"top_p":1.0,"background":false,"max_output_tokens":1024,"max_tool_calls":null,'
    b'"previous_response_id":"resp_","prompt":null,"reasoning":null,"service_tier":"auto","status":'
    b'"completed","text":null,"top_logprobs":null,"truncation":"disabled","usage":{"input_tokens":1,'
    b'"input_tokens_details":{"cached_tokens":0,"cache_write_tokens":0,"input_tokens_per_turn":[],'
    b'"cached_tokens_per_turn":[]},"output_tokens":16,"output_tokens_details":{"reasoning_tokens":0,'
    b'"tool_output_tokens":0,"output_tokens_per_turn":[],"tool_output_tokens_per_turn":[]},'
    b'"total_tokens":1},"user":null,"presence_penalty":0.0,"frequency_penalty":0.0,'
    b'"kv_transfer_params":null,"ec_transfer_params":null,"input_messages":null,'
    b'"output_messages":null,"metrics":null}'
)
# Bodies with every field that OpenAI's types require.
SECOND = (
    b'"incomplete_details":{"reason":"max_output_tokens"},"status":"incomplete","text":{"format":{'
    b'"type":"json_schema","name":"","schema":{"strict":true},"safety_identifier":"",'
    b'"prompt_cache_key":"","conversation":{"id":"conv_"},"completed_at":null,'
    b'{"id":"resp_","created_at":17,"incomplete_details":null,"instructions":null,"metadata":{},'
    b'"model":"","object":"response","output":[{"id":"msg_","content":[{"annotations":[],"text":"",'
    b'"type":"output_text","logprobs":null}],"role":"assistant","status":"completed","type":"message'
    b'","phase":null}],"parallel_tool_calls":true,"temperature":1.0,"tool_choice":"none","tools":[],'
    b'"top_p":1.0,"background":false,"max_output_tokens":1024,"max_tool_calls":null,'
    b'"previous_response_id":"resp_","prompt":null,"reasoning":null,"service_tier":"default",'
    b'"status":"completed","text":{"format":{"type":"text"},"verbosity":null},"top_logprobs":0,'
    b'"truncation":"disabled","usage":{"input_tokens":1,"input_tokens_details":{"cached_tokens":0,'
    b'"cache_write_tokens":0,"input_tokens_per_turn":[],"cached_tokens_per_turn":[]},'
    b'"output_tokens":16,"output_tokens_details":{"reasoning_tokens":0,"tool_output_tokens":0,'
    b'"output_tokens_per_turn":[],"tool_output_tokens_per_turn":[]},"total_tokens":1},"user":null,'
    b'"presence_penalty":0.0,"frequency_penalty":0.0,"kv_transfer_params":null,'
    b'"ec_transfer_params":null,"input_messages":null,"output_messages":null,"completed_at":17,'
    b'"error":null,"prompt_cache_key":null,"safety_identifier":null,"store":true}'
)
DICTIONARIES = {b"\x01": FIRST, DEFLATED: FIRST + SECOND}


def deflate(data: bytes) -> bytes:
    """Packed, or as it is behind one byte where that is shorter, or not worth the time."""
    if len(data) < SHORT:
        return PLAIN + data
    packer = zlib.compressobj(
        LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS, TABLES, zdict=DICTIONARIES[DEFLATED]
    )
    packed = packer.compress(data) + packer.flush()
    return DEFLATED + packed if len(packed) < len(data) else PLAIN + data


def inflate(data: bytes) -> bytes:
    """What was packed.

    Raises:
        ValueError: it was not packed here, or is broken.
    """
    if data[:1] == PLAIN:
        return data[1:]
    if data[:1] not in DICTIONARIES:
        raise ValueError(f"unknown compression: {data[:1]!r}")
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS, zdict=DICTIONARIES[data[:1]])
    try:
        found = unpacker.decompress(data[1:])
    except zlib.error as error:
        raise ValueError(f"compressed data is damaged: {error}") from error
    if not unpacker.eof:
        raise ValueError("compressed data is cut off")
    return found


async def deflate_async(data: bytes) -> bytes:
    """`deflate` without holding the event loop up."""
    return deflate(data) if len(data) < LARGE else await asyncio.to_thread(deflate, data)


async def inflate_async(data: bytes) -> bytes:
    """`inflate` without holding the event loop up."""
    return inflate(data) if len(data) < SOON_UNPACKED else await asyncio.to_thread(inflate, data)
