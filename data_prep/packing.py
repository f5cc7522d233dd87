"""One work unit from text to shards: read, reject, split by content, tokenize, write, and account for it all."""

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from data_prep.options import PrepareOptions
from data_prep.readers import Document, Rejection, read_source
from data_prep.units import Unit
from lex_pretrain.data.manifest import SPLITS, Account, ShardRecord, Split, Tally
from lex_pretrain.data.shards import token_dtype, tokens_file, write_shard
from lex_pretrain.files import atomic_write, read_json, write_json
from lex_pretrain.tokenizer import Tokenizer

UNITS_FOLDER = ".units"
EMPTY = "empty"
# Characters that are tokenized in one call: enough to keep SentencePiece busy, few enough to bound memory.
_BATCH_CHARACTERS = 1_000_000


class UnitRecord(BaseModel):
    """What a finished unit left; `key` names everything that decided it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str
    shards: tuple[ShardRecord, ...]
    account: Account


def unit_record_file(output: Path, number: int) -> Path:
    return output / UNITS_FOLDER / f"unit-{number:05d}.json"


def rejected_file(output: Path, number: int) -> Path:
    return output / UNITS_FOLDER / f"unit-{number:05d}.rejected.jsonl"


def finished_unit(output: Path, number: int, key: str) -> UnitRecord | None:
    """The record of a unit that was finished for the same key and whose shards are still there."""
    file = unit_record_file(output, number)
    if not file.is_file():
        return None
    record = UnitRecord.model_validate(read_json(file))
    present = all(tokens_file(output, shard.stem).is_file() for shard in record.shards)
    return record if record.key == key and present else None


def pack_unit(unit: Unit, output: Path, tokenizer_file: Path, options: PrepareOptions, key: str) -> UnitRecord:
    """Write the unit's shards and rejected records, then its own record, which makes it finished."""
    tokenizer = _tokenizer(tokenizer_file)
    packers = {split: _Packer(tokenizer) for split in SPLITS}
    rejected: dict[str, Tally] = {}
    read = Tally()
    with atomic_write(rejected_file(output, unit.number)) as rejections:
        for source, item in _items(unit.sources, options.text_key):
            num_bytes = len(item.text.encode()) if isinstance(item, Document) else item.num_bytes
            one = Tally(documents=1, bytes=num_bytes)
            read += one
            reason = item.reason if isinstance(item, Rejection) else EMPTY if not item.text.strip() else None
            if reason is None and isinstance(item, Document):
                packers[split_of(item.text, options)].add(item.text, num_bytes)
                continue
            # The place inside the record is for the list; the account groups by kind.
            kind = str(reason).partition(" (")[0]
            rejected[kind] = rejected.get(kind, Tally()) + one
            line = {"source": source, "record": item.record, "reason": reason, "bytes": num_bytes}
            rejections.write((json.dumps(line, ensure_ascii=False) + "\n").encode())
    shards = []
    for split, packer in packers.items():
        record = packer.write(output, unit.number, split)
        shards += [record] if record else []
    packed = Tally(
        documents=sum(shard.num_documents for shard in shards), bytes=sum(shard.num_source_bytes for shard in shards)
    )
    num_tokens = sum(shard.num_tokens for shard in shards)
    account = Account(read=read, rejected=rejected, packed=packed, num_tokens=num_tokens)
    result = UnitRecord(key=key, shards=tuple(shards), account=account)
    write_json(unit_record_file(output, unit.number), result.model_dump(mode="json"))
    return result


def split_of(text: str, options: PrepareOptions) -> Split:
    """The side a document falls on: by its content alone, so that it never changes when files come or move."""
    place = _hash_fraction(text, b"split")
    if place < options.test_fraction:
        return "test"
    return "validation" if place < options.test_fraction + options.validation_fraction else "train"


def sample_unit(unit: Unit, text_key: str, fraction: float, seed: int) -> list[str]:
    """A share of the unit's documents, each as likely as any other, chosen by content."""
    key = f"sample {seed}".encode()
    return [
        item.text
        for _, item in _items(unit.sources, text_key)
        if isinstance(item, Document) and item.text.strip() and _hash_fraction(item.text, key) < fraction
    ]


def _items(sources: Iterable[str], text_key: str) -> Iterator[tuple[str, Document | Rejection]]:
    """All records of the sources; a text that UTF-8 cannot hold (a lone surrogate) is a rejection too."""
    for source in sources:
        for item in read_source(source, text_key):
            if isinstance(item, Document):
                try:
                    item.text.encode()
                except UnicodeEncodeError:
                    num_bytes = len(item.text.encode(errors="replace"))
                    yield source, Rejection("lone surrogate", item.record, num_bytes)
                    continue
            yield source, item


def _hash_fraction(text: str, key: bytes) -> float:
    """A number in [0, 1) that depends on the content and nothing else."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=key).digest()
    return int.from_bytes(digest, "little") / 2**64


@functools.lru_cache(maxsize=1)
def _tokenizer(file: Path) -> Tokenizer:
    return Tokenizer(file)


class _Packer:
    """Documents of one split of one unit, tokenized in batches and joined with EODs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._waiting: list[str] = []
        self._waiting_characters = 0
        self._documents: list[Any] = []
        self._num_bytes = 0

    def add(self, text: str, num_bytes: int) -> None:
        self._waiting.append(text)
        self._waiting_characters += len(text)
        self._num_bytes += num_bytes
        if self._waiting_characters >= _BATCH_CHARACTERS:
            self._tokenize()

    def write(self, output: Path, number: int, split: Split) -> ShardRecord | None:
        """Write the shard, or nothing where the split got no document."""
        self._tokenize()
        if not self._documents:
            return None
        lengths = np.array([len(document) for document in self._documents], dtype=np.int64)
        starts = np.concatenate(([0], np.cumsum(lengths)[:-1])).astype(np.int64)
        stem = f"shard-{number:05d}" if split == "train" else f"{split}/shard-{number:05d}"
        return write_shard(output, stem, split, np.concatenate(self._documents), starts, self._num_bytes)

    def _tokenize(self) -> None:
        for ids in self._tokenizer.encode_batch(self._waiting) if self._waiting else ():
            ids.append(self._tokenizer.eod_id)
            self._documents.append(np.array(ids, dtype=self._dtype))
        self._waiting, self._waiting_characters = [], 0
