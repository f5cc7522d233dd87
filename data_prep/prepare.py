"""A dataset folder from inputs: list them, get a tokenizer, pack every unit, drop duplicates, write the manifest.

Each step leaves whole files, so a killed preparation goes on where it stood when the same command is run again.
"""

import errno
import os
import time
from concurrent.futures import Executor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dispatch import pack_all
from data_prep.job import check_same_job, decided_fractions, describe_job, evaluation_sources, save_job
from data_prep.megatron import INDEX_SUFFIX
from data_prep.options import PrepareOptions
from data_prep.pool import worker_pool
from data_prep.readers import SegmentReader
from data_prep.records import Document
from data_prep.rejections import REJECTED_FILE
from data_prep.sampling import provide_tokenizer
from data_prep.sources import OnUnknown, Sources, list_sources, states_of
from data_prep.splits import fill_splits
from data_prep.summary import account_line, summary_table
from data_prep.unit_files import UnitRecord, contamination_file
from data_prep.units import Unit, make_units
from data_prep.word_runs import index_of_runs, num_whole_texts
from lex_pretrain import __version__
from lex_pretrain.data.manifest import MANIFEST_FILE, SPLITS, Account, Manifest, TokenizerRecord
from lex_pretrain.data.origins import UNITS_FOLDER
from lex_pretrain.data.shards import token_dtype, write_array
from lex_pretrain.errors import JobError, RequestError
from lex_pretrain.folder_lock import folder_lock
from lex_pretrain.progress import console, logger
from lex_pretrain.tokenizer import Tokenizer


def prepare(
    inputs: list[str],
    output: Path,
    options: PrepareOptions,
    num_workers: int | None = None,
    on_unknown: OnUnknown = "error",
) -> Manifest | None:
    """Make or finish the dataset folder `output`; None on the MPI processes that only helped.

    Raises RequestError when an input or the folder is not what the request needs, or too many records are faulty, and
    JobError when the disk is full or a worker was killed.
    """
    num_workers = num_workers or len(os.sched_getaffinity(0))
    with worker_pool(num_workers) as pool:
        if pool is None:
            return None
        sources = list_sources(inputs, on_unknown, output)
        indexed = [source for source in sources.paths if source.lower().endswith(INDEX_SUFFIX)]
        if indexed and options.tokenizer is None:
            raise RequestError(f"{indexed[0]} holds ids; name the tokenizer that made them by --tokenizer FILE.model")
        try:
            output.mkdir(parents=True, exist_ok=True)
            with folder_lock(output, "preparation"):
                return _prepare_locked(sources, output, options, pool)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise JobError(f"no space is left for {output}; free some and run the same command again") from error
        except BrokenProcessPool:
            raise JobError(
                "a worker process was killed, most likely for lack of memory; run again with fewer --workers"
            ) from None


def _prepare_locked(sources: Sources, output: Path, options: PrepareOptions, pool: Executor) -> Manifest:
    states = {source: states_of(source) for source in sources.paths}
    description = describe_job(states, options)
    check_same_job(output, description)
    if (output / MANIFEST_FILE).is_file():
        logger.info("%s is already prepared from the same inputs; nothing to do", output)
        return Manifest.load(output)
    started = time.monotonic()
    (output / UNITS_FOLDER).mkdir(exist_ok=True)
    units = make_units(sources.paths, options.unit_bytes, states)
    _index_evaluation_files(output, options)
    tokenizer = provide_tokenizer(units, output, options, pool)
    options, records, num_reused = _pack_with_full_splits(units, output, tokenizer, options, pool, description)
    account = sum((record.account for record in records), Account())
    if account.packed.documents == 0:
        raise RequestError(f"no document was fit to keep: {account_line(account)}; see {output / REJECTED_FILE}")
    shards = sorted((shard for record in records for shard in record.shards), key=lambda shard: shard.stem)
    manifest = Manifest(
        package_version=__version__,
        tokenizer=TokenizerRecord(
            fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size, eod_id=tokenizer.eod_id
        ),
        dtype="uint16" if token_dtype(tokenizer.vocab_size) is np.uint16 else "uint32",
        shards=tuple(sorted(shards, key=lambda shard: SPLITS.index(shard.split))),
        account=account,
        config=options.model_dump(mode="json"),
        sources=tuple(sources.paths),
        skipped=tuple(sources.skipped),
    )
    seconds = time.monotonic() - started
    run = {"seconds": seconds, "num_units": len(units), "num_units_reused": num_reused}
    save_job(output, description, run=run, account=account.model_dump(mode="json"))
    # Last, for it is what says that all is there.
    manifest.save(output)
    console.print(summary_table(manifest, seconds))
    logger.info("dataset: %s", output)
    return manifest


def _pack_with_full_splits(
    units: list[Unit],
    output: Path,
    tokenizer: Tokenizer,
    options: PrepareOptions,
    pool: Executor,
    description: dict[str, Any],
) -> tuple[PrepareOptions, list[UnitRecord], int]:
    """Pack all units; once more with other fractions where few documents leave a split empty that was asked for.

    Returns the options with the fractions that hold, the records, and how many units were finished before.
    """
    begun = options.model_copy(update=decided_fractions(output))
    records, num_reused = pack_all(units, output, tokenizer, begun, pool, description)
    shards = [shard for record in records for shard in record.shards]
    filled = fill_splits(output, shards, len(units), options, packed=begun)
    if filled != begun:
        save_job(output, description, fractions=filled.model_dump(include={"validation_fraction", "test_fraction"}))
        records, num_reused = pack_all(units, output, tokenizer, filled, pool, description)
    return filled, records, num_reused


def _index_evaluation_files(output: Path, options: PrepareOptions) -> None:
    """Hash every run of words of the evaluation files, and whole what is shorter, for all workers to look into.

    Raises RequestError where none of the files has a word.
    """
    if not options.decontaminate or contamination_file(output).is_file():
        return
    num_words = options.decontaminate_words
    units = make_units(evaluation_sources(options), options.unit_bytes)
    segments = [segment for unit in units for segment in unit.segments]
    documents = [item.text for part in segments for item in SegmentReader(part, options) if isinstance(item, Document)]
    index = index_of_runs(documents, num_words)
    if not len(index):
        raise RequestError(f"--decontaminate: no document of {', '.join(options.decontaminate)} has a word")
    write_array(contamination_file(output), index)
    num_whole = num_whole_texts(index)
    logger.info(
        "from %s evaluation documents: %s runs of %d words and %s shorter texts, which are compared whole",
        f"{len(documents):,}",
        f"{len(index) - num_whole:,}",
        num_words,
        f"{num_whole:,}",
    )
