"""Every document at every length under every attention: spread over ranks, and never scored twice.

A document's score depends on nothing but the model, the document and the task, and scores are put together in the
order of the documents: so results are the same to the last digit for any number of ranks, also after a restart.
"""

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lex_pretrain.errors import JobError
from lex_pretrain.evaluate.documents import ScoredDocument
from lex_pretrain.evaluate.memory import peak_memory_bytes, reset_peak_memory
from lex_pretrain.evaluate.perplexity import fixed_target_windows, score_fixed_targets, score_pieces
from lex_pretrain.evaluate.results import Protocol, Record, ScoringMode
from lex_pretrain.model.decoder import Decoder
from lex_pretrain.monitor.metrics import MetricsFile, read_records
from lex_pretrain.progress import logger, progress
from lex_pretrain.ranks import Ranks, gather_lists

NUM_POSITION_BINS = 16


class Task(NamedTuple):
    """One length under one attention, by one protocol."""

    protocol: Protocol
    attention: ScoringMode
    length: int


class DocumentScore(Record):
    """What one task gave for one document; `bins` are sums of the loss by place in the piece (`bin_edges`)."""

    task: Task
    document: int
    nll_sum: float
    num_tokens: int
    bins: tuple[float, ...]
    seconds: float
    peak_memory_bytes: int


def bin_edges(length: int) -> list[int]:
    """Edges of the bins of places in a piece: each bin is twice as wide as the one before it."""
    return sorted({0, *(length >> shift for shift in range(NUM_POSITION_BINS) if length >> shift)})


def score_all(
    decoder: Decoder,
    documents: Sequence[ScoredDocument],
    tasks: Sequence[Task],
    eod_id: int,
    ranks: Ranks,
    unfinished: Path,
) -> dict[Task, list[DocumentScore]]:
    """Scores of every task in the order of the documents, on every rank.

    `unfinished` is a folder that belongs to this model and these documents; it keeps each score as it is made, and
    scores found in it are not made again, whichever rank made them.
    """
    known = _read_scores(unfinished)
    mine = [(task, index) for task in tasks for index in range(ranks.rank, len(documents), ranks.world_size)]
    missing = [item for item in mine if item not in known]
    if ranks.rank == 0:
        logger.info("scoring %d documents of %s tokens", len(documents), f"{len(documents[0].tokens):,}")
        if len(missing) < len(mine):
            logger.info("%d of %d scores were finished before", len(mine) - len(missing), len(mine))
    file = MetricsFile(unfinished / f"rank-{ranks.rank:05d}.jsonl")
    total = sum(_num_read(task, documents[index]) for task, index in missing)
    with progress("evaluating", max(total, 1), "tokens", enabled=ranks.rank == 0) as reporter:
        for task, index in missing:
            score = _score(decoder, documents[index], index, task, eod_id)
            file.append(score.model_dump(mode="json"))
            known[task, index] = score
            reporter.advance(_num_read(task, documents[index]), f"{task.attention} at {task.length:,}")
    file.close()
    scores = {(score.task, score.document): score for score in gather_lists([known[item] for item in mine], ranks)}
    return {task: [scores[task, index] for index in range(len(documents))] for task in tasks}


def _read_scores(unfinished: Path) -> dict[tuple[Task, int], DocumentScore]:
    scores = {}
    for file in sorted(unfinished.glob("rank-*.jsonl")):
        for record in read_records(file):
            score = DocumentScore.model_validate(record)
            scores[score.task, score.document] = score
    return scores


def _num_read(task: Task, document: ScoredDocument) -> int:
    if task.protocol == "pieces":
        return len(document.tokens)
    _, _, ends = fixed_target_windows(len(document.tokens), task.length)
    return len(ends) * task.length


def _score(decoder: Decoder, document: ScoredDocument, index: int, task: Task, eod_id: int) -> DocumentScore:
    device = next(decoder.parameters()).device
    reset_peak_memory(device)
    started = time.perf_counter()
    if task.protocol == "pieces":
        losses = score_pieces(decoder, document.tokens, task.length, task.attention, eod_id)
        bins = _sums_by_place(losses, task.length)
    else:
        losses = score_fixed_targets(decoder, document.tokens, task.length, task.attention, eod_id)
        bins = []
    if not np.isfinite(losses).all():
        raise JobError(
            f"{task.attention} attention at {task.length:,} tokens gave a loss that is not finite (document {index}, "
            f"token {int(np.argmin(np.isfinite(losses)))}); try --precision fp32, or leave this attention or length out"
        )
    return DocumentScore(
        task=task,
        document=index,
        nll_sum=float(losses.sum()),
        num_tokens=len(losses),
        bins=tuple(bins),
        seconds=time.perf_counter() - started,
        peak_memory_bytes=peak_memory_bytes(device),
    )


def _sums_by_place(losses: NDArray[np.float64], length: int) -> list[float]:
    place = np.arange(len(losses)) % length
    return [
        float(losses[(place >= start) & (place < stop)].sum()) for start, stop in itertools.pairwise(bin_edges(length))
    ]
