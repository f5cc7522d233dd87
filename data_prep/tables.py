"""Rows of `.parquet`, `.csv`, `.tsv` and of everything that `datasets` can load, a part at a time."""

import csv
import io
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.formats import Compression
from data_prep.opening import READ_ERRORS, open_bytes
from data_prep.records import Item, Items, Rejection, bytes_item, missing_key, not_text, text_item
from data_prep.sources import name_and_split
from lex_pretrain.errors import RequestError

_ROWS_AT_ONCE = 256
_COPIED_AT_ONCE_BYTES = 2**22


def parquet_row_groups(path: str) -> list[int]:
    """Bytes of each row group. RequestError when the file's footer cannot be read."""
    metadata = _parquet_file(path, None).metadata
    return [metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups)]


def read_parquet(path: str, compression: Compression | None, start: int, end: int | None, text_key: str) -> Items:
    """Texts of the row groups start .. end - 1. RequestError where the column holds something else than text."""
    import pyarrow as arrow

    file = _parquet_file(path, compression)
    groups = list(range(start, file.metadata.num_row_groups if end is None else end))
    try:
        if not _has_text_column(file.schema_arrow, text_key, path):
            detail = _text_columns_detail(file.schema_arrow)
            num_rows: int = sum(file.metadata.row_group(group).num_rows for group in groups)
            yield from (missing_key(text_key, number, detail=detail) for number in range(1, num_rows + 1))
            return num_rows
        number = 0
        for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=groups, columns=[text_key]):
            yield from _column_items(batch.column(0), text_key, number)
            number += batch.num_rows
        return number
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from error


def _parquet_file(path: str, compression: Compression | None) -> Any:
    import pyarrow as arrow
    from pyarrow import parquet

    try:
        if compression is None:
            return parquet.ParquetFile(path)
        # A table is read from its end, which a compressed stream cannot.
        unpacked = tempfile.TemporaryFile()  # noqa: SIM115 - pyarrow holds it open
        with open_bytes(path, compression) as file:
            while part := file.read(_COPIED_AT_ONCE_BYTES):
                unpacked.write(part)
        return parquet.ParquetFile(unpacked)
    except (arrow.ArrowException, *READ_ERRORS) as error:
        raise RequestError(f"{path} cannot be read: {error}") from error


def _has_text_column(schema: Any, text_key: str, source: object) -> bool:
    """Whether there is such a column; RequestError, naming those that would do, where it does not hold text."""
    fields = {field.name: field.type for field in schema}
    *outer, last = text_key.split(".")
    for name in outer:
        kind = fields.get(name)
        fields = {field.name: field.type for field in kind} if kind is not None and _is_struct(kind) else {}
    if last not in fields:
        return False
    if not _is_text(fields[last]):
        raise RequestError(
            f"{source}: column {text_key} is of type {fields[last]}, not text; {_text_columns_detail(schema)}"
        )
    return True


def _text_columns_detail(schema: Any) -> str:
    columns = ", ".join(_text_columns(schema, ""))
    return f"columns that --text-key can name: {columns}" if columns else "no column of it holds text"


def _text_columns(fields: Any, prefix: str) -> Iterator[str]:
    for field in fields:
        if _is_text(field.type):
            yield prefix + field.name
        elif _is_struct(field.type):
            yield from _text_columns(field.type, f"{prefix}{field.name}.")


def _is_struct(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_struct(kind))


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _column_items(column: Any, text_key: str, num_before: int) -> Iterator[Item]:
    """Items of the top column that a text key reaches into, as bytes: Arrow's own texts may be no UTF-8."""
    import pyarrow as arrow
    from pyarrow import compute

    for name in text_key.split(".")[1:]:
        column = compute.struct_field(column, name)
    for number, cell in enumerate(column.cast(arrow.large_binary()).to_pylist(), start=num_before + 1):
        yield not_text(text_key, number) if cell is None else bytes_item(cell, number, "utf-8")


