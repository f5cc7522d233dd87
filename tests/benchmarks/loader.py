"""How fast shuffled training batches come out of a dataset, on one core."""

import tempfile
from pathlib import Path

import numpy as np

from lex_pretrain.data.loader import Loader
from lex_pretrain.data.manifest import Account, Manifest, TokenizerRecord
from lex_pretrain.data.shards import TokenDataset, write_shard
from tests.benchmarks.timing import median_seconds

SHARD_TOKENS = 16_000_000
SEQUENCE_LENGTH = 1024
BATCH_SIZE = 512


def run() -> list[str]:
    """Lines of the result: tokens a second, shuffled, from files that are in memory."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        generator = np.random.default_rng(0)
        shards = [
            write_shard(
                folder,
                f"shard-{number:05d}",
                "train",
                generator.integers(0, 32_000, SHARD_TOKENS).astype(np.uint16),
                np.array([0], dtype=np.int64),
                0,
            )
            for number in range(2)
        ]
        manifest = Manifest(
            package_version="0",
            tokenizer=TokenizerRecord(fingerprint="none", vocab_size=32_000, eod_id=1),
            dtype="uint16",
            shards=tuple(shards),
            account=Account(),
            config={},
            sources=(),
        )
        loader = Loader([TokenDataset(folder, "train", manifest)], [1.0], SEQUENCE_LENGTH, seed=1)
        samples = np.arange(BATCH_SIZE)
        seconds = median_seconds({"load": lambda: loader.windows(samples)})
        rate = BATCH_SIZE * SEQUENCE_LENGTH / seconds["load"]
        return [f"loader: {rate / 1e6:,.0f} M tokens/s in batches of {BATCH_SIZE} x {SEQUENCE_LENGTH}"]
