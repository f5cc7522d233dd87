"""A dataset folder from inputs: list them, get a tokenizer, pack every unit, write the manifest.

Each step leaves whole files, so a killed preparation goes on where it stood when the same command is run again.
"""

import os
import shutil
from concurrent.futures import Executor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from data_prep.options import PrepareOptions
from data_prep.packing import EMPTY, UNITS_FOLDER, UnitRecord, finished_unit, pack_unit, rejected_file, sample_unit
from data_prep.pool import worker_pool
from data_prep.readers import list_sources
from data_prep.train_tokenizer import train_tokenizer
from data_prep.units import Unit, make_units, stamp
from lex_pretrain import __version__
from lex_pretrain.data.manifest import MANIFEST_FILE, SPLITS, Account, Manifest, TokenizerRecord
from lex_pretrain.data.shards import TOKENIZER_FILE, token_dtype
from lex_pretrain.errors import JobError, RequestError
from lex_pretrain.files import (
    atomic_write,
    folder_lock,
    read_json,
    sha256_of_file,
    sha256_of_json,
    write_json,
)
from lex_pretrain.progress import logger, progress
from lex_pretrain.tokenizer import Tokenizer

JOB_FILE = "prepare.json"
REJECTED_FILE = "rejected.jsonl"
# Records after which a share of faulty ones says something about all of them.
_ENOUGH_RECORDS = 1000


def prepare(
    inputs: list[str], output: Path, options: PrepareOptions, num_workers: int | None = None
) -> Manifest | None:
    """Make or finish the dataset folder `output`; None on the MPI processes that only helped.

    Raises RequestError when an input or the folder is not what the request needs, or too many records are faulty.
    """
    with worker_pool(num_workers or len(os.sched_getaffinity(0))) as pool:
        if pool is None:
            return None
        options.check()
        sources = list_sources(inputs)
        output.mkdir(parents=True, exist_ok=True)
        with folder_lock(output, "preparation"):
            return _prepare_locked(sources, output, options, pool)


def _prepare_locked(sources: list[str], output: Path, options: PrepareOptions, pool: Executor) -> Manifest:
    job = {
        "options": options.model_dump(mode="json"),
        "tokenizer_sha256": sha256_of_file(options.tokenizer) if options.tokenizer else None,
        "sources": [stamp(source) for source in sources],
    }
    _check_same_job(output, job)
    if (output / MANIFEST_FILE).is_file():
        logger.info("%s is already prepared from the same inputs; nothing to do", output)
        return Manifest.load(output)
    (output / UNITS_FOLDER).mkdir(exist_ok=True)
    units = make_units(sources, options.unit_bytes)
    tokenizer_file = _provide_tokenizer(units, output, options, pool)
    tokenizer = Tokenizer(tokenizer_file)
    key = sha256_of_json([job, tokenizer.fingerprint])
    records = _pack(units, output, tokenizer_file, options, pool, key)
    account = sum((record.account for record in records), Account())
    if account.packed.documents == 0:
        raise RequestError(f"no document was fit to keep: {_summary(account)}; see {output / REJECTED_FILE}")
    shards = sorted((shard for record in records for shard in record.shards), key=lambda shard: shard.stem)
    manifest = Manifest(
        package_version=__version__,
        tokenizer=TokenizerRecord(
            fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size, eod_id=tokenizer.eod_id
        ),
        dtype="uint16" if token_dtype(tokenizer.vocab_size).__name__ == "uint16" else "uint32",
        shards=tuple(sorted(shards, key=lambda shard: SPLITS.index(shard.split))),
        account=account,
        config=job["options"],
        sources=tuple(sources),
    )
    manifest.save(output)
    logger.info("%s: %s", output, _summary(account))
    return manifest


def _check_same_job(output: Path, job: dict[str, Any]) -> None:
    """Note the job in a new folder; RequestError, naming what differs, in one that was begun from something else."""
    file = output / JOB_FILE
    if not file.is_file():
        others = [path.name for path in output.iterdir() if path.name != ".lock"]
        if others:
            raise RequestError(
                f"{output} holds something else ({', '.join(sorted(others)[:3])}); choose another --output"
            )
        write_json(file, job)
        return
    old = read_json(file)
    changed = [key for key, value in job["options"].items() if old["options"].get(key) != value]
    faults = [f"--{key.replace('_', '-')} was {old['options'].get(key)}" for key in changed]
    if old["tokenizer_sha256"] != job["tokenizer_sha256"]:
        faults.append("the tokenizer file has changed")
    before = {source["path"]: source for source in old["sources"]}
    now = {source["path"]: source for source in job["sources"]}
    faults += [f"{path} is new" for path in now.keys() - before.keys()]
    faults += [f"{path} is no longer among the inputs" for path in before.keys() - now.keys()]
    faults += [f"{path} has changed" for path in now.keys() & before.keys() if now[path] != before[path]]
    if faults:
        listed = "\n".join(f"  {fault}" for fault in sorted(faults)[:10])
        more = f"\n  and {len(faults) - 10} more" if len(faults) > 10 else ""
        raise RequestError(f"{output} was begun from something else:\n{listed}{more}\nchoose another --output")


