"""One evaluation: every length under every attention, attention resolution, and `results.json`."""

import itertools
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from lex_pretrain import __version__
from lex_pretrain.config import AttentionMode, Precision
from lex_pretrain.errors import RequestError
from lex_pretrain.evaluate.documents import ScoredDocument, load_documents
from lex_pretrain.evaluate.perplexity import confidence_interval, peak_memory_bytes, score_document
from lex_pretrain.evaluate.resolution import expected_scores, measured_scores, resolution
from lex_pretrain.evaluate.results import PerplexityRecord, PositionRecord, ResolutionRecord, Results
from lex_pretrain.hardware import device_of_rank, evaluation_dtype
from lex_pretrain.model.loading import LoadedModel, load_decoder
from lex_pretrain.progress import ProgressReporter, logger, progress
from lex_pretrain.ranks import Ranks, find_ranks, gather_lists, join_process_group, leave_process_group
from lex_pretrain.tokenizer import Tokenizer

NUM_POSITION_BINS = 16
# Distances that the attention resolution is measured over, as multiples of the training length.
RESOLUTION_FACTORS = (1, 2, 8)
CURVE_POINTS = 200
RESOLUTION_DOCUMENTS = 4
RESOLUTION_ATTENTIONS: tuple[Literal["causal", "blockwise"], ...] = ("causal", "blockwise")

PROTOCOL_TEXT = (
    "Protocol `pieces`: the first {num_tokens:,} tokens of each document are cut into pieces of the length, and every "
    "token is scored, the first of a piece from the one token before it, and a document's first from the "
    "end-of-document piece. All lengths score the same tokens. Intervals are 95 % bootstrap intervals over documents."
)


def evaluate(
    run_or_checkpoint: Path,
    data: list[Path],
    lengths: list[int],
    attentions: list[AttentionMode],
    output: Path,
    split: str,
    max_documents: int,
    precision: Precision | None,
    command: str,
) -> Results | None:
    """Evaluate a checkpoint on whole documents; documents are spread over ranks, and rank 0 returns the results.

    Raises RequestError when a length or the data does not fit.
    """
    lengths = sorted(set(lengths))
    if not lengths or lengths[0] < 2:
        raise RequestError("--lengths needs lengths of at least 2 tokens, such as 128,1024")
    ranks = join_process_group() if find_ranks(os.environ).world_size > 1 else find_ranks(os.environ)
    device = device_of_rank(ranks.local_rank)
    model = load_decoder(run_or_checkpoint, device, lambda trained: evaluation_dtype(precision or trained))
    _check_learned_positions(model, lengths)
    tokenizer = Tokenizer(model.tokenizer_file)
    documents = load_documents(data, split, tokenizer, lengths[-1], max_documents)
    perplexity, by_position = _score_all(model, documents, lengths, attentions, tokenizer.eod_id, ranks)
    results = None
    if ranks.rank == 0:
        model_section = model.config.model
        results = Results(
            name=f"{model_section.position} {model.checkpoint_folder.name}",
            checkpoint=str(model.checkpoint_folder),
            step=model.step,
            position=model_section.position,
            num_parameters=sum(parameter.numel() for parameter in model.decoder.parameters()),
            training_length=model_section.sequence_length,
            dtype=str(next(model.decoder.parameters()).dtype).removeprefix("torch."),
            block_size=model_section.resolved_block_size,
            dataset=", ".join(map(str, data)),
            protocol_text=PROTOCOL_TEXT.format(num_tokens=lengths[-1]),
            command=command,
            versions=versions(),
            perplexity=tuple(perplexity),
            by_position=tuple(by_position),
            resolution=tuple(_resolution(model, documents, lengths[-1])),
        )
        output.mkdir(parents=True, exist_ok=True)
        results.save(output)
    leave_process_group()
    return results


def versions() -> dict[str, str]:
    """What made the results, for whoever repeats them."""
    packages = {name: version(name) for name in ("torch", "deepspeed", "sentencepiece", "numpy")}
    return {"lex-pretrain": __version__, "python": platform.python_version(), **packages}


def _check_learned_positions(model: LoadedModel, lengths: list[int]) -> None:
    trained = model.config.model.sequence_length
    if model.config.model.position == "learned" and lengths[-1] > trained:
        raise RequestError(
            f"--lengths {lengths[-1]}: learned positions end at the training length {trained} and have no vectors past "
            "it; this scheme cannot extrapolate"
        )


