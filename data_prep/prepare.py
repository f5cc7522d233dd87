"""A dataset folder from inputs: list them, get a tokenizer, pack every unit, drop duplicates, write the manifest.

Each step leaves whole files, so a killed preparation goes on where it stood when the same command is run again.
"""

import errno
import os
import time
from concurrent.futures import FIRST_COMPLETED, Executor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dropping import drop_documents, plan_drops
from data_prep.encoding import UnequalIdsError, log_way
from data_prep.filters import FILTER_REASONS
from data_prep.job import JOB_FILE, check_same_job, describe_job
from data_prep.megatron import INDEX_SUFFIX
from data_prep.options import PrepareOptions
from data_prep.packing import PackJob, pack_unit
from data_prep.pool import worker_pool
from data_prep.readers import Document, SegmentReader
from data_prep.rejections import REJECTED_FILE, join_rejections
from data_prep.running import forget_running_unit, forget_running_units, running_units
from data_prep.sampling import provide_tokenizer
from data_prep.sources import list_sources
from data_prep.summary import account_line, summary_table
from data_prep.unit_files import UnitRecord, contamination_file, finished_unit
from data_prep.units import Unit, make_units
from data_prep.word_runs import index_of_runs
from lex_pretrain import __version__
from lex_pretrain.data.manifest import MANIFEST_FILE, SPLITS, Account, Manifest, TokenizerRecord
from lex_pretrain.data.origins import UNITS_FOLDER
from lex_pretrain.data.shards import token_dtype, write_array
from lex_pretrain.errors import JobError, RequestError
from lex_pretrain.files import folder_lock, sha256_of_json, write_json
from lex_pretrain.progress import console, logger, progress
from lex_pretrain.tokenizer import Tokenizer

_SECONDS_BETWEEN_LOOKS = 0.5
# Records after which a share of faulty ones says something about all of them.
_ENOUGH_RECORDS = 1000


def prepare(
    inputs: list[str], output: Path, options: PrepareOptions, num_workers: int | None = None
) -> Manifest | None:
    """Make or finish the dataset folder `output`; None on the MPI processes that only helped.

    Raises RequestError when an input or the folder is not what the request needs, or too many records are faulty, and
    JobError when the disk is full or a worker was killed.
    """
    num_workers = num_workers or len(os.sched_getaffinity(0))
    with worker_pool(num_workers) as pool:
        if pool is None:
            return None
        sources = list_sources(inputs)
        indexed = [source for source in sources if source.endswith(INDEX_SUFFIX)]
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


def _prepare_locked(sources: list[str], output: Path, options: PrepareOptions, pool: Executor) -> Manifest:
    description = describe_job(sources, options)
    check_same_job(output, description)
    if (output / MANIFEST_FILE).is_file():
        logger.info("%s is already prepared from the same inputs; nothing to do", output)
        return Manifest.load(output)
    started = time.monotonic()
    (output / UNITS_FOLDER).mkdir(exist_ok=True)
    units = make_units(sources, options.unit_bytes)
    tokenizer = provide_tokenizer(units, output, options, pool)
    _index_evaluation_files(output, options)
    records, num_reused = _pack_all(units, output, tokenizer, options, pool, description)
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
        sources=tuple(sources),
    )
    seconds = time.monotonic() - started
    run = {"seconds": seconds, "num_units": len(units), "num_units_reused": num_reused}
    write_json(output / JOB_FILE, {"job": description, "run": run, "account": account.model_dump(mode="json")})
    # Last, for it is what says that all is there.
    manifest.save(output)
    console.print(summary_table(manifest, seconds))
    logger.info("dataset: %s", output)
    return manifest


def _index_evaluation_files(output: Path, options: PrepareOptions) -> None:
    """Hash every run of words of the evaluation files, for all workers to look into."""
    if not options.decontaminate or contamination_file(output).is_file():
        return
    num_words = options.decontaminate_words
    units = make_units(list_sources(list(options.decontaminate)), options.unit_bytes)
    segments = [segment for unit in units for segment in unit.segments]
    documents = [item.text for part in segments for item in SegmentReader(part, options) if isinstance(item, Document)]
    index = index_of_runs(documents, num_words)
    if not len(index):
        raise RequestError(f"--decontaminate: no document of these files has {num_words} words in a row")
    write_array(contamination_file(output), index)
    logger.info("%s runs of %d words from %d evaluation documents", f"{len(index):,}", num_words, len(documents))


