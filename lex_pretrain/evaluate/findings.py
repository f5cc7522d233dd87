"""What the numbers say, in words; every sentence is computed."""

import itertools
from collections.abc import Sequence

import numpy as np

from lex_pretrain.evaluate.results import PerplexityRecord, Results, ScoringMode, distinct_labels

# R at twice the training length over R at the training length, from table 3 of arXiv 2212.10554 (1024 and 2048).
PAPER_RESOLUTION_RATIOS = {"xpos": 0.54 / 0.98, "rope": 0.08 / 0.91, "alibi": 0.88 / 0.81, "sinusoidal": 0.28 / 0.87}


def describe_all(all_results: Sequence[Results]) -> list[str]:
    """Sentences about each model, and about how they compare."""
    labels = distinct_labels(all_results)
    sentences = [
        sentence for label, results in zip(labels, all_results, strict=True) for sentence in describe(results, label)
    ]
    return sentences + (compare(all_results) if len(all_results) > 1 else [])


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
    change = longest.perplexity / at_training.perplexity - 1
    past = [record for record in records if record.length >= trained]
    falls = all(after.perplexity < before.perplexity for before, after in itertools.pairwise(past))
    end = f"; from {trained:,} to {longest.length:,} tokens ({longest.length / trained:g} times the training length) "
    if falls:
        return start + end + f"its perplexity keeps falling, to {longest.perplexity:.2f} ({change:+.1%})."
    return start + end + f"it goes from {at_training.perplexity:.2f} to {longest.perplexity:.2f} ({change:+.1%})."


def _against_full(label: str, mode: ScoringMode, full: PerplexityRecord, other: PerplexityRecord) -> str:
    change = other.perplexity / full.perplexity - 1
    speed = other.tokens_per_second / full.tokens_per_second
    return (
        f"At {full.length:,} tokens, {mode} attention {'lowers' if change < 0 else 'raises'} {label}'s perplexity from "
        f"{full.perplexity:.2f} to {other.perplexity:.2f} ({change:+.1%}), at {speed:.2g} times the speed of full "
        "attention."
    )


def _value_of_context(label: str, mode: ScoringMode, records: Sequence[PerplexityRecord], trained: int) -> str:
    shortest, longest = records[0], records[-1]
    text = (
        f"The same {shortest.num_tokens:,} tokens, read by {label} with {mode} attention from a longer and longer "
        f"context, go from {shortest.perplexity:.2f} ({shortest.length:,} tokens) "
    )
    middle = next((record for record in records[1:-1] if record.length == trained), None)
    if middle is not None:
        text += f"over {middle.perplexity:.2f} ({trained:,}) "
    return text + f"to {longest.perplexity:.2f} ({longest.length:,})."


def _retrieval(results: Results, label: str) -> list[str]:
    sentences = []
    for task, mode in dict.fromkeys((record.task, record.attention) for record in results.retrieval):
        cells = [r for r in results.retrieval if (r.task, r.attention) == (task, mode)]
        longest = max(cell.length for cell in cells)
        at_longest = [cell for cell in cells if cell.length == longest]
        early, late = min(at_longest, key=lambda cell: cell.depth), max(at_longest, key=lambda cell: cell.depth)
        sentences.append(
            f"Retrieval, {task}, {label} with {mode} attention in {longest:,} tokens: {late.accuracy:.0%} of the "
            f"answer's tokens right when it was said last, {early.accuracy:.0%} when it was said first."
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
        others = [f"{label} {_difference(best, record)}" for record, label in ranked[1:]]
        sentences.append(
            f"At {max(common):,} tokens with {mode} attention {best_label} is lowest ({best.perplexity:.2f}); against "
            f"it {', '.join(others)} (95 % intervals over the same documents)."
        )
    return sentences


def _difference(best: PerplexityRecord, other: PerplexityRecord) -> str:
    """How much higher another's perplexity is, with a paired bootstrap interval: both scored the same documents."""
    differences = np.array(other.document_nll) - np.array(best.document_nll)
    draws = np.random.default_rng(0).integers(0, len(differences), size=(2000, len(differences)))
    low, high = np.expm1(np.percentile(differences[draws].mean(axis=1), [2.5, 97.5]))
    return f"{np.expm1(differences.mean()):+.1%} [{low:+.1%}, {high:+.1%}]"
