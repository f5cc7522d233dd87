"""`results.json`: what an evaluation found. Tables, plots and reports are made from it and from nothing else."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from lex_pretrain.config import AttentionMode
from lex_pretrain.errors import RequestError
from lex_pretrain.files import read_json, write_json

RESULTS_FILE = "results.json"
FORMAT_VERSION: Literal[1] = 1

Protocol = Literal["pieces", "fixed-target"]


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PerplexityRecord(Record):
    """One length under one attention; `nll` in nats a token, `ci95` of the perplexity, over documents."""

    attention: AttentionMode
    length: int
    protocol: Protocol
    num_tokens: int
    num_documents: int
    nll: float
    perplexity: float
    ci95: tuple[float, float]
    bits_per_byte: float
    tokens_per_second: float
    peak_memory_bytes: int


class PositionRecord(Record):
    """Mean loss of the targets whose place in a piece of `length` tokens is in [start, stop)."""

    attention: AttentionMode
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
    attention: AttentionMode
    resolution: float
    distances: tuple[int, ...]
    scores: tuple[float, ...]


class Results(Record):
    """The whole of `results.json`."""

    format_version: Literal[1] = FORMAT_VERSION
    name: str
    checkpoint: str
    step: int
    position: str
    num_parameters: int
    training_length: int
    block_size: int
    dtype: str
    dataset: str
    protocol_text: str
    command: str
    versions: dict[str, str]
    perplexity: tuple[PerplexityRecord, ...]
    by_position: tuple[PositionRecord, ...] = ()
    resolution: tuple[ResolutionRecord, ...] = ()
    retrieval: tuple[dict[str, Any], ...] = ()

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

    def find(self, attention: AttentionMode, length: int) -> PerplexityRecord | None:
        for record in self.perplexity:
            if (record.attention, record.length) == (attention, length):
                return record
        return None
