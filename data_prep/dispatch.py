"""All units of a preparation over the pool of workers: pack them, watch what is rejected, drop duplicates."""

import time
from concurrent.futures import FIRST_COMPLETED, Executor, wait
from pathlib import Path
from typing import Any

from data_prep.dropping import drop_documents, plan_drops
from data_prep.encoding import UnequalIdsError, log_way
from data_prep.filters import FILTER_REASONS
from data_prep.options import PrepareOptions
from data_prep.packing import PackJob, pack_unit
from data_prep.rejections import REJECTED_FILE, join_rejections
from data_prep.running import forget_running_unit, forget_running_units, running_units
from data_prep.summary import account_line
from data_prep.unit_files import UnitRecord, finished_unit
from data_prep.units import Unit
from lex_pretrain.data.manifest import Account
from lex_pretrain.errors import JobError, RequestError
from lex_pretrain.files import sha256_of_json
from lex_pretrain.progress import logger, progress
from lex_pretrain.tokenizer import Tokenizer

_SECONDS_BETWEEN_LOOKS = 0.5
# Records after which a share of faulty ones says something about all of them.
_ENOUGH_RECORDS = 1000


def pack_all(
    units: list[Unit],
    output: Path,
    tokenizer: Tokenizer,
    options: PrepareOptions,
    pool: Executor,
    description: dict[str, Any],
) -> tuple[list[UnitRecord], int]:
    """Records of all units, in order, and how many were finished before."""
    for word_cache in (True, False):
        fractions = options.validation_fraction, options.test_fraction
        key = sha256_of_json([description, tokenizer.fingerprint, word_cache, fractions])
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
