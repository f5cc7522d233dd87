"""Taking duplicates out of finished units, when all units have been read and show which documents they are."""

from pathlib import Path

import numpy as np

from data_prep.duplicates import find_duplicates
from data_prep.packing import PackJob
from data_prep.unit_files import UnitRecord, json_lines, rejected_file
from lex_pretrain.data.manifest import Account, ShardRecord, Tally
from lex_pretrain.data.origins import DocumentTable, dropped_file, table_file
from lex_pretrain.data.shards import documents_file, tokens_file, write_array, write_shard
from lex_pretrain.files import atomic_write


def plan_drops(job: PackJob, numbers: list[int]) -> dict[int, dict[int, str]]:
    """For each unit with duplicates: the rows of its table to drop, with the reason. Units are read in this order."""
    options = job.options
    if options.keep_duplicates and options.near_duplicate_similarity is None:
        return {}
    tables = [DocumentTable.load(table_file(job.output, number)) for number in numbers]
    firsts = np.cumsum([0] + [len(table) for table in tables])
    dropped = find_duplicates(
        np.concatenate([table.digest for table in tables]),
        np.concatenate([table.signature for table in tables]),
        options.keep_duplicates,
        options.near_duplicate_similarity,
    )
    drops: dict[int, dict[int, str]] = {}
    for place in sorted(dropped):
        unit = int(np.searchsorted(firsts, place, side="right")) - 1
        drops.setdefault(numbers[unit], {})[place - int(firsts[unit])] = dropped[place]
    return drops


def drop_documents(job: PackJob, number: int, record: UnitRecord, dropped: dict[int, str]) -> UnitRecord:
    """Write the unit's shards anew without these rows of its table; killed half way, the unit is packed again."""
    if record.num_dropped == len(dropped):
        return record
    output = job.output
    table = DocumentTable.load(table_file(output, number))
    write_array(dropped_file(output, number), np.array(sorted(dropped), dtype=np.int64))
    num_tokens = _count_tokens(output, record, table)
    written = [_drop_from_shard(job, shard, table, dropped) for shard in record.shards]
    lines = [
        {
            "segment": int(table.segment[row]),
            "record": int(table.record[row]),
            "reason": dropped[row],
            "detail": "",
            "bytes": int(table.num_bytes[row]),
        }
        for row in sorted(dropped)
    ]
    before = rejected_file(output, number).read_bytes()
    with atomic_write(rejected_file(output, number)) as file:
        file.write(before + json_lines(lines))
    shards = tuple(shard for shard in written if shard is not None)
    rejected: dict[str, Tally] = {}
    for row, reason in dropped.items():
        tally = Tally(documents=1, bytes=int(table.num_bytes[row]), tokens=num_tokens[row])
        rejected[reason] = rejected.get(reason, Tally()) + tally
    account = Account(
        read=record.account.read,
        rejected=(record.account + Account(rejected=rejected)).rejected,
        packed=Tally(
            documents=sum(shard.num_documents for shard in shards),
            bytes=sum(shard.num_source_bytes for shard in shards),
            tokens=sum(shard.num_tokens for shard in shards),
        ),
    )
    result = record.model_copy(update={"shards": shards, "account": account, "num_dropped": len(dropped)})
    result.save(output, number)
    return result


def _count_tokens(output: Path, record: UnitRecord, table: DocumentTable) -> dict[int, int]:
    """Tokens of each row of the table, EOD included."""
    counts: dict[int, int] = {}
    for shard in record.shards:
        starts = np.load(documents_file(output, shard.stem), allow_pickle=False)
        lengths = np.diff(np.append(starts, shard.num_tokens))
        counts.update(zip(table.places_of(shard.split).tolist(), lengths.tolist(), strict=True))
    return counts


def _drop_from_shard(
    job: PackJob, shard: ShardRecord, table: DocumentTable, dropped: dict[int, str]
) -> ShardRecord | None:
    """The shard as it is without the dropped documents, None where nothing is left of it."""
    rows = table.places_of(shard.split)
    keep = ~np.isin(rows, list(dropped))
    if keep.all():
        return shard
    files = tokens_file(job.output, shard.stem), documents_file(job.output, shard.stem)
    if not keep.any():
        for file in files:
            file.unlink()
        return None
    tokens, starts = (np.load(file, allow_pickle=False) for file in files)
    lengths = np.diff(np.append(starts, len(tokens)))
    kept_tokens, kept_lengths = tokens[np.repeat(keep, lengths)], lengths[keep]
    kept_starts = np.cumsum(kept_lengths) - kept_lengths
    num_bytes = int(table.num_bytes[rows[keep]].sum())
    return write_shard(job.output, shard.stem, shard.split, kept_tokens, kept_starts, num_bytes)
