"""What people read of a preparation: its account in one line while it runs, and as a table at its end."""

from collections import Counter

from rich.table import Table

from lex_pretrain.data.manifest import SPLITS, Account, Manifest, Tally


def account_line(account: Account) -> str:
    rejected = ", ".join(f"{tally.documents:,} {reason}" for reason, tally in account.rejected.items()) or "none"
    return (
        f"read {account.read.documents:,} documents ({account.read.bytes / 1e6:,.1f} MB), rejected {rejected}, "
        f"packed {account.packed.documents:,} into {account.packed.tokens:,} tokens"
    )


def summary_table(manifest: Manifest, seconds: float) -> Table:
    """Read, rejected by reason, packed, and what each split got."""
    account = manifest.account
    rate = account.read.bytes / 1e6 / seconds
    table = Table(
        title=f"{manifest.tokenizer.vocab_size:,} pieces, {manifest.dtype}, {len(manifest.shards)} shards, "
        f"{seconds:,.0f} s, {rate:,.1f} MB/s"
    )
    table.add_column("")
    for name in ("documents", "MB of text", "tokens"):
        table.add_column(name, justify="right")
    _add(table, "read", account.read)
    for reason, tally in account.rejected.items():
        _add(table, f"rejected: {reason}", tally)
    _add(table, "packed", account.packed)
    for split in SPLITS:
        shards = [shard for shard in manifest.shards if shard.split == split]
        tally = Tally(
            documents=sum(shard.num_documents for shard in shards),
            bytes=sum(shard.num_source_bytes for shard in shards),
            tokens=sum(shard.num_tokens for shard in shards),
        )
        _add(table, f"  {split}", tally)
    for reason, count in Counter(entry.reason for entry in manifest.skipped).items():
        table.add_row(f"not read: {reason}", f"{count:,}", "", "")
    return table


def _add(table: Table, name: str, tally: Tally) -> None:
    table.add_row(name, f"{tally.documents:,}", f"{tally.bytes / 1e6:,.2f}", f"{tally.tokens:,}")
