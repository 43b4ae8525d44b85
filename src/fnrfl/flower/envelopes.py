"""A letter of ours in a message of Flower's: opaque bytes, in the record that costs least around them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fnrfl.core.errors import FnrflError

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict

RECORD = "fnrfl"  # of the record and of the array in it
WHO, ASK = "query.fnrfl_who", "train.fnrfl"  # message types: which client are you; a letter


def packed(letter: bytes) -> RecordDict:
    """A letter as Flower carries it: an array of bytes, which Flower sends in pieces without copying it to text."""
    from flwr.app import Array, ArrayRecord, RecordDict

    return RecordDict({RECORD: ArrayRecord({RECORD: Array("uint8", (len(letter),), "bytes", letter)})})


def unpacked(message: Message) -> bytes:
    """The letter in a message."""
    record = message.content.array_records.get(RECORD)
    if record is None or list(record) != [RECORD] or len(message.content) != 1:
        raise FnrflError(
            f"A message of the kind {message.metadata.message_type!r} has no letter of fnrfl's in it, or more. "
            "The app that runs on the server is not the one that `fnrfl deploy init` writes, or another version."
        )
    return record[RECORD].data


def weight(part: Any) -> int:
    """Return the bytes that Flower sends for a message, or for a part of one: every object in it, with its headers."""
    return len(part.deflate()) + sum(map(weight, (part.children or {}).values()))