def _provide_tokenizer(units: list[Unit], output: Path, options: PrepareOptions, pool: Executor) -> Path:
    """The folder's own copy of the tokenizer: given, trained now, or trained before a restart."""
    file = output / TOKENIZER_FILE
    if file.is_file():
        return file
    if options.tokenizer is not None:
        Tokenizer(options.tokenizer)
        with atomic_write(file) as copy, options.tokenizer.open("rb") as given:
            shutil.copyfileobj(given, copy)
        return file
    total_bytes = sum(unit.num_bytes for unit in units)
    fraction = min(1.0, options.tokenizer_sample_bytes / total_bytes) if total_bytes else 1.0
    futures = [pool.submit(sample_unit, unit, options.text_key, fraction, options.seed) for unit in units]
    texts: list[str] = []
    with progress("reading the tokenizer's sample", max(total_bytes, 1), "bytes") as reporter:
        for unit, future in zip(units, futures, strict=True):
            texts += future.result()
            reporter.advance(unit.num_bytes)
    num_characters = sum(map(len, texts))
    logger.info(
        "training a tokenizer of %d pieces on %s documents, %.1f M characters",
        options.vocab_size,
        f"{len(texts):,}",
        num_characters / 1e6,
    )
    model = train_tokenizer(texts, options.vocab_size)
    with atomic_write(file) as opened:
        opened.write(model)
    return file


def _pack(
    units: list[Unit], output: Path, tokenizer_file: Path, options: PrepareOptions, pool: Executor, key: str
) -> list[UnitRecord]:
    """Records of all units, in order; those finished before are taken as they are."""
    records = {unit.number: finished_unit(output, unit.number, key) for unit in units}
    done = {number: record for number, record in records.items() if record is not None}
    if done:
        logger.info("%d of %d units were finished before", len(done), len(units))
    account = sum((record.account for record in done.values()), Account())
    total_bytes = sum(unit.num_bytes for unit in units if unit.number not in done)
    futures = {
        pool.submit(pack_unit, unit, output, tokenizer_file, options, key): unit
        for unit in units
        if unit.number not in done
    }
    with progress("tokenizing", max(total_bytes, 1), "bytes") as reporter:
        try:
            for future in as_completed(futures):
                unit = futures[future]
                done[unit.number] = future.result()
                account += done[unit.number].account
                reporter.advance(
                    unit.num_bytes, f"{account.packed.documents:,} documents  {account.num_tokens:,} tokens"
                )
                _check_rejected(account, options, output, finished=len(done) == len(units))
        except BrokenProcessPool:
            raise JobError(
                "a worker process was killed, most likely for lack of memory; run again with fewer --workers"
            ) from None
        finally:
            for future in futures:
                future.cancel()
            _join_rejected(output, done)
    return [done[number] for number in sorted(done)]


def _check_rejected(account: Account, options: PrepareOptions, output: Path, finished: bool) -> None:
    """Empty documents are no fault of the input; records that are not what was asked for are."""
    faulty = {reason: tally.documents for reason, tally in account.rejected.items() if reason != EMPTY}
    share = sum(faulty.values()) / max(1, account.read.documents)
    if share > options.max_rejected and (finished or account.read.documents >= _ENOUGH_RECORDS):
        worst = max(faulty, key=lambda reason: faulty[reason])
        raise RequestError(
            f"{share:.1%} of {account.read.documents:,} records are faulty, most because: {worst}. "
            f"They are listed in {output / REJECTED_FILE}. "
            "Correct the inputs or --text-key, or allow more with --max-rejected"
        )


def _join_rejected(output: Path, done: dict[int, UnitRecord]) -> None:
    with atomic_write(output / REJECTED_FILE) as joined:
        for number in sorted(done):
            with rejected_file(output, number).open("rb") as part:
                shutil.copyfileobj(part, joined)


def _summary(account: Account) -> str:
    rejected = ", ".join(f"{tally.documents:,} {reason}" for reason, tally in account.rejected.items()) or "none"
    return (
        f"read {account.read.documents:,} documents ({account.read.bytes / 1e6:,.1f} MB), rejected {rejected}, "
        f"packed {account.packed.documents:,} into {account.num_tokens:,} tokens"
    )
