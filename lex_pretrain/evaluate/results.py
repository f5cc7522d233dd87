"""`results.json`: what an evaluation found. Tables, plots and reports are made from it and from nothing else."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from lex_pretrain.errors import RequestError
from lex_pretrain.files import read_json, write_json
from lex_pretrain.model_config import AttentionMode

RESULTS_FILE = "results.json"
FORMAT_VERSION: Literal[1] = 1

Protocol = Literal["pieces", "fixed-target"]
# Full attention over windows as long as the training: recomputed at every small stride, or one after the other.
WindowMode = Literal["strided", "chunks"]
ScoringMode = AttentionMode | WindowMode
RetrievalTask = Literal["pass-key", "copy"]


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PerplexityRecord(Record):
    """One length under one attention; `nll` in nats a token, `ci95` of the perplexity, over documents.

    `tokens_per_second` is the scoring rate of one process, `peak_memory_bytes` the most that one process held.
    """

    attention: ScoringMode
    length: int
    protocol: Protocol
    num_tokens: int
    num_documents: int
    nll: float
    perplexity: float
    ci95: tuple[float, float]
    bits_per_byte: float | None
    bits_per_character: float | None
    tokens_per_second: float
    peak_memory_bytes: int
    document_nll: tuple[float, ...]


class PositionRecord(Record):
    """Mean loss of the targets whose place in a piece of `length` tokens is in [start, stop)."""

    attention: ScoringMode
    length: int
    start: int
    stop: int
    num_tokens: int
    nll: float


class ResolutionRecord(Record):
    """Attention scores by distance, and the resolution R that follows from them.

    `kind` theory is the scheme's expected score; measured is a layer's mean score before the softmax.
    """

    kind: Literal["theory", "measured"]
    layer: int | None
    length: int
    attention: Literal["causal", "blockwise"]
    resolution: float
    distances: tuple[int, ...]
    scores: tuple[float, ...]


class RetrievalRecord(Record):
    """Answers to be found again in a context of `length` tokens, at `depth` of it (0 is its start, 1 its end).

    `accuracy` is the share of the answers' tokens that were the likeliest; `exact` the share of whole answers.
    """

    task: RetrievalTask
    attention: AttentionMode
    length: int
    depth: float
    num_trials: int
    accuracy: float
    exact: float
    nll: float


class Results(Record):
    """The whole of `results.json`; `documents_sha256` is equal where the very same tokens were scored."""

    format_version: Literal[1] = FORMAT_VERSION
    name: str
    checkpoint: str
    step: int
    position: str
    num_parameters: int
    num_layers: int
    training_length: int
    block_size: int
    dtype: str
    device: str
    dataset: str
    documents_sha256: str
    protocol_text: str
    command: str
    versions: dict[str, str]
    perplexity: tuple[PerplexityRecord, ...]
    by_position: tuple[PositionRecord, ...] = ()
    resolution: tuple[ResolutionRecord, ...] = ()
    retrieval: tuple[RetrievalRecord, ...] = ()

    def save(self, folder: Path) -> None:
        write_json(folder / RESULTS_FILE, self.model_dump(mode="json"))

    @staticmethod
    def load(folder: Path) -> "Results":
        """Raises RequestError when the folder holds no results of this format."""
        file = folder / RESULTS_FILE
        try:
            return Results.model_validate(read_json(file))
        except ValidationError as error:
            raise RequestError(f"{file} is not a result of this version: {error}") from error

    @property
    def attentions(self) -> list[ScoringMode]:
        """Those that were evaluated, in the order of the evaluation."""
        return list(dict.fromkeys(record.attention for record in self.perplexity))

    def curve(self, attention: ScoringMode, protocol: Protocol = "pieces") -> list[PerplexityRecord]:
        """Records of one attention by rising length."""
        found = [r for r in self.perplexity if (r.attention, r.protocol) == (attention, protocol)]
        return sorted(found, key=lambda record: record.length)

    def find(self, attention: ScoringMode, length: int, protocol: Protocol = "pieces") -> PerplexityRecord | None:
        return next((r for r in self.curve(attention, protocol) if r.length == length), None)


def distinct_labels(all_results: Sequence[Results]) -> list[str]:
    """A short name for each: its position scheme where that tells all apart, else its run, else its checkpoint."""
    for labels in (
        [results.position for results in all_results],
        [results.name for results in all_results],
    ):
        if len(set(labels)) == len(labels):
            return labels
    return [results.checkpoint for results in all_results]
