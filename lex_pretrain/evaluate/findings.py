"""What the numbers say, in words; every sentence is computed.

Changes stand with 95 % bootstrap intervals over documents that pair each document with itself.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lex_pretrain.evaluate.intervals import paired_change
from lex_pretrain.evaluate.results import PerplexityRecord, Results, ScoringMode, distinct_labels

# R at twice the training length over R at the training length, from table 3 of arXiv 2212.10554 (1024 and 2048).
PAPER_RESOLUTION_RATIOS = {"xpos": 0.54 / 0.98, "rope": 0.08 / 0.91, "alibi": 0.88 / 0.81, "sinusoidal": 0.28 / 0.87}


class Finding(NamedTuple):
    """What is spoken of, and the sentences about it."""

    heading: str
    sentences: list[str]


def describe_all(all_results: Sequence[Results]) -> list[Finding]:
    """How the models compare, where there are several, and then each of them."""
    findings = [Finding("The models beside each other", compare(all_results))] if len(all_results) > 1 else []
    for label, results in zip(distinct_labels(all_results), all_results, strict=True):
        findings.append(Finding(label, describe(results, label)))
    return findings


def describe(results: Results, label: str) -> list[str]:
    """Sentences about one model: where its perplexity is lowest, and what happens past the training length."""
    sentences = [_trend(label, mode, results.curve(mode), results.training_length) for mode in results.attentions]
    full = results.curve("causal")
    for mode in results.attentions:
        if full and mode != "causal":
            sentences.append(_against_full(label, mode, full[-1], results.curve(mode)[-1]))
    for mode in results.attentions:
        if (fixed := results.curve(mode, "fixed-target"))[1:]:
            sentences.append(_value_of_context(label, mode, fixed, results.training_length))
    return sentences + _retrieval(results, label) + _resolution(results, label)


def _trend(label: str, mode: ScoringMode, records: Sequence[PerplexityRecord], trained: int) -> str:
    lowest = min(records, key=lambda record: record.perplexity)
    longest = records[-1]
    start = f"{label} with {mode} attention is best at {lowest.length:,} tokens ({lowest.perplexity:.2f})"
    at_training = next((record for record in records if record.length == trained), None)
    if at_training is None or longest.length <= trained:
        return start + "."
    change = _change(at_training, longest)
    past = [record for record in records if record.length >= trained]
    falls = all(after.perplexity < before.perplexity for before, after in itertools.pairwise(past))
    end = f"; from {trained:,} to {longest.length:,} tokens ({longest.length / trained:g} times the training length) "
    if falls:
        return start + end + f"its perplexity keeps falling, to {longest.perplexity:.2f} ({change})."
    return start + end + f"it goes from {at_training.perplexity:.2f} to {longest.perplexity:.2f} ({change})."


def _against_full(label: str, mode: ScoringMode, full: PerplexityRecord, other: PerplexityRecord) -> str:
    lowers = other.perplexity < full.perplexity
    speed = other.tokens_per_second / full.tokens_per_second
    return (
        f"At {full.length:,} tokens, {mode} attention {'lowers' if lowers else 'raises'} {label}'s perplexity from "
        f"{full.perplexity:.2f} to {other.perplexity:.2f} ({_change(full, other)}), at {speed:.2g} times the speed of "
        "full attention."
    )


def _value_of_context(label: str, mode: ScoringMode, records: Sequence[PerplexityRecord], trained: int) -> str:
    shortest, longest = records[0], records[-1]
    text = (
        f"The same {shortest.num_tokens:,} tokens, read by {label} with {mode} attention from a longer and longer "
        f"context, go from {shortest.perplexity:.2f} ({shortest.length:,} tokens) "
    )
    at_training = next((record for record in records[1:-1] if record.length == trained), None)
    if at_training is None:
        return text + f"to {longest.perplexity:.2f} ({longest.length:,}): {_change(shortest, longest)}."
    return text + (
        f"over {at_training.perplexity:.2f} ({trained:,}) to {longest.perplexity:.2f} ({longest.length:,}): what lies "
        f"beyond the training length changes {_change(at_training, longest)}."
    )


def _retrieval(results: Results, label: str) -> list[str]:
    """What is found again in the longest context, for each attention."""
    sentences = []
    longest = max((record.length for record in results.retrieval), default=0)
    for mode in dict.fromkeys(record.attention for record in results.retrieval):
        parts = []
        for task in dict.fromkeys(record.task for record in results.retrieval):
            cells = [r for r in results.retrieval if (r.task, r.attention, r.length) == (task, mode, longest)]
            first, last = min(cells, key=lambda cell: cell.depth), max(cells, key=lambda cell: cell.depth)
            parts.append(f"{task} {last.accuracy:.0%} when said last and {first.accuracy:.0%} when said first")
        sentences.append(
            f"Of what it is asked to find again in {longest:,} tokens, {label} with {mode} attention gets right: "
            f"{'; '.join(parts)} (of the answers' tokens)."
        )
    return sentences


def _resolution(results: Results, label: str) -> list[str]:
    """R at twice the training length as a share of R at it, with full attention, beside the paper's ratio."""
    by_length = {}
    for length in (results.training_length, 2 * results.training_length):
        found = [
            record.resolution
            for record in results.resolution
            if (record.kind, record.attention, record.length) == ("measured", "causal", length)
        ]
        if not found or not np.mean(found):
            return []
        by_length[length] = float(np.mean(found))
    at_training, at_double = by_length.values()
    paper = PAPER_RESOLUTION_RATIOS.get(results.position)
    beside = f" (the paper's figures give {paper:.2f})" if paper is not None else ""
    return [
        f"Attention resolution of {label} at twice the training length is {at_double / at_training:.2f} times that at "
        f"the training length, measured over all layers with full attention{beside}."
    ]


def compare(all_results: Sequence[Results]) -> list[str]:
    """For each attention that all have, who is lowest at the longest common length, and by how much."""
    if len({results.documents_sha256 for results in all_results}) > 1:
        return [
            "The models were not scored on the same tokens, so perplexities do not compare between them; bits per "
            "byte do, as far as the texts are alike."
        ]
    labels = distinct_labels(all_results)
    shared = [mode for mode in all_results[0].attentions if all(mode in results.attentions for results in all_results)]
    sentences = []
    for mode in shared:
        common = set.intersection(*({record.length for record in results.curve(mode)} for results in all_results))
        if not common:
            continue
        found = [results.find(mode, max(common)) for results in all_results]
        ranked = sorted(
            ((record, label) for record, label in zip(found, labels, strict=True) if record is not None),
            key=lambda item: item[0].perplexity,
        )
        best, best_label = ranked[0]
        others = [f"{label} {_change(best, record)}" for record, label in ranked[1:]]
        sentences.append(
            f"At {max(common):,} tokens with {mode} attention {best_label} is lowest ({best.perplexity:.2f}); against "
            f"it {', '.join(others)}."
        )
    return sentences


def _change(before: PerplexityRecord, after: PerplexityRecord) -> str:
    """How the perplexity differs between two records of the same documents, with its paired interval."""
    change, low, high = paired_change(before.document_nll, after.document_nll)
    return f"{change:+.1%}" if before.num_documents == 1 else f"{change:+.1%} [{low:+.1%}, {high:+.1%}]"