def _score_all(
    model: LoadedModel,
    documents: list[ScoredDocument],
    lengths: list[int],
    attentions: list[AttentionMode],
    eod_id: int,
    ranks: Ranks,
) -> tuple[list[PerplexityRecord], list[PositionRecord]]:
    perplexity, by_position = [], []
    mine = [index for index in range(len(documents)) if index % ranks.world_size == ranks.rank]
    num_tokens = sum(len(documents[index].tokens) for index in mine) * len(lengths) * len(attentions)
    if ranks.rank == 0:
        logger.info("scoring %d documents of %s tokens", len(documents), f"{lengths[-1]:,}")
    with progress("evaluating", max(num_tokens, 1), "tokens", enabled=ranks.rank == 0) as reporter:
        for attention in attentions:
            for length in lengths:
                losses, seconds = _score(model, documents, mine, length, attention, eod_id, reporter)
                gathered = gather_lists([(index, losses[index], seconds) for index in mine], ranks)
                in_order = [loss for _, loss, _ in sorted(gathered, key=lambda item: int(item[0]))]
                slowest = max(seconds for _, _, seconds in gathered)
                device = next(model.decoder.parameters()).device
                memory = max(gather_lists([peak_memory_bytes(device)], ranks))
                perplexity.append(_perplexity_record(documents, in_order, length, attention, slowest, memory))
                if length == lengths[-1]:
                    by_position += _by_position(in_order, length, attention)
    return perplexity, by_position


def _score(
    model: LoadedModel,
    documents: list[ScoredDocument],
    mine: list[int],
    length: int,
    attention: AttentionMode,
    eod_id: int,
    reporter: ProgressReporter,
) -> tuple[dict[int, NDArray[np.float64]], float]:
    losses = {}
    started = time.perf_counter()
    for index in mine:
        losses[index] = score_document(model.decoder, documents[index].tokens, length, attention, eod_id)
        reporter.advance(len(losses[index]), f"{attention} at {length:,}")
    return losses, time.perf_counter() - started


def _perplexity_record(
    documents: list[ScoredDocument],
    losses: list[NDArray[np.float64]],
    length: int,
    attention: AttentionMode,
    seconds: float,
    memory: int,
) -> PerplexityRecord:
    sums = np.array([loss.sum() for loss in losses])
    counts = np.array([len(loss) for loss in losses])
    nll = float(sums.sum() / counts.sum())
    return PerplexityRecord(
        attention=attention,
        length=length,
        protocol="pieces",
        num_tokens=int(counts.sum()),
        num_documents=len(losses),
        nll=nll,
        perplexity=float(np.exp(nll)),
        ci95=confidence_interval(sums, counts, seed=0),
        bits_per_byte=float(sums.sum() / np.log(2) / sum(document.num_bytes for document in documents)),
        tokens_per_second=float(counts.sum() / seconds),
        peak_memory_bytes=memory,
    )


def _by_position(losses: list[NDArray[np.float64]], length: int, attention: AttentionMode) -> list[PositionRecord]:
    """Mean loss by the place in the piece, in bins that double in width."""
    edges = sorted({0, *(length >> shift for shift in range(NUM_POSITION_BINS) if length >> shift)})
    place = np.concatenate([np.arange(len(loss)) % length for loss in losses])
    values = np.concatenate(losses)
    records = []
    for start, stop in itertools.pairwise(edges):
        inside = (place >= start) & (place < stop)
        records.append(
            PositionRecord(
                attention=attention,
                length=length,
                start=start,
                stop=stop,
                num_tokens=int(inside.sum()),
                nll=float(values[inside].mean()),
            )
        )
    return records


def _resolution(model: LoadedModel, documents: list[ScoredDocument], longest: int) -> list[ResolutionRecord]:
    """Expected and measured scores by distance; blockwise attention never looks beyond the training length."""
    trained = model.config.model.sequence_length
    num_distances = min(max(RESOLUTION_FACTORS) * trained, longest)
    device = next(model.decoder.parameters()).device
    measured = [
        measured_scores(model.decoder, torch.from_numpy(document.tokens[:num_distances]).to(device))
        for document in documents[:RESOLUTION_DOCUMENTS]
    ]
    curves: list[tuple[int | None, NDArray[np.float64]]] = list(enumerate(np.mean(measured, axis=0)))
    expected = expected_scores(model.decoder.positions, num_distances)
    if expected is not None:
        curves.append((None, expected))
    factors = [factor for factor in RESOLUTION_FACTORS if factor * trained <= num_distances]
    return [
        _resolution_record(layer, scores, factor * trained, trained, attention, with_curve=factor == factors[-1])
        for layer, scores in curves
        for factor in factors
        for attention in RESOLUTION_ATTENTIONS
    ]


def _resolution_record(
    layer: int | None,
    scores: NDArray[np.float64],
    length: int,
    trained: int,
    attention: Literal["causal", "blockwise"],
    with_curve: bool,
) -> ResolutionRecord:
    stop = length if attention == "causal" else min(length, trained)
    shown = (np.unique(np.geomspace(1, stop, CURVE_POINTS).astype(int)) - 1).tolist() if with_curve else []
    return ResolutionRecord(
        kind="theory" if layer is None else "measured",
        layer=layer,
        length=length,
        attention=attention,
        resolution=resolution(scores[:stop]),
        distances=tuple(shown),
        scores=tuple(float(scores[distance]) for distance in shown),
    )
