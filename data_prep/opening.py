"""Bytes of a file or of a part of it, decompressed where its name says so."""

import bz2
import contextlib
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Iterator
from typing import IO, cast

from data_prep.formats import Compression

BUFFER_BYTES = 2**20
# What reading a damaged or cut file raises.
READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)


def read_bytes(path: str, compression: Compression | None, limit_bytes: int) -> tuple[bytes, int]:
    """The bytes of a file and how many they are; of more than the limit no more than that many. Errors as below."""
    if compression is None:
        # By itself, because it takes a third of the time where files are small.
        with open(path, "rb", buffering=0) as raw:
            num_bytes = os.fstat(raw.fileno()).st_size
            data = raw.read(min(num_bytes, limit_bytes)) if num_bytes else b""
            while len(data) < min(num_bytes, limit_bytes):
                more = raw.read(min(num_bytes, limit_bytes) - len(data))
                if not more:
                    raise EOFError(f"it ends {num_bytes - len(data)} bytes early")
                data += more
            return data, num_bytes
    with open_bytes(path, compression) as file:
        data = file.read(limit_bytes)
        num_bytes = len(data)
        while part := file.read(BUFFER_BYTES):
            num_bytes += len(part)
        return data, num_bytes


@contextlib.contextmanager
def open_bytes(
    path: str, compression: Compression | None = None, start: int = 0, end: int | None = None
) -> Iterator[IO[bytes]]:
    """The bytes start .. end - 1 of a file that is not compressed, or all of what one unpacks to.

    Nothing beyond `end`, which is the file's size now if not given, is read from the disk. Reading raises one of
    READ_ERRORS where the file is damaged or ends before.
    """
    with open(path, "rb", buffering=0) as raw:
        if compression is not None:
            with _decompressed(path, cast(IO[bytes], raw), compression) as opened:
                yield opened
            return
        num_bytes = (os.fstat(raw.fileno()).st_size if end is None else end) - start
        raw.seek(start)
        yield io.BufferedReader(_Part(raw, num_bytes), max(1, min(BUFFER_BYTES, num_bytes)))


class _Part(io.RawIOBase):
    """The next so many bytes of a file."""

    def __init__(self, file: io.FileIO, num_bytes: int) -> None:
        self._file = file
        self._num_bytes_left = num_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        wanted = memoryview(buffer)[: self._num_bytes_left]
        num_read = self._file.readinto(wanted) or 0
        if num_read == 0 and len(wanted):
            raise EOFError(f"it ends {self._num_bytes_left} bytes early")
        self._num_bytes_left -= num_read
        return num_read


def _decompressed(path: str, raw: IO[bytes], compression: Compression) -> IO[bytes]:
    if compression == "gz":
        return cast(IO[bytes], gzip.open(io.BufferedReader(cast(io.RawIOBase, raw), BUFFER_BYTES), "rb"))
    if compression == "bz2":
        return cast(IO[bytes], bz2.open(raw, "rb"))
    if compression == "xz":
        return cast(IO[bytes], lzma.open(raw, "rb"))
    # Unlike the zstandard package's reader, Arrow's raises on a file that was cut short.
    import pyarrow as arrow

    stream = arrow.CompressedInputStream(arrow.OSFile(os.fsencode(path)), "zstd")
    return cast(IO[bytes], io.BufferedReader(stream, buffer_size=BUFFER_BYTES))
