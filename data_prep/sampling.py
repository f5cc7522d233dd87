"""The tokenizer of a dataset: given, or trained on a sample that is uniform over all documents."""

import hashlib
import heapq
import shutil
from concurrent.futures import Executor
from pathlib import Path

from data_prep.options import PrepareOptions
from data_prep.readers import Document, SegmentReader
from data_prep.train_tokenizer import train_tokenizer
from data_prep.units import Unit
from lex_pretrain.data.shards import TOKENIZER_FILE
from lex_pretrain.errors import RequestError
from lex_pretrain.files import atomic_write
from lex_pretrain.progress import logger, progress
from lex_pretrain.tokenizer import Tokenizer

# Units read for the round-trip check, and documents of each.
_CHECKED_UNITS = 8
_CHECKED_DOCUMENTS = 25
_CHECKED_CHARACTERS = 10_000
# Each unit gives so many times its share of the sample, for documents are spread unevenly.
_MARGIN = 2

Sample = list[tuple[bytes, str]]


def provide_tokenizer(units: list[Unit], output: Path, options: PrepareOptions, pool: Executor) -> Tokenizer:
    """The folder's own copy of the tokenizer: given, trained now, or trained before a restart.

    Raises RequestError when it does not give texts back as they were, unless that is allowed.
    """
    file = output / TOKENIZER_FILE
    if not file.is_file():
        if options.tokenizer is not None:
            with atomic_write(file) as copy, options.tokenizer.open("rb") as given:
                shutil.copyfileobj(given, copy)
        else:
            model = train_tokenizer(_sample(units, options, pool), options.vocab_size)
            with atomic_write(file) as opened:
                opened.write(model)
    tokenizer = Tokenizer(file)
    _check_round_trip(tokenizer, units, options)
    return tokenizer


def _sample(units: list[Unit], options: PrepareOptions, pool: Executor) -> list[str]:
    """Documents with the smallest seeded hashes of their content, up to `tokenizer_sample_bytes` in all."""
    total_bytes = sum(unit.num_bytes for unit in units)
    share = min(1.0, _MARGIN * options.tokenizer_sample_bytes / total_bytes) if total_bytes else 1.0
    merged = _read_sample(units, options, pool, share, total_bytes)
    if share < 1 and sum(len(text.encode()) for _, text in merged) < options.tokenizer_sample_bytes:
        # A few very long documents, of which too few fell into the share.
        merged = _read_sample(units, options, pool, 1.0, total_bytes)
    texts = [text for _, text in merged]
    logger.info(
        "training a tokenizer of %s pieces on %s documents, %.1f MB, uniform over all inputs",
        f"{options.vocab_size:,}",
        f"{len(texts):,}",
        sum(len(text.encode()) for text in texts) / 1e6,
    )
    return texts


def _read_sample(units: list[Unit], options: PrepareOptions, pool: Executor, share: float, total_bytes: int) -> Sample:
    futures = [pool.submit(sample_unit, unit, options, share) for unit in units]
    merged: Sample = []
    with progress("reading the tokenizer's sample", max(total_bytes, 1), "bytes") as reporter:
        for unit, future in zip(units, futures, strict=True):
            merged = _smallest(merged + future.result(), options.tokenizer_sample_bytes)
            reporter.advance(unit.num_bytes)
    return merged


def sample_unit(unit: Unit, options: PrepareOptions, share: float) -> Sample:
    """The unit's documents whose seeded hash lies in the lowest `share` of its range, at most the whole sample."""
    key = f"sample {options.seed}".encode()
    limit = int(share * 2**64)
    heap: list[tuple[int, bytes, str]] = []
    num_bytes = 0
    for segment in unit.segments:
        try:
            for item in SegmentReader(segment, options):
                if not isinstance(item, Document) or not item.text.strip():
                    continue
                digest = hashlib.blake2b(item.data, digest_size=8, key=key).digest()
                place = int.from_bytes(digest, "big")
                if place >= limit:
                    continue
                heapq.heappush(heap, (-place, digest, item.text))
                num_bytes += len(item.data)
                while num_bytes - len(heap[0][2].encode()) >= options.tokenizer_sample_bytes:
                    num_bytes -= len(heapq.heappop(heap)[2].encode())
        except RequestError:
            # Packing meets the same fault, where it is counted or stops the run; the sample does without.
            continue
    return [(digest, text) for _, digest, text in heap]


def _smallest(sample: Sample, limit_bytes: int) -> Sample:
    """The documents of the smallest hashes, each text once, until they hold `limit_bytes`."""
    kept, num_bytes = [], 0
    for digest, text in sorted(set(sample)):
        if num_bytes >= limit_bytes:
            break
        kept.append((digest, text))
        num_bytes += len(text.encode())
    return kept


def _check_round_trip(tokenizer: Tokenizer, units: list[Unit], options: PrepareOptions) -> None:
    """Encode and decode documents from all over the inputs, and say what came back otherwise."""
    num_documents = num_changed = 0
    example = ""
    for unit in units[:: max(1, len(units) // _CHECKED_UNITS)][:_CHECKED_UNITS]:
        for text in _heads(unit, options):
            num_documents += 1
            decoded = tokenizer.decode(tokenizer.encode(text))
            if decoded != text:
                num_changed += 1
                place = next(
                    i for i, pair in enumerate(zip(text + "\0", decoded + "\1", strict=False)) if len(set(pair)) > 1
                )
                example = f"{text[place : place + 20]!r} comes back as {decoded[place : place + 20]!r}"
    if not num_changed:
        logger.info("the tokenizer gave %d of %d sample documents back unchanged", num_documents, num_documents)
        return
    loss = f"the tokenizer loses text: {num_changed} of {num_documents} sample documents change ({example})"
    if not options.allow_lossy_tokenizer:
        raise RequestError(f"{loss}; give another --tokenizer, or accept the loss by --allow-lossy-tokenizer")
    logger.warning(loss)


def _heads(unit: Unit, options: PrepareOptions) -> list[str]:
    """The beginnings of some documents of a unit."""
    heads: list[str] = []
    for segment in unit.segments:
        try:
            for item in SegmentReader(segment, options):
                if isinstance(item, Document):
                    heads.append(item.text[:_CHECKED_CHARACTERS])
                if len(heads) >= _CHECKED_DOCUMENTS:
                    return heads
        except RequestError:
            continue
    return heads
