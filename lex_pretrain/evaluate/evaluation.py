"""One evaluation: perplexity by length under every attention, retrieval, attention resolution, and `results.json`."""

import dataclasses
import itertools
import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from lex_pretrain import __version__
from lex_pretrain.config import Precision
from lex_pretrain.errors import RequestError
from lex_pretrain.evaluate.documents import ReadTexts, ScoredDocument, documents_sha256, load_documents
from lex_pretrain.evaluate.intervals import perplexity_interval
from lex_pretrain.evaluate.resolution import measure_resolution
from lex_pretrain.evaluate.results import (
    PerplexityRecord,
    PositionRecord,
    Protocol,
    Results,
    RetrievalRecord,
    ScoringMode,
)
from lex_pretrain.evaluate.retrieval import measure_retrieval
from lex_pretrain.evaluate.scoring import DocumentScore, Task, bin_edges, score_all
from lex_pretrain.files import sha256_of_json
from lex_pretrain.hardware import device_of_rank, evaluation_dtype
from lex_pretrain.held_folder import held_folder
from lex_pretrain.loading import LoadedModel, load_decoder
from lex_pretrain.model.positions import RopeScaling, make_positions
from lex_pretrain.model_config import AttentionMode
from lex_pretrain.ranks import Ranks, find_ranks, join_process_group, leave_process_group
from lex_pretrain.run_folder import CHECKPOINTS_FOLDER, WEIGHTS_FILE
from lex_pretrain.tokenizer import Tokenizer

# Attention modes of the model itself; all other scoring modes are windows of full attention.
ATTENTION_MODES: tuple[AttentionMode, ...] = get_args(AttentionMode)

PROTOCOL_TEXT = (
    "Protocol `pieces`: the first {num_tokens:,} tokens of each document are cut into pieces of the length, and every "
    "token is scored, the first of a piece from the one token before it, and a document's first from the "
    "end-of-document piece. All lengths score the same tokens. Protocol `fixed-target`: the last quarter of those "
    "tokens is scored at every length, in windows of the length that move on by half of it, so each token has at least "
    "half the length before it; nothing but the context differs between lengths. Intervals are 95 % bootstrap "
    "intervals over documents."
)


@dataclass(frozen=True)
class EvaluationRequest:
    """What to evaluate, on what, and how; `precision` None is that of the training.

    `rope_scaling` stretches RoPE to the longest length; the model itself stays as it was trained.
    """

    run_or_checkpoint: Path
    data: Sequence[str]
    lengths: Sequence[int]
    attentions: Sequence[ScoringMode]
    output: Path
    command: str
    split: str = "test"
    max_documents: int = 64
    retrieval_trials: int = 4
    precision: Precision | None = None
    rope_scaling: RopeScaling | None = None


def evaluate(request: EvaluationRequest, read_texts: ReadTexts) -> Results | None:
    """Evaluate a checkpoint on whole documents; the work is spread over ranks, and rank 0 returns the results.

    `read_texts` gives the texts of data that is no dataset folder. What a killed evaluation finished is not done
    again. Raises RequestError when a length or the data does not fit.
    """
    lengths = sorted(set(request.lengths))
    if not lengths or lengths[0] < 2:
        raise RequestError("--lengths needs lengths of at least 2 tokens, such as 128,1024")
    ranks = join_process_group() if find_ranks(os.environ).world_size > 1 else find_ranks(os.environ)
    model = load_decoder(
        request.run_or_checkpoint,
        device_of_rank(ranks.local_rank),
        lambda trained: evaluation_dtype(request.precision or trained),
    )
    if request.rope_scaling is not None:
        model = _stretch_rope(model, request.rope_scaling, lengths[-1])
    attentions = list(dict.fromkeys(request.attentions))
    _check_learned_positions(model, lengths, attentions)
    tokenizer = Tokenizer(model.tokenizer_file)
    documents = load_documents(request.data, request.split, tokenizer, lengths[-1], request.max_documents, read_texts)
    with held_folder(request.output, ranks, "evaluation", "--output"):
        results = _measure(request, model, lengths, attentions, tokenizer, documents, ranks)
    leave_process_group()
    return results


def _measure(
    request: EvaluationRequest,
    model: LoadedModel,
    lengths: Sequence[int],
    attentions: Sequence[ScoringMode],
    tokenizer: Tokenizer,
    documents: Sequence[ScoredDocument],
    ranks: Ranks,
) -> Results | None:
    """`evaluate` in an output folder that no other evaluation writes to."""
    unfinished = _unfinished_folder(request.output, model, documents)
    tasks = [
        Task(protocol, attention, length)
        for attention, protocol, length in itertools.product(attentions, get_args(Protocol), lengths)
    ]
    scores = score_all(model.decoder, documents, tasks, tokenizer.eod_id, ranks, unfinished)
    retrieval = measure_retrieval(
        model.decoder,
        documents,
        lengths,
        [mode for mode in ATTENTION_MODES if mode in attentions],
        request.retrieval_trials,
        tokenizer,
        ranks,
    )
    if ranks.rank != 0:
        return None
    results = _assemble(request, model, documents, scores, retrieval)
    results.save(request.output)
    shutil.rmtree(unfinished)
    return results


def versions() -> dict[str, str]:
    """What made the results, for whoever repeats them."""
    packages = {name: version(name) for name in ("torch", "deepspeed", "sentencepiece", "numpy")}
    return {"lex-pretrain": __version__, "python": platform.python_version(), **packages}


