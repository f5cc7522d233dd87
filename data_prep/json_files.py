"""Records of JSON: a line each, or the values of an array, or values one after the other."""

import io
import json
import re
from collections.abc import Iterator
from typing import IO, Any

from data_prep.formats import Compression
from data_prep.opening import open_bytes
from data_prep.records import NOT_UTF8, TOO_LONG, Item, Items, Rejection, value_item
from lex_pretrain.errors import RequestError

_SKIPPED_AT_ONCE_BYTES = 2**20
_READ_AT_ONCE_CHARACTERS = 2**18
_find_value = re.compile(r"[^ \t\n\r]").search
_BOM = b"\xef\xbb\xbf"


def read_json_lines(
    path: str, compression: Compression | None, start: int, end: int | None, text_key: str, limit_bytes: int
) -> Items:
    """The lines in bytes start .. end - 1, which begin and end with whole lines."""
    with open_bytes(path, compression, start, end) as file:
        number = yield from _lines(file, text_key, limit_bytes)
    return number


def read_json(path: str, compression: Compression | None, text_key: str, limit_bytes: int) -> Items:
    """A `.json`: an array of records, or JSON lines, or values that take several lines each.

    Raises RequestError, naming the place, where an array or a value over several lines is not JSON.
    """
    with open_bytes(path, compression) as file:
        head = read_line(file, limit_bytes)[0].removeprefix(_BOM)
        while head.isspace():
            head = read_line(file, limit_bytes)[0]
    is_array = head.lstrip().startswith(b"[")
    if not is_array and _is_whole_value(head):
        return (yield from read_json_lines(path, compression, 0, None, text_key, limit_bytes))
    return (yield from _read_values(path, compression, is_array, text_key, limit_bytes))


def _read_values(path: str, compression: Compression | None, is_array: bool, text_key: str, limit_bytes: int) -> Items:
    number = 0
    with open_bytes(path, compression) as file:
        # Bytes that are no UTF-8 cost the record that they stand in, and not all.
        text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
        try:
            for value in _Values(text, limit_bytes).array() if is_array else _Values(text, limit_bytes).sequence():
                number += 1
                yield value_item(value, number, text_key, 0, holds_bytes=True)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{path} cannot be read: record {number + 1} is not JSON: {error}") from error
    return number


class _Values:
    """JSON values that follow each other in a text, one at a time in memory, whatever the size of the file.

    Decoded as `json.loads` would; the streaming parsers that were tried replace a lone surrogate by a question mark.
    Raises ValueError where the text is not JSON, or a value takes more than `limit` characters.
    """

    def __init__(self, text: IO[str], limit: int) -> None:
        self._text = text
        self._limit = limit
        self._decode = json.JSONDecoder().raw_decode
        self._buffer = ""
        self._place = 0

    def array(self) -> Iterator[Any]:
        """The values of the one array that the text is."""
        self._expect("[")
        mark = "," if self._next() != "]" else self._expect("]")
        while mark == ",":
            yield self._value()
            mark = self._expect(",]")
        if self._next():
            raise ValueError("something follows the array")

    def sequence(self) -> Iterator[Any]:
        while self._next():
            yield self._value()

    def _next(self) -> str:
        """The next character that is no white space, "" at the end of the text."""
        while True:
            found = _find_value(self._buffer, self._place)
            if found is not None:
                self._place = found.start()
                return found.group()
            self._place = len(self._buffer)
            if not self._read_more():
                return ""

    def _expect(self, marks: str) -> str:
        mark = self._next()
        if not mark or mark not in marks:
            raise ValueError(f"{' or '.join(marks)} expected, not {mark or 'the end of the file'}")
        self._place += 1
        return mark

    def _value(self) -> Any:
        self._next()
        while True:
            try:
                value, end = self._decode(self._buffer, self._place)
                # What ends with the buffer may be the beginning of a longer number.
                if end < len(self._buffer) or not self._read_more():
                    self._place = end if end <= len(self._buffer) else len(self._buffer)
                    return value
            except ValueError:
                if not self._read_more():
                    raise

    def _read_more(self) -> bool:
        """Double what is held from the present place on; False at the end of the text."""
        kept = self._buffer[self._place :]
        if len(kept) > 2 * self._limit + _READ_AT_ONCE_CHARACTERS:
            raise ValueError("it does not end, or is larger than --max-document-bytes")
        more = self._text.read(max(_READ_AT_ONCE_CHARACTERS, len(kept)))
        if more:
            self._buffer, self._place = kept + more, 0
        return bool(more)


def _is_whole_value(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _lines(file: IO[bytes], text_key: str, limit_bytes: int) -> Items:
    number = 0
    while True:
        line, num_bytes = read_line(file, limit_bytes)
        if num_bytes == 0:
            return number
        number += 1
        if num_bytes > limit_bytes:
            yield Rejection(TOO_LONG, number, num_bytes)
        elif not line.isspace():
            yield _line_item(line, number, text_key)


def _line_item(line: bytes, number: int, text_key: str) -> Item:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Rejection(NOT_UTF8, number, len(line), f"byte {error.start} of the line")
    except (ValueError, RecursionError) as error:
        return Rejection("not JSON", number, len(line), str(error))
    return value_item(value, number, text_key, len(line))


def read_line(file: IO[bytes], limit_bytes: int) -> tuple[bytes, int]:
    """The next line and its size; of a line beyond the limit its head alone, and nothing (b"", 0) at the end."""
    line = file.readline(limit_bytes + 1)
    num_bytes = len(line)
    if num_bytes > limit_bytes:
        while not line.endswith(b"\n") and (line := file.readline(_SKIPPED_AT_ONCE_BYTES)):
            num_bytes += len(line)
    return line, num_bytes
