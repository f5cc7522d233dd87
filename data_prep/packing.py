"""One work unit from text to shards: read, reject, split by content, tokenize, write, and account for it all."""

import functools
import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.documents import DocumentTableBuilder
from data_prep.duplicates import SIGNATURE_SIZE, signature
from data_prep.encoding import Encoder
from data_prep.filters import Filters
from data_prep.losses import LossCheck, LossyTokenizerError
from data_prep.options import PrepareOptions
from data_prep.readers import SegmentReader, read_segment
from data_prep.records import Document
from data_prep.running import RunningUnit
from data_prep.splits import split_of
from data_prep.unit_files import UnitRecord, contamination_file, json_lines, rejected_file
from data_prep.units import Unit
from lex_pretrain.data.manifest import SPLITS, Account, ShardRecord, Split, Tally
from lex_pretrain.data.origins import table_file
from lex_pretrain.data.shards import TOKENIZER_FILE, Tokens, write_shard
from lex_pretrain.files import atomic_write
from lex_pretrain.tokenizer import Tokenizer

# Characters that are tokenized in one call: enough to keep SentencePiece busy, few enough to bound memory.
_BATCH_CHARACTERS = 1_000_000


@dataclass(frozen=True)
class PackJob:
    """What every unit of a preparation shares."""

    output: Path
    options: PrepareOptions
    key: str
    word_cache: bool


class _Tallies:
    """Documents and bytes under each reason; None stands for those packed."""

    def __init__(self) -> None:
        self._documents: Counter[str | None] = Counter()
        self._bytes: Counter[str | None] = Counter()

    def add(self, reason: str | None, num_bytes: int) -> None:
        self._documents[reason] += 1
        self._bytes[reason] += num_bytes

    def account(self, num_tokens: int) -> Account:
        """The account so far; `num_tokens` are those of the documents that are packed."""
        of = {key: Tally(documents=count, bytes=self._bytes[key]) for key, count in self._documents.items()}
        packed = of.pop(None, Tally()) + Tally(tokens=num_tokens)
        return Account(read=sum(of.values(), packed), rejected=dict(sorted(of.items())), packed=packed)


def pack_unit(unit: Unit, job: PackJob) -> UnitRecord:
    """Write the unit's shards, rejected records and documents' origins, then its record, which makes it finished."""
    options, output = job.options, job.output
    filters = Filters(options, contamination_file(output))
    encoder = _encoder(output / TOKENIZER_FILE, job.word_cache, job.key)
    packers = {split: _Packer(encoder) for split in SPLITS}
    losses = None if options.allow_lossy_tokenizer else _loss_check(output / TOKENIZER_FILE, job.key)
    near = options.near_duplicate_similarity is not None
    table = DocumentTableBuilder(SIGNATURE_SIZE if near else 0)
    tallies, num_records = _Tallies(), []
    running = RunningUnit(output, unit.number)
    with atomic_write(rejected_file(output, unit.number)) as rejections:
        for index, segment in enumerate(unit.segments):
            reader = SegmentReader(segment, options)
            for item in read_segment(reader, options.skip_bad_files):
                if isinstance(item, Document):
                    num_bytes, detail, reason = len(item.data), "", filters.reason(item)
                else:
                    num_bytes, detail, reason = item.num_bytes, item.detail, item.reason
                tallies.add(reason, num_bytes)
                running.report(lambda: tallies.account(sum(packer.num_tokens for packer in packers.values())))
                if isinstance(item, Document) and reason is None:
                    if losses is not None and item.ids is None and (loss := losses.loss(item.text)) is not None:
                        raise LossyTokenizerError(f"a document of {segment.source} changes ({loss})", losses.ways)
                    digest = hashlib.blake2b(item.data, digest_size=16).digest()
                    split = split_of(digest, options)
                    packers[split].add(item)
                    signed = signature(item.text) if near else None
                    table.add(split, index, item.record, num_bytes, digest, signed)
                    continue
                line = {"segment": index, "record": item.record, "reason": reason, "detail": detail, "bytes": num_bytes}
                rejections.write(json_lines([line]))
            num_records.append(reader.num_records)
    table.build().save(table_file(output, unit.number))
    written = [packer.write(output, unit.number, split) for split, packer in packers.items()]
    shards = tuple(shard for shard in written if shard is not None)
    account = tallies.account(sum(shard.num_tokens for shard in shards))
    sources = tuple(segment.source for segment in unit.segments)
    record = UnitRecord(key=job.key, shards=shards, account=account, num_records=tuple(num_records), sources=sources)
    record.save(output, unit.number)
    return record


def shard_stem(number: int, split: Split) -> str:
    return f"shard-{number:05d}" if split == "train" else f"{split}/shard-{number:05d}"


@functools.lru_cache(maxsize=1)
def _encoder(tokenizer_file: Path, word_cache: bool, key: str) -> Encoder:
    """One encoder for all units that a process works on, so that its words stay known; `key` tells runs apart."""
    return Encoder(Tokenizer(tokenizer_file), word_cache)


@functools.lru_cache(maxsize=1)
def _loss_check(tokenizer_file: Path, key: str) -> LossCheck:
    return LossCheck(Tokenizer(tokenizer_file))


class _Packer:
    """Documents of one split of one unit, tokenized in batches."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._waiting: list[str] = []
        self._waiting_characters = 0
        self._documents: list[Tokens] = []
        self._num_bytes = 0
        self.num_tokens = 0

    def add(self, document: Document) -> None:
        self._num_bytes += len(document.data)
        if document.ids is not None:
            # What waits comes first, so that documents stay in the order of reading.
            self._tokenize()
            self._append([self._encoder.end(document.ids)])
            return
        self._waiting.append(document.text)
        self._waiting_characters += len(document.text)
        if self._waiting_characters >= _BATCH_CHARACTERS:
            self._tokenize()

    def write(self, output: Path, number: int, split: Split) -> ShardRecord | None:
        """Write the shard, or nothing where the split got no document."""
        self._tokenize()
        if not self._documents:
            return None
        lengths = np.array([len(document) for document in self._documents], dtype=np.int64)
        starts = np.cumsum(lengths) - lengths
        tokens: Tokens = np.concatenate(self._documents)  # type: ignore[assignment]
        return write_shard(output, shard_stem(number, split), split, tokens, starts, self._num_bytes)

    def _tokenize(self) -> None:
        self._append(self._encoder.encode(self._waiting))
        self._waiting, self._waiting_characters = [], 0

    def _append(self, documents: list[Tokens]) -> None:
        self._documents += documents
        self.num_tokens += sum(map(len, documents))
