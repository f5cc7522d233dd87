"""Tables of several results: rows of text for the report and for Markdown, and one for the terminal."""

from collections.abc import Callable, Sequence
from statistics import mean, stdev
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable

from lex_pretrain.evaluate.results import PerplexityRecord, Protocol, Results, distinct_labels


class Table(NamedTuple):
    """A heading, what the table shows, the columns' names, and the rows; the first two columns name a row."""

    heading: str
    note: str
    header: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        lines = [self.header, ["---", "---", *("---:" for _ in self.header[2:])], *self.rows]
        return f"## {self.heading}\n\n{self.note}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def all_tables(all_results: Sequence[Results]) -> list[Table]:
    """Every table that the results fill."""
    tables = [
        _by_length(
            all_results,
            "pieces",
            "Perplexity by length in tokens",
            "Documents cut into pieces of the length; every token scored.",
            lambda record: f"{record.perplexity:.2f}",
        ),
        _by_length(
            all_results,
            "fixed-target",
            "Perplexity of the same tokens by length of context",
            "Only the context grows from column to column; the tokens scored are the same.",
            lambda record: f"{record.perplexity:.2f}",
        ),
        _by_length(
            all_results,
            "pieces",
            "Bits per byte by length in tokens",
            "Comparable between tokenizers.",
            lambda record: "" if record.bits_per_byte is None else f"{record.bits_per_byte:.4f}",
        ),
        _spread(all_results),
        _resolution(all_results),
        _retrieval(all_results),
        _by_length(
            all_results,
            "pieces",
            "Speed and memory by length in tokens",
            "Thousand tokens scored a second by one process, and the most memory in GiB that a process held.",
            lambda record: f"{record.tokens_per_second / 1e3:.1f} k/s, {record.peak_memory_bytes / 2**30:.2f}",
        ),
    ]
    return [table for table in tables if table.rows]


def _by_length(
    all_results: Sequence[Results],
    protocol: Protocol,
    heading: str,
    note: str,
    cell: Callable[[PerplexityRecord], str],
) -> Table:
    """A row for every model and attention, a column for every length."""
    lengths = sorted({r.length for results in all_results for r in results.perplexity if r.protocol == protocol})
    rows = []
    for label, results in zip(distinct_labels(all_results), all_results, strict=True):
        for mode in results.attentions:
            found = [results.find(mode, length, protocol) for length in lengths]
            if any(found):
                rows.append([label, mode, *("" if record is None else cell(record) for record in found)])
    return Table(heading, note, ["model", "attention", *(f"{length:,}" for length in lengths)], rows)


def _spread(all_results: Sequence[Results]) -> Table:
    """Mean and standard deviation over the runs that are alike, such as those of several seeds; no row for one run."""
    alike: dict[tuple[object, ...], list[Results]] = {}
    for results in all_results:
        size = results.num_layers, results.num_parameters, results.training_length, results.step
        alike.setdefault((results.position, *size, results.documents_sha256), []).append(results)
    groups = [group for group in alike.values() if len(group) > 1]
    lengths = sorted({r.length for group in groups for r in group[0].perplexity if r.protocol == "pieces"})
    rows = []
    for group in groups:
        for mode in group[0].attentions:
            cells = []
            for length in lengths:
                records = [record for results in group if (record := results.find(mode, length)) is not None]
                values = [record.perplexity for record in records]
                cells.append(f"{mean(values):.2f} ± {stdev(values):.2f}" if len(values) > 1 else "")
            rows.append([f"{group[0].position} ({len(group)} runs)", mode, *cells])
    return Table(
        "Spread over runs",
        "Perplexity in pieces: the mean of runs that differ in nothing but their seed, ± their standard deviation.",
        ["model", "attention", *(f"{length:,}" for length in lengths)],
        rows,
    )


def _resolution(all_results: Sequence[Results]) -> Table:
    """R, measured (the mean over layers) and as the scheme alone gives it."""
    keys = sorted({(r.attention, r.length) for results in all_results for r in results.resolution}, reverse=True)
    keys.sort(key=lambda key: (key[0] != "causal", key[1]))
    rows = []
    for label, results in zip(distinct_labels(all_results), all_results, strict=True):
        for kind in ("measured", "theory"):
            values = []
            for attention, length in keys:
                found = [
                    record.resolution
                    for record in results.resolution
                    if (record.kind, record.attention, record.length) == (kind, attention, length)
                ]
                values.append(f"{sum(found) / len(found):.2e}" if found else "")
            if any(values):
                rows.append([label, kind, *values])
    return Table(
        "Attention resolution R",
        "Higher tells distances apart. By distances up to the length; blockwise attention looks back no further than "
        "the training length. As the paper defines R no value can exceed 1, while it prints values up to 1.08: "
        "compare orderings and ratios, not values.",
        ["model", "scores", *(f"{length:,} {attention}" for attention, length in keys)],
        rows,
    )


def _retrieval(all_results: Sequence[Results]) -> Table:
    """Mean accuracy over depths."""
    lengths = sorted({record.length for results in all_results for record in results.retrieval})
    rows = []
    for label, results in zip(distinct_labels(all_results), all_results, strict=True):
        for task, mode in dict.fromkeys((record.task, record.attention) for record in results.retrieval):
            cells = []
            for length in lengths:
                found = [
                    record.accuracy
                    for record in results.retrieval
                    if (record.task, record.attention, record.length) == (task, mode, length)
                ]
                cells.append(f"{sum(found) / len(found):.0%}" if found else "")
            rows.append([label, f"{task}, {mode}", *cells])
    return Table(
        "Retrieval by length in tokens",
        "Share of the answers' tokens that were the model's first choice, over all depths: a number told in a sentence "
        "(pass-key), and a row of random pieces to go on with (copy).",
        ["model", "task", *(f"{length:,}" for length in lengths)],
        rows,
    )


def summary_table(all_results: Sequence[Results]) -> RichTable:
    """The first table for a terminal; eight lengths fit one of 80 columns."""
    perplexity = all_tables(all_results)[0]
    trained = ", ".join(f"{length:,}" for length in sorted({results.training_length for results in all_results}))
    title = f"perplexity by length in tokens (trained at {trained})"
    table = RichTable(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("model", *perplexity.header[2:]):
        table.add_column(name, justify="left" if name == "model" else "right", no_wrap=True)
    for label, mode, *cells in perplexity.rows:
        table.add_row(f"{label}, {mode}", *cells)
    return table
