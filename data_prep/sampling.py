"""The tokenizer of a dataset: given, or trained on a sample that is uniform over all documents."""

import hashlib
import heapq
import shutil
from collections import Counter
from concurrent.futures import Executor
from pathlib import Path

from data_prep.filters import Filters
from data_prep.losses import LossCheck, LossyTokenizerError
from data_prep.options import PrepareOptions
from data_prep.readers import SegmentReader, read_segment
from data_prep.records import Document
from data_prep.train_tokenizer import train_tokenizer
from data_prep.unit_files import contamination_file
from data_prep.units import Unit
from lex_pretrain.data.shards import TOKENIZER_FILE
from lex_pretrain.errors import RequestError
from lex_pretrain.files import atomic_write
from lex_pretrain.progress import logger, progress
from lex_pretrain.tokenizer import Tokenizer

# Units and documents of each that are compared with what their ids stand for, before any is packed.
_CHECKED_UNITS = 64
_CHECKED_DOCUMENTS = 32
_CHECKED_CHARACTERS = 1_000_000
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
            texts = _sample_texts(units, output, options, pool)
            model = train_tokenizer(texts, options.vocab_size, options.character_coverage)
            with atomic_write(file) as opened:
                opened.write(model)
    tokenizer = Tokenizer(file)
    _check_losses(tokenizer, units, options)
    return tokenizer


def _sample_texts(units: list[Unit], output: Path, options: PrepareOptions, pool: Executor) -> list[str]:
    """Documents with the smallest seeded hashes of their content, up to `tokenizer_sample_bytes` in all."""
    total_bytes = sum(unit.num_bytes for unit in units)
    share = min(1.0, _MARGIN * options.tokenizer_sample_bytes / total_bytes) if total_bytes else 1.0
    merged, reasons = _read_sample(units, output, options, pool, share, total_bytes)
    if share < 1 and sum(len(text.encode()) for _, text in merged) < options.tokenizer_sample_bytes:
        # A few very long documents, of which too few fell into the share.
        merged, reasons = _read_sample(units, output, options, pool, 1.0, total_bytes)
    texts = [text for _, text in merged]
    if not texts:
        why = f"most because: {reasons.most_common(1)[0][0]}" if reasons else "the files hold no record"
        raise RequestError(
            f"no document is left to train a tokenizer on: {reasons.total():,} records are rejected, {why}. "
            "Correct the inputs, --text-key or the filters"
        )
    logger.info(
        "training a tokenizer of %s pieces on %s documents, %.1f MB, uniform over all inputs",
        f"{options.vocab_size:,}",
        f"{len(texts):,}",
        sum(len(text.encode()) for text in texts) / 1e6,
    )
    return texts


def _read_sample(
    units: list[Unit], output: Path, options: PrepareOptions, pool: Executor, share: float, total_bytes: int
) -> tuple[Sample, Counter[str]]:
    futures = [pool.submit(sample_unit, unit, output, options, share) for unit in units]
    merged: Sample = []
    reasons: Counter[str] = Counter()
    try:
        with progress("reading the tokenizer's sample", max(total_bytes, 1), "bytes") as reporter:
            for unit, future in zip(units, futures, strict=True):
                sample, rejected = future.result()
                merged = _smallest(merged + sample, options.tokenizer_sample_bytes)
                reasons += rejected
                reporter.advance(unit.num_bytes)
    finally:
        for future in futures:
            future.cancel()
    return merged, reasons


def sample_unit(unit: Unit, output: Path, options: PrepareOptions, share: float) -> tuple[Sample, Counter[str]]:
    """The unit's documents whose seeded hash lies in the lowest `share` of its range, at most the whole sample; and how
    many of its records would not be packed, by reason.

    Raises RequestError where a file cannot be read and is not to be skipped.
    """
    key = f"sample {options.seed}".encode()
    limit = int(share * 2**64)
    heap: list[tuple[int, bytes, str]] = []
    num_bytes = 0
    filters = Filters(options, contamination_file(output))
    reasons: Counter[str] = Counter()
    for segment in unit.segments:
        for item in read_segment(SegmentReader(segment, options), options.skip_bad_files):
            reason = filters.reason(item) if isinstance(item, Document) else item.reason
            if reason is not None or not isinstance(item, Document):
                reasons[reason or ""] += 1
                continue
            digest = hashlib.blake2b(item.data, digest_size=8, key=key).digest()
            place = int.from_bytes(digest, "big")
            if place >= limit:
                continue
            heapq.heappush(heap, (-place, digest, item.text))
            num_bytes += len(item.data)
            while num_bytes - len(heap[0][2].encode()) >= options.tokenizer_sample_bytes:
                num_bytes -= len(heapq.heappop(heap)[2].encode())
    return [(digest, text) for _, digest, text in heap], reasons


def _smallest(sample: Sample, limit_bytes: int) -> Sample:
    """The documents of the smallest hashes, each text once, until they hold `limit_bytes`."""
    kept, num_bytes = [], 0
    for digest, text in sorted(set(sample)):
        if num_bytes >= limit_bytes:
            break
        kept.append((digest, text))
        num_bytes += len(text.encode())
    return kept


def _check_losses(tokenizer: Tokenizer, units: list[Unit], options: PrepareOptions) -> None:
    """Say whether the tokenizer gives texts back; before all work, so that one that loses text shows at once.

    Its settings alone prove that it loses nothing; where they do not, documents from all over the inputs show more, and
    every document that is packed is compared.
    """
    check = LossCheck(tokenizer)
    if not check.ways:
        logger.info("the tokenizer loses nothing: no normalisation, spaces kept, unknown characters written in bytes")
        return
    texts = [text for unit in units[:: max(1, len(units) // _CHECKED_UNITS)] for text in _beginning(unit, options)]
    losses = [loss for loss in map(check.loss, texts) if loss is not None]
    what = f"{len(losses)} of {len(texts)} sample documents change"
    if losses and not options.allow_lossy_tokenizer:
        raise LossyTokenizerError(f"{what} ({losses[0]})", check.ways)
    logger.warning(
        "the tokenizer can lose text (%s): %s%s; %s",
        ", ".join(check.ways),
        what,
        f" ({losses[0]})" if losses else "",
        "that is allowed" if options.allow_lossy_tokenizer else "every document is compared while it is packed",
    )


def _beginning(unit: Unit, options: PrepareOptions) -> list[str]:
    """Some documents of a unit, whole but for very long ones."""
    texts: list[str] = []
    for segment in unit.segments:
        for item in read_segment(SegmentReader(segment, options), options.skip_bad_files):
            if isinstance(item, Document):
                texts.append(item.text[:_CHECKED_CHARACTERS])
            if len(texts) >= _CHECKED_DOCUMENTS:
                return texts
    return texts
