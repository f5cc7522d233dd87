"""Perplexity at a length, protocol `pieces`: as in section 4.2 of arXiv 2212.10554.

Each document's first N tokens are cut into pieces of the length, and all tokens are scored. The inputs are the
targets shifted by one, with EOD in front: so a document's first token is predicted from EOD, as in training, and the
first token of a later piece from the one token before it. N is the same for every length, so all lengths score the
very same tokens. A document that ends inside a piece has that piece padded; padding is never scored.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lex_pretrain.config import AttentionMode
from lex_pretrain.model.decoder import Decoder

# Tokens of one forward pass; the longest length alone may be more.
BATCH_TOKENS = 8192
# Positions whose logits exist at the same time.
_LOGIT_POSITIONS = 2048
_PADDING = -100


def score_document(
    decoder: Decoder, document: NDArray[np.int64], length: int, attention: AttentionMode, eod_id: int
) -> NDArray[np.float64]:
    """Negative log likelihood, in nats, of each of the document's tokens in pieces of `length` tokens.

    A batch holds pieces of this document alone, so that the result does not depend on which others are scored.
    """
    device = next(decoder.parameters()).device
    losses = np.empty(len(document))
    starts = range(0, len(document), length)
    per_batch = max(1, BATCH_TOKENS // length)
    for first in range(0, len(starts), per_batch):
        batch = starts[first : first + per_batch]
        inputs, targets = _pieces(document, batch, length, eod_id)
        scored = token_losses(decoder, inputs.to(device), targets.to(device), attention).cpu().numpy()
        for row, start in enumerate(batch):
            part = losses[start : start + length]
            part[:] = scored[row, : len(part)]
    return losses


def token_losses(decoder: Decoder, inputs_BT: Tensor, targets_BT: Tensor, attention: AttentionMode) -> Tensor:
    """Loss [B, T] in float32 of each target after the inputs up to its place; 0 where the target is padding.

    All modes but causal stream: a document of any length needs no more memory than one of `BATCH_TOKENS`.
    """
    chunk_tokens = max(1, BATCH_TOKENS // len(inputs_BT))
    with torch.inference_mode():
        if attention == "causal":
            return _losses(decoder, decoder.hidden_states(inputs_BT, attention), targets_BT)
        hidden_states = decoder.stream_hidden_states(inputs_BT, attention, chunk_tokens)
        chunks = zip(hidden_states, targets_BT.split(chunk_tokens, dim=1), strict=True)
        return torch.cat([_losses(decoder, hidden, targets) for hidden, targets in chunks], dim=1)


def _losses(decoder: Decoder, hidden_BTE: Tensor, targets_BT: Tensor) -> Tensor:
    hidden, targets = hidden_BTE.flatten(0, 1), targets_BT.flatten()
    parts = [
        torch.nn.functional.cross_entropy(
            decoder.logits(hidden[first : first + _LOGIT_POSITIONS]).float(),
            targets[first : first + _LOGIT_POSITIONS],
            ignore_index=_PADDING,
            reduction="none",
        )
        for first in range(0, len(targets), _LOGIT_POSITIONS)
    ]
    return torch.cat(parts).view_as(targets_BT)


def _pieces(document: NDArray[np.int64], starts: Sequence[int], length: int, eod_id: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets [B, length] of pieces; causal attention never sees what is padded behind."""
    inputs = np.full((len(starts), length), eod_id, dtype=np.int64)
    targets = np.full((len(starts), length), _PADDING, dtype=np.int64)
    for row, start in enumerate(starts):
        piece = document[start : start + length]
        targets[row, : len(piece)] = piece
        inputs[row, 0] = document[start - 1] if start else eod_id
        inputs[row, 1 : len(piece)] = piece[:-1]
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def confidence_interval(sums: NDArray[np.float64], counts: NDArray[np.int64], seed: int) -> tuple[float, float]:
    """95 % bootstrap interval of the perplexity, from 2,000 draws of documents with replacement."""
    generator = np.random.default_rng(seed)
    draws = generator.integers(0, len(sums), size=(2000, len(sums)))
    perplexities = np.exp(sums[draws].sum(axis=1) / counts[draws].sum(axis=1))
    low, high = np.percentile(perplexities, [2.5, 97.5])
    return float(low), float(high)


def peak_memory_bytes(device: torch.device) -> int:
    """Largest memory so far: of the GPU's allocator, or of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
