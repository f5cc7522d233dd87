"""What reading gives: a document, or the reason why a record gave none, so that nothing is lost without a trace."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

NOT_UTF8 = "not UTF-8"
TOO_LONG = "too long"
SURROGATE = "lone surrogate"


@dataclass(frozen=True)
class Document:
    """A document's text and its UTF-8; `record` counts the records of its segment from 1.

    `ids` are those that the source itself holds, without EOD; None where the source holds text.
    """

    text: str
    data: bytes
    record: int
    ids: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Rejection:
    """A record that gives no document; `num_bytes` is its size as stored, 0 where that is not known."""

    reason: str
    record: int
    num_bytes: int
    detail: str = ""


Item = Document | Rejection
# Yields the records and returns how many there were: lines of .jsonl, blank ones too, else documents or rows.
Items = Generator[Item, None, int]


def text_item(text: str, record: int, holds_bytes: bool = False) -> Item:
    """The document, or the rejection of a text that UTF-8 cannot hold.

    With `holds_bytes`, bytes that were no UTF-8 stand in the text as Python's `surrogateescape` puts them there.
    """
    try:
        return Document(text, text.encode(), record)
    except UnicodeEncodeError as error:
        is_byte = holds_bytes and "\udc80" <= text[error.start] <= "\udcff"
        num_bytes = len(text.encode(errors="replace"))
        return Rejection(NOT_UTF8 if is_byte else SURROGATE, record, num_bytes, f"character {error.start}")


def bytes_item(data: bytes, record: int, encoding: str = "utf-8-sig") -> Item:
    """The document of UTF-8, or its rejection; by default a byte order mark at its start is left out."""
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        return Rejection(NOT_UTF8, record, len(data), f"byte {error.start}")
    return Document(text, text.encode(), record)


def value_item(value: Any, record: int, text_key: str, num_bytes: int, holds_bytes: bool = False) -> Item:
    """The text under a key of a decoded JSON value or row; dots of the key reach inside."""
    for part in text_key.split("."):
        if not isinstance(value, dict) or part not in value:
            return missing_key(text_key, record, num_bytes)
        value = value[part]
    if not isinstance(value, str):
        return not_text(text_key, record, num_bytes)
    return text_item(value, record, holds_bytes)


def missing_key(text_key: str, record: int, num_bytes: int = 0, detail: str = "") -> Rejection:
    return Rejection(f"no key {text_key}", record, num_bytes, detail)


def not_text(text_key: str, record: int, num_bytes: int = 0) -> Rejection:
    return Rejection(f"{text_key} is not text", record, num_bytes)