def _unfinished_folder(output: Path, model: LoadedModel, documents: Sequence[ScoredDocument]) -> Path:
    """Where scores are kept until all are there; its name is that of all that they depend on."""
    weights = (model.checkpoint_folder / WEIGHTS_FILE).stat()
    parameter = next(model.decoder.parameters())
    fingerprint = sha256_of_json(
        {
            "config": model.config.model.model_dump(mode="json"),
            "weights": [weights.st_size, weights.st_mtime_ns],
            "number format": [str(parameter.dtype), parameter.device.type],
            "documents": documents_sha256(documents),
            "versions": versions(),
            "schema": DocumentScore.model_json_schema(),
        }
    )
    folder = output / f"unfinished-{fingerprint[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _stretch_rope(model: LoadedModel, scaling: RopeScaling, longest: int) -> LoadedModel:
    """The model with RoPE fit to `longest` tokens; no parameter changes."""
    section = model.config.model
    if section.position != "rope":
        raise RequestError(
            f"--rope-scaling {scaling} needs a model with position rope, and this one has {section.position}"
        )
    factor = max(1.0, longest / section.sequence_length)
    section = section.model_copy(update={"rope_scaling": scaling, "rope_scaling_factor": factor})
    model.decoder.positions = make_positions(section)
    return dataclasses.replace(model, config=model.config.model_copy(update={"model": section}))


def _check_learned_positions(model: LoadedModel, lengths: Sequence[int], attentions: Sequence[ScoringMode]) -> None:
    trained = model.config.model.sequence_length
    if model.config.model.position != "learned" or lengths[-1] <= trained:
        return
    if wrong := [mode for mode in attentions if mode in ATTENTION_MODES]:
        raise RequestError(
            f"--lengths {lengths[-1]}: learned positions end at the training length {trained} and have no vectors past "
            f"it; this scheme cannot extrapolate with --attention {','.join(wrong)}"
        )


def _assemble(
    request: EvaluationRequest,
    model: LoadedModel,
    documents: Sequence[ScoredDocument],
    scores: dict[Task, list[DocumentScore]],
    retrieval: Sequence[RetrievalRecord],
) -> Results:
    section = model.config.model
    parameter = next(model.decoder.parameters())
    folder = model.checkpoint_folder
    longest = len(documents[0].tokens)
    return Results(
        name=folder.parent.parent.name if folder.parent.name == CHECKPOINTS_FOLDER else folder.name,
        checkpoint=str(folder),
        step=model.step,
        position=section.position if section.rope_scaling == "none" else f"{section.position}+{section.rope_scaling}",
        num_parameters=sum(parameter.numel() for parameter in model.decoder.parameters()),
        num_layers=section.num_layers,
        training_length=section.sequence_length,
        block_size=section.resolved_block_size,
        dtype=str(parameter.dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name(parameter.device) if parameter.device.type == "cuda" else "CPU",
        dataset=", ".join(request.data),
        documents_sha256=documents_sha256(documents),
        protocol_text=PROTOCOL_TEXT.format(num_tokens=longest),
        command=request.command,
        versions=versions(),
        perplexity=tuple(_perplexity_record(documents, task, found) for task, found in scores.items()),
        by_position=tuple(
            itertools.chain.from_iterable(
                _by_position(task, found)
                for task, found in scores.items()
                if task.protocol == "pieces" and task.length == longest
            )
        ),
        resolution=tuple(measure_resolution(model.decoder, [document.tokens for document in documents])),
        retrieval=tuple(retrieval),
    )


def _perplexity_record(
    documents: Sequence[ScoredDocument], task: Task, scores: Sequence[DocumentScore]
) -> PerplexityRecord:
    sums = np.array([score.nll_sum for score in scores])
    counts = np.array([score.num_tokens for score in scores])
    nll = float(sums.sum() / counts.sum())
    # The fixed targets are no whole texts, so they have no size in bytes.
    whole = task.protocol == "pieces"
    bits = float(sums.sum() / np.log(2))
    return PerplexityRecord(
        attention=task.attention,
        length=task.length,
        protocol=task.protocol,
        num_tokens=int(counts.sum()),
        num_documents=len(scores),
        nll=nll,
        perplexity=float(np.exp(nll)),
        ci95=perplexity_interval(sums, counts),
        bits_per_byte=bits / sum(document.num_bytes for document in documents) if whole else None,
        bits_per_character=bits / sum(document.num_characters for document in documents) if whole else None,
        tokens_per_second=float(counts.sum() / sum(score.seconds for score in scores)),
        peak_memory_bytes=max(score.peak_memory_bytes for score in scores),
        document_nll=tuple((sums / counts).tolist()),
    )


def _by_position(task: Task, scores: Sequence[DocumentScore]) -> list[PositionRecord]:
    """Mean loss by the place in the longest piece, which is the whole document."""
    sums = np.array([score.bins for score in scores]).sum(axis=0)
    return [
        PositionRecord(
            attention=task.attention,
            length=task.length,
            start=start,
            stop=stop,
            num_tokens=(stop - start) * len(scores),
            nll=float(total / ((stop - start) * len(scores))),
        )
        for (start, stop), total in zip(itertools.pairwise(bin_edges(task.length)), sums, strict=True)
    ]
