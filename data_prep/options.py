"""What a preparation is asked to do; all of it, and nothing else, decides the bytes that come out."""

import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from data_prep.train_tokenizer import DEFAULT_CHARACTER_COVERAGE

MEBIBYTE = 2**20


class PrepareOptions(BaseModel):
    """Settings of one dataset folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vocab_size: int = Field(default=32_000, description="pieces of the tokenizer to train")
    tokenizer: Path | None = Field(default=None, description="SentencePiece model to use instead of training one")
    tokenizer_sample_bytes: int = Field(default=64 * MEBIBYTE, ge=1, description="text the tokenizer is trained on")
    character_coverage: float = Field(
        default=DEFAULT_CHARACTER_COVERAGE,
        ge=0.98,
        le=1,
        description="share of the sample's characters that become pieces",
    )
    allow_lossy_tokenizer: bool = Field(default=False, description="go on with a tokenizer that loses text")
    text_key: str = Field(default="text", description="key of the text in JSON lines and tables; dots reach inside")
    separator: str | None = Field(default=None, description="line that separates the documents of a text file")
    min_document_bytes: int = Field(default=0, ge=0, description="shorter documents are rejected")
    max_document_bytes: int = Field(default=256 * MEBIBYTE, ge=1, description="longer documents are rejected")
    reject_pattern: str | None = Field(default=None, description="documents that this regular expression finds go")
    keep_duplicates: bool = Field(default=False, description="keep documents of exactly the same text")
    near_duplicate_similarity: float | None = Field(
        default=None, gt=0, le=1, description="share of common 5-word runs from which the later document goes"
    )
    decontaminate: tuple[str, ...] = Field(default=(), description="evaluation files that no document may quote from")
    decontaminate_words: int = Field(default=13, ge=1, description="words in a row that count as a quotation")
    validation_fraction: float = Field(default=0.005, ge=0, lt=1, description="share of documents for validation")
    test_fraction: float = Field(default=0.005, ge=0, lt=1, description="share of documents for testing")
    max_rejected: float = Field(default=0.01, ge=0, le=1, description="largest share of faulty records to go on with")
    skip_bad_files: bool = Field(default=False, description="leave out what cannot be read of a file, and go on")
    unit_bytes: int = Field(default=64 * MEBIBYTE, ge=1, description="input that becomes one shard of each split")
    seed: int = Field(default=1, description="seed of the tokenizer's sample")

    @field_validator("reject_pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
        return pattern

    @model_validator(mode="after")
    def _something_is_left(self) -> "PrepareOptions":
        if self.validation_fraction + self.test_fraction >= 1:
            raise ValueError("--validation-fraction and --test-fraction together leave nothing for training")
        return self

    def identity(self) -> dict[str, Any]:
        """The settings that decide the bytes. What only decides whether to go on may change between two attempts, and
        a tokenizer is known by its content, not by where it lies."""
        excluded = {"max_rejected", "skip_bad_files", "allow_lossy_tokenizer", "tokenizer"}
        if self.tokenizer is not None:
            excluded |= {"vocab_size", "tokenizer_sample_bytes", "character_coverage", "seed"}
        return self.model_dump(mode="json", exclude=excluded)
