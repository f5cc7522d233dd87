"""`manifest.json`: what a dataset folder holds, where it came from, and the full account of what was read."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from lex_pretrain.errors import RequestError
from lex_pretrain.files import read_json, sha256_of_json, write_json

MANIFEST_FILE = "manifest.json"
FORMAT_VERSION: Literal[2] = 2

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TokenizerRecord(Record):
    """The tokenizer that the ids belong to."""

    fingerprint: str
    vocab_size: int
    eod_id: int


class ShardRecord(Record):
    """One shard: `<stem>.tokens.npy` and `<stem>.documents.npy`, beside the manifest."""

    stem: str
    split: Split
    num_tokens: int
    num_documents: int
    num_source_bytes: int
    tokens_sha256: str
    documents_sha256: str


class Tally(Record):
    """Documents, their bytes of text (UTF-8), and their tokens with EODs; a document that was rejected before it was
    tokenized has none."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            documents=self.documents + other.documents,
            bytes=self.bytes + other.bytes,
            tokens=self.tokens + other.tokens,
        )


class Account(Record):
    """Read = rejected by reason + packed, in documents, bytes and tokens."""

    read: Tally = Tally()
    rejected: dict[str, Tally] = {}
    packed: Tally = Tally()

    def __add__(self, other: "Account") -> "Account":
        reasons = sorted(self.rejected | other.rejected)
        none = Tally()
        return Account(
            read=self.read + other.read,
            rejected={key: self.rejected.get(key, none) + other.rejected.get(key, none) for key in reasons},
            packed=self.packed + other.packed,
        )

    def balances(self) -> bool:
        return self.read == sum(self.rejected.values(), self.packed)


class Skipped(Record):
    """What the inputs hold and a preparation did not read, and why."""

    path: str
    reason: str


class Manifest(Record):
    """The whole of `manifest.json`."""

    format_version: Literal[2] = FORMAT_VERSION
    package_version: str
    tokenizer: TokenizerRecord
    dtype: Literal["uint16", "uint32"]
    shards: tuple[ShardRecord, ...]
    account: Account
    config: dict[str, Any]
    sources: tuple[str, ...]
    skipped: tuple[Skipped, ...] = ()

    @property
    def fingerprint(self) -> str:
        """Changes whenever a token of the dataset would."""
        return sha256_of_json([shard.model_dump() for shard in self.shards] + [self.tokenizer.fingerprint])

    def save(self, folder: Path) -> None:
        write_json(folder / MANIFEST_FILE, self.model_dump(mode="json"))

    @staticmethod
    def load(folder: Path) -> "Manifest":
        """Raises RequestError when the folder is not a finished dataset of this format."""
        file = folder / MANIFEST_FILE
        if not file.is_file():
            raise RequestError(
                f"{folder} is not a prepared dataset: it has no {MANIFEST_FILE}. "
                "Make it with `lex-pretrain prepare INPUT... --output DIR`, or run that again if it was stopped"
            )
        value = read_json(file)
        version = value.get("format_version") if isinstance(value, dict) else None
        if version != FORMAT_VERSION:
            raise RequestError(f"{file} has format version {version}; this program reads {FORMAT_VERSION}")
        try:
            return Manifest.model_validate(value)
        except ValidationError as error:
            raise RequestError(f"{file} is damaged: {error}") from error
