"""What a unit leaves beside its shards: its record, its documents' origins, its rejected records."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from lex_pretrain.data.manifest import Account, ShardRecord
from lex_pretrain.data.origins import UNITS_FOLDER, record_file, table_file
from lex_pretrain.data.shards import documents_file, tokens_file
from lex_pretrain.files import json_bytes, read_json, write_json

CONTAMINATION_FILE = "contamination.npy"


class UnitRecord(BaseModel):
    """A finished unit; `key` names everything that decided it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str
    shards: tuple[ShardRecord, ...]
    account: Account
    num_records: tuple[int, ...]  # of each segment
    sources: tuple[str, ...] = ()  # of each segment; empty in folders that were prepared before this was kept
    num_dropped: int = 0  # duplicates, dropped after all units were read

    def save(self, output: Path, number: int) -> None:
        write_json(record_file(output, number), self.model_dump(mode="json"))


def rejected_file(output: Path, number: int) -> Path:
    return output / UNITS_FOLDER / f"unit-{number:05d}.rejected.jsonl"


def contamination_file(output: Path) -> Path:
    return output / UNITS_FOLDER / CONTAMINATION_FILE


def json_lines(values: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json_bytes(value) + b"\n" for value in values)


def finished_unit(output: Path, number: int, key: str) -> UnitRecord | None:
    """The record of a unit that was finished for the same key and whose files are as large as it says."""
    file = record_file(output, number)
    if not file.is_file():
        return None
    value = read_json(file)
    if not isinstance(value, dict) or value.get("key") != key:
        return None
    record = UnitRecord.model_validate(value)
    kept = (table_file(output, number), rejected_file(output, number))
    whole = all(file.is_file() for file in kept) and all(_is_whole(output, shard) for shard in record.shards)
    return record if whole else None


def _is_whole(output: Path, shard: ShardRecord) -> bool:
    """Whether both files of a shard hold what its record counts, by their headers and sizes."""
    counts = {
        tokens_file(output, shard.stem): shard.num_tokens,
        documents_file(output, shard.stem): shard.num_documents,
    }
    try:
        return all(len(np.load(file, mmap_mode="r", allow_pickle=False)) == count for file, count in counts.items())
    except (OSError, ValueError):
        return False
