"""Rows of `.parquet`, `.csv` and of everything that `datasets` can load, a part at a time."""

import csv
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.sources import name_and_split
from lex_pretrain.errors import RequestError

Row = dict[str, Any]

_ROWS_AT_ONCE = 256


def parquet_row_groups(path: Path) -> list[int]:
    """Bytes of each row group. RequestError when the file's footer cannot be read."""
    metadata = _parquet_file(path).metadata
    return [metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups)]


def parquet_rows(path: Path, start: int, end: int | None, column: str) -> Iterator[Row]:
    """Rows of the row groups start .. end - 1, with `column` alone; without it where there is no such column."""
    import pyarrow as arrow

    file = _parquet_file(path)
    groups = range(start, file.metadata.num_row_groups if end is None else end)
    if column not in file.schema_arrow.names:
        yield from ({} for group in groups for _ in range(file.metadata.row_group(group).num_rows))
        return
    try:
        for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=list(groups), columns=[column]):
            yield from batch.to_pylist()
    except (arrow.ArrowException, OSError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from error


def _parquet_file(path: Path) -> Any:
    import pyarrow as arrow
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path)
    except (arrow.ArrowException, OSError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from error


def csv_rows(path: Path, max_cell_bytes: int) -> Iterator[Row]:
    """Rows by the header's names, every cell as text. Bytes that are not UTF-8 come as lone surrogates."""
    csv.field_size_limit(max_cell_bytes)
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            for row in csv.DictReader(file):
                # Cells beyond the header stand under None and cells that a short row lacks hold None.
                yield {name: cell for name, cell in row.items() if name is not None and cell is not None}
    except csv.Error as error:
        raise RequestError(f"{path} cannot be read: {error}") from error


def plan_dataset(source: str, unit_bytes: int) -> list[tuple[int, int | None, int]]:
    """Parts as (start, end, bytes): rows of a saved dataset; shards of any other, whose size is not known (0)."""
    loaded = _load(source)
    if hasattr(loaded, "num_rows"):
        num_parts = max(1, min(loaded.num_rows, loaded.data.nbytes // unit_bytes))
        borders = [loaded.num_rows * part // num_parts for part in range(num_parts + 1)]
        return [(start, end, loaded.data.nbytes // num_parts) for start, end in itertools.pairwise(borders)]
    return [(shard, shard + 1, 0) for shard in range(loaded.num_shards)]


def dataset_rows(source: str, start: int, end: int | None) -> Iterator[Row]:
    """Rows of a part that `plan_dataset` gave."""
    loaded = _load(source)
    try:
        if hasattr(loaded, "num_rows"):
            yield from loaded.select(range(start, loaded.num_rows if end is None else end))
            return
        for index in range(start, loaded.num_shards if end is None else end):
            yield from loaded.shard(num_shards=loaded.num_shards, index=index)
    except _dataset_errors() as error:
        raise RequestError(f"{source} cannot be read by `datasets`: {error}") from error


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
