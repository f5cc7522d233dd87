"""Proof of a dataset: checksums, counts, the account, id ranges, and an EOD at every document's end."""

from pathlib import Path

import numpy as np

from data_prep.compare import compare_with_sources
from lex_pretrain.data.manifest import MANIFEST_FILE, SPLITS, Manifest, ShardRecord
from lex_pretrain.data.shards import TOKENIZER_FILE, documents_file, token_dtype, tokens_file
from lex_pretrain.errors import RequestError
from lex_pretrain.files import sha256_of_file
from lex_pretrain.progress import progress
from lex_pretrain.tokenizer import Tokenizer


def verify(folder: Path, full: bool) -> list[str]:
    """Every fault found, each naming its file; none where the dataset is as its manifest says.

    `full` also decodes documents and compares them with their sources.
    """
    try:
        manifest, tokenizer = Manifest.load(folder), Tokenizer(folder / TOKENIZER_FILE)
    except RequestError as error:
        if not (folder / MANIFEST_FILE).exists():
            raise
        # What cannot be read of a dataset is wrong with it.
        return [str(error)]
    faults = []
    account = manifest.account
    if not account.balances():
        faults.append("manifest.json: documents, bytes or tokens read are not those rejected plus those packed")
    if account.packed.documents != sum(shard.num_documents for shard in manifest.shards):
        faults.append("manifest.json: documents packed are not those of the shards")
    if account.packed.tokens != sum(shard.num_tokens for shard in manifest.shards):
        faults.append("manifest.json: tokens packed are not those of the shards")
    if account.packed.bytes != sum(shard.num_source_bytes for shard in manifest.shards):
        faults.append("manifest.json: bytes packed are not those of the shards")
    stems = [(SPLITS.index(shard.split), shard.stem) for shard in manifest.shards]
    if stems != sorted(set(stems)):
        faults.append("manifest.json: its shards are not in their order, or one stands twice")
    faults += _verify_tokenizer(tokenizer, manifest)
    with progress("verifying", max(account.packed.tokens, 1), "tokens") as reporter:
        for shard in manifest.shards:
            faults += [f"{shard.stem}: {fault}" for fault in _verify_shard(folder, shard, manifest)]
            reporter.advance(shard.num_tokens)
    if full and not faults:
        faults += compare_with_sources(folder, manifest)
    return faults


def _verify_tokenizer(tokenizer: Tokenizer, manifest: Manifest) -> list[str]:
    recorded = manifest.tokenizer
    faults = []
    if tokenizer.fingerprint != recorded.fingerprint:
        faults.append(f"{TOKENIZER_FILE}: not the tokenizer that the shards were made with")
    if tokenizer.vocab_size != recorded.vocab_size:
        faults.append(f"manifest.json: vocab_size {recorded.vocab_size}, {TOKENIZER_FILE} has {tokenizer.vocab_size}")
    if tokenizer.eod_id != recorded.eod_id:
        faults.append(f"manifest.json: eod_id {recorded.eod_id}, {TOKENIZER_FILE} has {tokenizer.eod_id}")
    if np.dtype(manifest.dtype) != token_dtype(tokenizer.vocab_size):
        faults.append(f"manifest.json: dtype {manifest.dtype} is not that of {tokenizer.vocab_size} pieces")
    return faults


def _verify_shard(folder: Path, shard: ShardRecord, manifest: Manifest) -> list[str]:
    files = {
        tokens_file(folder, shard.stem): shard.tokens_sha256,
        documents_file(folder, shard.stem): shard.documents_sha256,
    }
    for file, checksum in files.items():
        if not file.is_file():
            return [f"{file.name} is missing"]
        if sha256_of_file(file) != checksum:
            return [f"{file.name} has changed (SHA-256 differs)"]
    tokens, starts = (np.load(file, mmap_mode="r", allow_pickle=False) for file in files)
    faults = []
    if str(tokens.dtype) != manifest.dtype:
        faults.append(f"tokens are {tokens.dtype}, not {manifest.dtype}")
    if (len(tokens), len(starts)) != (shard.num_tokens, shard.num_documents):
        faults.append(f"holds {len(tokens)} tokens and {len(starts)} documents, not as the manifest says")
        return faults
    if len(tokens) and int(tokens.max()) >= manifest.tokenizer.vocab_size:
        faults.append(f"id {int(tokens.max())} is outside the vocabulary of {manifest.tokenizer.vocab_size}")
    ends = np.append(starts[1:], shard.num_tokens)
    if not len(starts) or starts[0] != 0 or (ends <= starts).any():
        faults.append("documents do not follow each other from the start of the shard")
    elif (tokens[ends - 1] != manifest.tokenizer.eod_id).any():
        faults.append("a document does not end with the end-of-document id")
    elif int((tokens == manifest.tokenizer.eod_id).sum()) != shard.num_documents:
        faults.append("an end-of-document id stands inside a document")
    return faults
