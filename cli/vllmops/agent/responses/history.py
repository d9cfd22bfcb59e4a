"""The turns before a request, as vLLM reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cachetools import LRUCache

from ...store.backend import Response
from ...store.packing import unpack
from . import wire
from .carried import Item, readable

# Bytes of answers, as JSON, that are kept ready; they take some three times as much.
ROOM = 8 << 20


class Told(NamedTuple):
    """Part of a conversation.

    Args:
        items: as a client would send them.
        parsed: the same as vLLM reads them.
        weight: bytes that the store has of it, before it packs them.
    """

    items: Sequence[Item]
    parsed: Sequence[Any]
    weight: int


class History:
    """Reads the turns of conversations.

    A turn needs the answers of all turns before it, as the one before did: unpacking and parsing
    them is most of what a long conversation costs. So those that were needed last are kept ready.
    vLLM shares an answer's items among requests, too; it may write to those of an input, and they
    are read anew each time.

    Args:
        parse: reads items as vLLM does.
        harmony: whether they are for vLLM's renderer for gpt-oss, which knows fewer.
    """

    def __init__(self, parse: Callable[[list[Item]], list[Any]], *, harmony: bool) -> None:
        self.parse = parse
        self.harmony = harmony
        self.answers: LRUCache[bytes, Told] = LRUCache(ROOM, getsizeof=lambda told: told.weight)

    async def of(self, turns: Sequence[Response]) -> Told:
        """All that was said in turns of the store's, the oldest first."""
        items, parsed, weight = list[Item](), list[Any](), 0
        for turn in turns:
            given = await unpack(turn.input)
            asked = legible(wire.ITEMS.decode(given))
            said = self.answers.get(turn.body) or await self.answer(turn.body)
            items += [*asked, *said.items]
            parsed += [*self.parse(asked), *said.parsed]
            weight += len(given) + said.weight
        return Told(items, parsed, weight)

    async def answer(self, packed: bytes) -> Told:
        """What the body of a response says, kept ready from now on."""
        body = await unpack(packed)
        items = legible(wire.spoken(wire.OUTPUT.decode(body).output, harmony=self.harmony))
        said = Told(items, self.parse(items), len(body))
        if said.weight <= ROOM:
            self.answers[packed] = said
        return said


def legible(items: Sequence[Item]) -> list[Item]:
    """Items without what is encrypted in them, and without those where nothing else is."""
    return [item for each in items if (item := readable(each))]
