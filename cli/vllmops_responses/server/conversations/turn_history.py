"""Reads the turns before a request, and caches them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from cachetools import LRUCache

from ...store.backend import Response
from ...store.compression import inflate_async
from ...store.conversation_backend import ConversationItem
from .. import wire_format
from ..carriers.carrier_merge import COMPACTION, Item, extract_readable_part, get_encrypted_content

# Of the cached answers, as they are in memory: about as `estimate_memory_bytes` has it.
CACHE_BYTES = 64 << 20


class ConversationPart(NamedTuple):
    """Part of a conversation.

    Args:
        items: as a client sends them.
        parsed_items: the same as vLLM reads them.
        size: in bytes, before the store compresses it.
        compaction: the sealed content of the compaction item that it begins with, empty if none.
    """

    items: Sequence[Item]
    parsed_items: Sequence[Any]
    size: int
    compaction: str = ""


def estimate_memory_bytes(part: ConversationPart) -> int:
    """About how many bytes a part takes in memory: its texts, and the objects of each item."""
    return 3 * part.size + 3_000 * len(part.items)


Open = Callable[[str], Awaitable[list[Item] | None]]


class HistoryReader:
    """Reads the turns of conversations.

    Each turn needs the answers of all turns before it, and unpacking and parsing them is the main
    cost of a long conversation. So the most recently used answers stay in a cache. vLLM too shares
    an answer's items among requests. It may write to the items of an input, so those are parsed
    each time.

    Args:
        parse: parses items as vLLM does.
        harmony: whether vLLM renders them for gpt-oss, which supports fewer types.
    """

    def __init__(self, parse: Callable[[list[Item]], list[Any]], *, harmony: bool) -> None:
        self.parse = parse
        self.harmony = harmony
        self.answers: LRUCache[bytes, ConversationPart] = LRUCache(
            CACHE_BYTES, getsizeof=estimate_memory_bytes
        )

    async def read_turns(
        self, turns: Sequence[Response], open_compaction: Open | None = None
    ) -> ConversationPart:
        """The inputs and answers of stored turns, oldest first.

        Args:
            turns: which may have been compacted on the way.
            open_compaction: gives the items of a compaction item's sealed content, or None if it
                can't be opened; the turns before it count then.
        """
        answers, items, size = list[ConversationPart](), list[Item](), 0
        for turn in reversed(turns):
            answers.append(self.answers.get(turn.body) or await self.read_output(turn.body))
            if (
                open_compaction
                and (text := answers[-1].compaction)
                and (left := await open_compaction(text))
            ):
                items, size = left, len(text)
                break
        compacted, parsed = bool(items), self.parse(items)
        # What clients sent is read all at once, which takes half the time; a compaction has it.
        asking = turns[len(turns) - len(answers) + compacted :]
        with wire_format.translate_damage_errors("turn"):
            sent = [await inflate_async(turn.input) for turn in asking]
            asked = list(
                map(extract_readable_parts, wire_format.INPUTS.decode(b"[%b]" % b",".join(sent)))
            )
        asked_parsed = iter(self.parse([item for part in asked for item in part]))
        if compacted:
            asked.insert(0, [])
        for part, answer in zip(asked, reversed(answers), strict=True):
            items += part
            parsed += islice(asked_parsed, len(part))
            items += answer.items
            parsed += answer.parsed_items
            size += answer.size
        return ConversationPart(items, parsed, size + sum(map(len, sent)))

    async def read_conversation_items(
        self, entries: Sequence[ConversationItem]
    ) -> ConversationPart:
        """The items of a conversation, as the store keeps them."""
        with wire_format.translate_damage_errors("item"):
            sent = [await inflate_async(entry.body) for entry in entries if not entry.answer]
            given = list(
                map(extract_readable_part, wire_format.ITEMS.decode(b"[%b]" % b",".join(sent)))
            )
        asked = iter(given)
        asked_parsed = iter(self.parse([item for item in given if item]))
        items, parsed, size = list[Item](), list[Any](), sum(map(len, sent))
        for entry in entries:
            if not entry.answer:
                if item := next(asked):
                    items.append(item)
                    parsed.append(next(asked_parsed))
                continue
            part = self.answers.get(entry.body) or await self.read_output_item(entry.body)
            items += part.items
            parsed += part.parsed_items
            size += part.size
        return ConversationPart(items, parsed, size)

    async def read_output_item(self, packed_body: bytes) -> ConversationPart:
        """An item that the model made; caches it."""
        with wire_format.translate_damage_errors("item"):
            body = await inflate_async(packed_body)
            items = extract_readable_parts(
                wire_format.select_history_items(
                    [wire_format.ITEM.decode(body)], harmony=self.harmony
                )
            )
        return self.cache_part(packed_body, ConversationPart(items, self.parse(items), len(body)))

    async def read_output(self, packed_body: bytes) -> ConversationPart:
        """The answer in the body of a response; caches it."""
        with wire_format.translate_damage_errors("turn"):
            body = await inflate_async(packed_body)
            output = wire_format.OUTPUT.decode(body).output
        compaction = next(
            (get_encrypted_content(item) for item in output if item.get("type") == COMPACTION), ""
        )
        items = extract_readable_parts(
            wire_format.select_history_items(output, harmony=self.harmony)
        )
        return self.cache_part(
            packed_body, ConversationPart(items, self.parse(items), len(body), compaction)
        )

    def cache_part(self, packed_body: bytes, answer: ConversationPart) -> ConversationPart:
        if estimate_memory_bytes(answer) <= CACHE_BYTES:
            self.answers[packed_body] = answer
        return answer


def extract_readable_parts(items: Sequence[Item]) -> list[Item]:
    """Items without encrypted content, and without the items that have nothing else."""
    return [part for item in items if (part := extract_readable_part(item))]