def read_csv(path: str, compression: Compression | None, delimiter: str, text_key: str, max_cell_bytes: int) -> Items:
    """Rows by the header's names, every cell as text; quotes are as RFC 4180 has them, in any other place a fault.

    A row of more or fewer cells than the header is rejected, for nobody knows which of its cells is which. Raises
    RequestError, naming the line, where a quote is wrong: what follows it cannot be told apart.
    """
    csv.field_size_limit(max_cell_bytes)
    with open_bytes(path, compression) as file:
        # Bytes that are no UTF-8 cost the row that they stand in.
        text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
        rows = csv.reader(text, delimiter=delimiter, strict=True)
        number = line = 0
        try:
            header = next(rows, [])
            if header.count(text_key) > 1:
                raise RequestError(f"{path}: column {text_key} stands {header.count(text_key)} times in the header")
            place = header.index(text_key) if text_key in header else None
            line = rows.line_num
            for row in rows:
                if row:
                    number += 1
                    yield _row_item(row, len(header), place, number, text_key, line + 1)
                line = rows.line_num
        except csv.Error as error:
            raise RequestError(
                f"{path} cannot be read: the row that begins on line {line + 1} has a stray quote or no end: {error}"
            ) from error
    return number


def _row_item(row: list[str], num_columns: int, place: int | None, number: int, text_key: str, line: int) -> Item:
    if place is None or len(row) <= place:
        return missing_key(text_key, number, detail=f"line {line}")
    if len(row) != num_columns:
        detail = f"line {line}: {len(row)} cells, the header has {num_columns}"
        return Rejection("cells unlike the header", number, 0, detail)
    return text_item(row[place], number, holds_bytes=True)


def plan_dataset(source: str, unit_bytes: int) -> list[tuple[int, int | None, int]]:
    """Parts as (start, end, bytes): rows of a saved dataset; shards of any other, whose size is not known (0)."""
    loaded = _load(source)
    if hasattr(loaded, "num_rows"):
        num_parts = max(1, min(loaded.num_rows, loaded.data.nbytes // unit_bytes))
        borders = [loaded.num_rows * part // num_parts for part in range(num_parts + 1)]
        return [(start, end, loaded.data.nbytes // num_parts) for start, end in itertools.pairwise(borders)]
    return [(shard, shard + 1, 0) for shard in range(loaded.num_shards)]


def read_dataset(source: str, start: int, end: int | None, text_key: str) -> Items:
    """Texts of a part that `plan_dataset` gave. RequestError where the column holds something else than text."""
    number = 0
    try:
        for table in _dataset_tables(source, start, end):
            if _has_text_column(table.schema, text_key, source):
                yield from _column_items(table.column(text_key.partition(".")[0]), text_key, number)
            else:
                detail = _text_columns_detail(table.schema)
                rows = range(number + 1, number + table.num_rows + 1)
                yield from (missing_key(text_key, row, detail=detail) for row in rows)
            number += table.num_rows
    except UnicodeDecodeError as error:
        raise RequestError(f"{source} holds text that is no UTF-8: {error}") from error
    except _dataset_errors() as error:
        raise RequestError(f"{source} cannot be read by `datasets`: {error}") from error
    return number


def _dataset_tables(source: str, start: int, end: int | None) -> Iterator[Any]:
    """Arrow tables of a part's rows, for Python's own would have lost what is no UTF-8."""
    loaded = _load(source)
    if hasattr(loaded, "num_rows"):
        part = loaded.select(range(start, loaded.num_rows if end is None else end))
        yield from part.with_format("arrow").iter(_ROWS_AT_ONCE)
        return
    for index in range(start, loaded.num_shards if end is None else end):
        yield from loaded.shard(num_shards=loaded.num_shards, index=index).with_format("arrow").iter(_ROWS_AT_ONCE)


def _load(source: str) -> Any:
    """`hf://NAME[:CONFIG][@SPLIT]`, streaming, or a folder that `datasets` wrote or can read, `hf://FOLDER[@SPLIT]`."""
    from datasets import DatasetDict, load_dataset, load_from_disk

    name, split = name_and_split(source)
    folder = Path(name)
    try:
        if folder.is_dir() and ((folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()):
            loaded = load_from_disk(str(folder))
            return loaded[split] if isinstance(loaded, DatasetDict) else loaded
        if folder.is_dir():
            return load_dataset(str(folder), split=split, streaming=True)
        name, _, config = name.partition(":")
        return load_dataset(name, config or None, split=split, streaming=True)
    except _dataset_errors() as error:
        raise RequestError(f"{source} cannot be loaded by `datasets`: {error}") from error


def _dataset_errors() -> tuple[type[Exception], ...]:
    from datasets.exceptions import DatasetsError

    return (DatasetsError, ValueError, OSError, KeyError)