def _pack_all(
    units: list[Unit],
    output: Path,
    tokenizer: Tokenizer,
    options: PrepareOptions,
    pool: Executor,
    description: dict[str, Any],
) -> tuple[list[UnitRecord], int]:
    """Records of all units, in order, and how many were finished before."""
    for word_cache in (True, False):
        key = sha256_of_json([description, tokenizer.fingerprint, word_cache])
        job = PackJob(output, options, key, word_cache)
        log_way(tokenizer, word_cache)
        found = {unit.number: finished_unit(output, unit.number, key) for unit in units}
        done = {number: record for number, record in found.items() if record is not None}
        num_reused = len(done)
        try:
            _pack(units, job, pool, done)
            _drop_duplicates(job, pool, done)
        except UnequalIdsError:
            # Every unit is packed anew, for those that showed no difference were not compared throughout.
            continue
        finally:
            join_rejections(output, units, done)
        return [done[unit.number] for unit in units], num_reused
    raise JobError("tokenizing plainly does not agree with itself")


def _pack(units: list[Unit], job: PackJob, pool: Executor, done: dict[int, UnitRecord]) -> None:
    """Pack the units that are not done, and note their records there as they come."""
    waiting = [unit for unit in units if unit.number not in done]
    if done:
        logger.info("%d of %d units were finished before", len(done), len(units))
    forget_running_units(job.output)
    before = sum((record.account for record in done.values()), Account())
    account, num_bytes_done = before, 0
    started = time.monotonic()
    futures = {pool.submit(pack_unit, unit, job): unit for unit in waiting}
    with progress("tokenizing", max(sum(unit.num_bytes for unit in waiting), 1), "bytes") as reporter:
        try:
            pending = set(futures)
            while pending:
                finished, pending = wait(pending, _SECONDS_BETWEEN_LOOKS, return_when=FIRST_COMPLETED)
                for unit, record in ((futures[future], future.result()) for future in finished):
                    done[unit.number] = record
                    account += record.account
                    num_bytes_done += unit.num_bytes
                    forget_running_unit(job.output, unit.number)
                _check_rejected(account, job, finished=not pending)
                running = {futures[future].number: futures[future].num_bytes for future in pending}
                so_far = {number: part for number, part in running_units(job.output).items() if number in running}
                seen = sum(so_far.values(), account)
                num_bytes_running = sum(min(part.read.bytes, running[number]) for number, part in so_far.items())
                rate = (seen.packed.tokens - before.packed.tokens) / (time.monotonic() - started)
                reporter.reach(num_bytes_done + num_bytes_running, f"{rate:,.0f} tokens/s  {account_line(seen)}")
        finally:
            for future in futures:
                future.cancel()
    forget_running_units(job.output)
    _check_rejected(account, job, finished=True)


def _drop_duplicates(job: PackJob, pool: Executor, done: dict[int, UnitRecord]) -> None:
    """Take duplicates out of the units that hold them; `done` then has their new records."""
    drops = plan_drops(job, sorted(done))
    futures = {number: pool.submit(drop_documents, job, number, done[number], drops[number]) for number in drops}
    for number, future in futures.items():
        done[number] = future.result()


def _check_rejected(account: Account, job: PackJob, finished: bool) -> None:
    """What a filter was asked to reject is no fault of the input; records that are not what was asked for are."""
    faulty = {reason: tally.documents for reason, tally in account.rejected.items() if reason not in FILTER_REASONS}
    share = sum(faulty.values()) / max(1, account.read.documents)
    if share > job.options.max_rejected and (finished or account.read.documents >= _ENOUGH_RECORDS):
        worst = max(faulty, key=lambda reason: faulty[reason])
        raise RequestError(
            f"{share:.1%} of {account.read.documents:,} records are faulty, most because: {worst}. "
            f"They are listed in {job.output / REJECTED_FILE}. "
            "Correct the inputs or --text-key, or allow more with --max-rejected"
        )
