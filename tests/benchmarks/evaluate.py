"""Scoring: against the model's bare forward pass, against the strided window, and on two processes."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed
import torch.multiprocessing

from lex_pretrain.evaluate.documents import ScoredDocument
from lex_pretrain.evaluate.perplexity import BATCH_TOKENS, LOGIT_POSITIONS, score_pieces
from lex_pretrain.evaluate.scoring import Task, score_all
from lex_pretrain.model.decoder import Decoder
from lex_pretrain.model_config import ModelSection
from lex_pretrain.ranks import Ranks
from tests.benchmarks.timing import median_seconds

LENGTH = 65_536
STRIDED_LENGTH = 4096
TRAINING_LENGTH = 256
VOCAB_SIZE = 4096
EOD = 1


def make_decoder() -> Decoder:
    torch.manual_seed(0)
    config = ModelSection(
        num_layers=4, hidden_size=256, num_heads=4, sequence_length=TRAINING_LENGTH, vocab_size=VOCAB_SIZE
    )
    return Decoder(config).eval().requires_grad_(False)


def make_documents(num_documents: int, num_tokens: int) -> list[ScoredDocument]:
    generator = np.random.default_rng(0)
    return [ScoredDocument(generator.integers(2, VOCAB_SIZE, num_tokens), 1, 1) for _ in range(num_documents)]


def score(decoder: Decoder, documents: list[ScoredDocument], length: int, ranks: Ranks) -> None:
    """All of an evaluation's scoring: progress, the file that a restart reads, memory, bins."""
    with tempfile.TemporaryDirectory() as folder:
        score_all(decoder, documents, [Task("pieces", "blockwise", length)], EOD, ranks, Path(folder))


def forward(decoder: Decoder, tokens_BT: torch.Tensor) -> None:
    """Nothing but the logits of all tokens."""
    with torch.inference_mode():
        for hidden_BTE in decoder.stream_hidden_states(tokens_BT, "blockwise", BATCH_TOKENS):
            for part in hidden_BTE.split(LOGIT_POSITIONS["cpu"], dim=1):
                decoder.logits(part)


def run() -> list[str]:
    """Lines of the result, each a ratio of median times."""
    decoder = make_decoder()
    long, short = make_documents(1, LENGTH), make_documents(1, STRIDED_LENGTH)
    tokens_BT = torch.from_numpy(long[0].tokens)[None]

    def pieces(mode: str) -> Callable[[], object]:
        return lambda: score_pieces(decoder, short[0].tokens, STRIDED_LENGTH, mode, EOD)  # type: ignore[arg-type]

    seconds = median_seconds(
        {
            "forward": lambda: forward(decoder, tokens_BT),
            "score": lambda: score(decoder, long, LENGTH, Ranks(0, 1, 0, 1)),
            "blockwise": pieces("blockwise"),
            "strided": pieces("strided"),
        },
        num_rounds=3,
    )
    alone, together = seconds_of_processes(1), seconds_of_processes(2)
    return [
        f"scoring at {LENGTH:,} with blockwise: {seconds['forward'] / seconds['score']:.0%} of the bare forward rate",
        f"blockwise at {STRIDED_LENGTH:,}: {seconds['strided'] / seconds['blockwise']:.1f} times as fast as strided",
        f"two processes of one thread: {alone / together:.2f} times as fast as one",
    ]


def seconds_of_processes(num_processes: int) -> float:
    """Time that processes of one thread take for the same documents."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_work, (num_processes, folder), nprocs=num_processes)
        return float((Path(folder) / "seconds").read_text())


def _work(rank: int, num_processes: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_processes
    )
    decoder, ranks = make_decoder(), Ranks(rank, num_processes, rank, num_processes)
    score(decoder, make_documents(num_processes, BATCH_TOKENS), BATCH_TOKENS, ranks)
    torch.distributed.barrier()
    started = time.perf_counter()
    score(decoder, make_documents(16, BATCH_TOKENS), BATCH_TOKENS, ranks)
    torch.distributed.barrier()
    if rank == 0:
        (Path(folder) / "seconds").write_text(str(time.perf_counter() - started))
    torch.distributed.destroy_process_group()
