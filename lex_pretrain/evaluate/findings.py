"""What the numbers say, in words and in a table; every sentence is computed."""

import itertools
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from lex_pretrain.config import AttentionMode
from lex_pretrain.evaluate.results import PerplexityRecord, Results


def describe(results: Results) -> list[str]:
    """Sentences about one model: where its perplexity is lowest, and what happens past the training length."""
    trained = results.training_length
    sentences = []
    modes: tuple[AttentionMode, ...] = ("causal", "blockwise")
    by_mode = {
        mode: records
        for mode in modes
        if (records := [record for record in results.perplexity if record.attention == mode])
    }
    for mode, records in by_mode.items():
        sentences.append(_trend(results.position, mode, records, trained))
    if len(by_mode) == 2:
        full, blockwise = by_mode["causal"][-1], by_mode["blockwise"][-1]
        change = blockwise.perplexity / full.perplexity - 1
        word = "lowers" if change < 0 else "raises"
        sentences.append(
            f"At {full.length:,} tokens, blockwise attention {word} {results.position}'s perplexity from "
            f"{full.perplexity:.2f} to {blockwise.perplexity:.2f} ({change:+.1%})."
        )
    return sentences


def _trend(position: str, mode: str, records: Sequence[PerplexityRecord], trained: int) -> str:
    lowest = min(records, key=lambda record: record.perplexity)
    longest = records[-1]
    start = f"{position} with {mode} attention is best at {lowest.length:,} tokens ({lowest.perplexity:.2f})"
    at_training = next((record for record in records if record.length == trained), None)
    if at_training is None or longest.length <= trained:
        return start + "."
    factor = longest.length / trained
    change = longest.perplexity / at_training.perplexity - 1
    past = [record for record in records if record.length >= trained]
    falls = all(after.perplexity < before.perplexity for before, after in itertools.pairwise(past))
    end = f"; from {trained:,} to {longest.length:,} tokens ({factor:g} times the training length) its perplexity "
    if falls:
        return start + end + f"keeps falling, to {longest.perplexity:.2f} ({change:+.1%})."
    return start + end + f"goes from {at_training.perplexity:.2f} to {longest.perplexity:.2f} ({change:+.1%})."


def perplexity_rows(all_results: Sequence[Results]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a row for every model and attention, a column for every length."""
    lengths = sorted({record.length for results in all_results for record in results.perplexity})
    header = ["position", "attention", *(f"{length:,}" for length in lengths)]
    rows = []
    for results in all_results:
        for mode in dict.fromkeys(record.attention for record in results.perplexity):
            cells = [results.find(mode, length) for length in lengths]
            rows.append([results.position, mode, *(f"{cell.perplexity:.2f}" if cell else "" for cell in cells)])
    return header, rows


def resolution_rows(all_results: Sequence[Results]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of attention resolution: measured, the mean over layers, and expected of the scheme."""
    keys = sorted({(record.length, record.attention) for results in all_results for record in results.resolution})
    header = ["position", "scores", *(f"{length:,} {attention}" for length, attention in keys)]
    rows = []
    for results in all_results:
        for kind in ("measured", "theory"):
            values = []
            for length, attention in keys:
                found = [
                    record.resolution
                    for record in results.resolution
                    if (record.kind, record.length, record.attention) == (kind, length, attention)
                ]
                values.append(f"{sum(found) / len(found):.3f}" if found else "")
            if any(values):
                rows.append([results.position, kind, *values])
    return header, rows


def summary_table(all_results: Sequence[Results]) -> Table:
    """The perplexity table for a terminal."""
    header, rows = perplexity_rows(all_results)
    trained = ", ".join(f"{length:,}" for length in sorted({results.training_length for results in all_results}))
    # Eight lengths fit a terminal of 80 columns.
    table = Table(title=f"perplexity by length in tokens (trained at {trained})", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("model", *header[2:]):
        table.add_column(name, justify="left" if name == "model" else "right", no_wrap=True)
    for position, attention, *cells in rows:
        table.add_row(f"{position}, {attention}", *cells)
    return table
