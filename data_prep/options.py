"""What a preparation is asked to do; all of it, and nothing else, decides the bytes that come out."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from lex_pretrain.errors import RequestError

MEBIBYTE = 2**20


class PrepareOptions(BaseModel):
    """Settings of one dataset folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vocab_size: int = Field(default=32_000, description="pieces of the tokenizer to train")
    tokenizer: Path | None = Field(default=None, description="SentencePiece model to use instead of training one")
    text_key: str = Field(default="text", description="key of the text in JSON lines and tables; dots reach inside")
    validation_fraction: float = Field(default=0.005, ge=0, lt=1, description="share of documents for validation")
    test_fraction: float = Field(default=0.005, ge=0, lt=1, description="share of documents for testing")
    max_rejected: float = Field(default=0.01, ge=0, le=1, description="largest share of faulty records to go on with")
    tokenizer_sample_bytes: int = Field(default=64 * MEBIBYTE, ge=1, description="text the tokenizer is trained on")
    unit_bytes: int = Field(default=64 * MEBIBYTE, ge=1, description="input that becomes one shard of each split")
    seed: int = Field(default=1, description="seed of the tokenizer's sample")

    def check(self) -> None:
        """Raises RequestError when the splits leave nothing to train on."""
        if self.validation_fraction + self.test_fraction >= 1:
            raise RequestError("--validation-fraction and --test-fraction together leave nothing for training")
