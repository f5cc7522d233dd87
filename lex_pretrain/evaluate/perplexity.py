"""Losses of a document's tokens at a length, in pieces of it or of the same targets at every length.

`pieces`, as in section 4.2 of arXiv 2212.10554: each document's first N tokens are cut into pieces of the length, and
all tokens are scored. `fixed-target`: the last quarter of those N is scored at every length, so that nothing but the
context differs between lengths.

The inputs are the targets shifted by one, with EOD in front: so a document's first token is predicted from EOD, as in
training, and the first token of a later piece from the one token before it. N is the same for every length. A
document that ends inside a piece has that piece padded; padding is never scored.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lex_pretrain.evaluate.results import ScoringMode
from lex_pretrain.model.decoder import Decoder
from lex_pretrain.model_config import AttentionMode

# Tokens of one forward pass; with causal attention the longest length alone may be more.
BATCH_TOKENS = 8192
# The strided window, the costly gold standard, moves on by this share of the training length.
STRIDES_PER_WINDOW = 16
# Positions whose logits exist at the same time: as many as stay in a CPU's cache, which makes the loss 4 times as
# fast there as 2,048 do (vocabulary 4,096); as many as fill a GPU.
LOGIT_POSITIONS = {"cpu": 256, "cuda": 2048}
_PADDING = -100


def score_pieces(
    decoder: Decoder, document: NDArray[np.int64], length: int, mode: ScoringMode, eod_id: int
) -> NDArray[np.float64]:
    """Negative log likelihood, in nats, of each of the document's tokens in pieces of `length` tokens.

    A batch holds pieces of this document alone, so that the result does not depend on which others are scored.
    """
    losses = np.empty(len(document))
    starts = range(0, len(document), length)
    per_batch = max(1, BATCH_TOKENS // length)
    for first in range(0, len(starts), per_batch):
        batch = starts[first : first + per_batch]
        scored = _mode_losses(decoder, *_pieces(document, batch, length, eod_id), mode)
        for row, start in enumerate(batch):
            part = losses[start : start + length]
            part[:] = scored[row, : len(part)]
    return losses


def score_fixed_targets(
    decoder: Decoder, document: NDArray[np.int64], length: int, mode: ScoringMode, eod_id: int
) -> NDArray[np.float64]:
    """Negative log likelihood, in nats, of each of the document's last tokens, the same for every length.

    They are read in windows of `length` tokens that move on by half of it, so at least half of it comes before each.
    """
    num_targets, stride, ends = fixed_target_windows(len(document), length)
    per_batch = max(1, BATCH_TOKENS // length)
    parts = []
    for first in range(0, len(ends), per_batch):
        starts = [end - length for end in ends[first : first + per_batch]]
        inputs, targets = _pieces(document, starts, length, eod_id)
        parts.append(_mode_losses(decoder, inputs, targets[:, length - stride :], mode).flatten())
    return np.concatenate(parts)[-num_targets:].astype(np.float64)


def fixed_target_windows(num_tokens: int, length: int) -> tuple[int, int, list[int]]:
    """Targets at the end of a document, targets a window, and the windows' ends; the first window may score more."""
    num_targets = max(1, num_tokens // 4)
    stride = max(1, min(length // 2, num_targets))
    return num_targets, stride, list(range(num_tokens, num_tokens - num_targets, -stride))[::-1]


def token_losses(decoder: Decoder, inputs_BT: Tensor, targets_BS: Tensor, attention: AttentionMode) -> Tensor:
    """Loss [B, S] in float32 of the targets that follow the last S of the inputs; 0 where the target is padding."""
    num_unscored = inputs_BT.shape[1] - targets_BS.shape[1]
    parts = []
    with torch.inference_mode():
        for start, hidden_BTE in hidden_parts(decoder, inputs_BT, attention):
            first, stop = max(start, num_unscored), start + hidden_BTE.shape[1]
            if first < stop:
                targets = targets_BS[:, first - num_unscored : stop - num_unscored]
                parts.append(_cross_entropy(decoder, hidden_BTE[:, first - start :], targets))
    return torch.cat(parts, dim=1)


def hidden_parts(decoder: Decoder, inputs_BT: Tensor, attention: AttentionMode) -> Iterator[tuple[int, Tensor]]:
    """Last hidden states [B, part, E] with each part's start.

    All modes but causal stream: inputs of any length need no more memory than `BATCH_TOKENS` of them.
    """
    if attention == "causal":
        yield 0, decoder.hidden_states(inputs_BT, attention)
        return
    chunk_tokens = max(1, BATCH_TOKENS // len(inputs_BT))
    for number, hidden_BTE in enumerate(decoder.stream_hidden_states(inputs_BT, attention, chunk_tokens)):
        yield number * chunk_tokens, hidden_BTE


def _mode_losses(decoder: Decoder, inputs_BT: Tensor, targets_BS: Tensor, mode: ScoringMode) -> NDArray[np.float32]:
    """Losses [B, S] of the targets that follow the last S of the inputs."""
    device = next(decoder.parameters()).device
    inputs_BT, targets_BS = inputs_BT.to(device), targets_BS.to(device)
    window = decoder.config.sequence_length
    if mode != "strided" and mode != "chunks":
        losses = token_losses(decoder, inputs_BT, targets_BS, mode)
    elif inputs_BT.shape[1] <= window:
        losses = token_losses(decoder, inputs_BT, targets_BS, "causal")
    else:
        stride = max(1, window // STRIDES_PER_WINDOW) if mode == "strided" else window
        rows = zip(inputs_BT, targets_BS, strict=True)
        losses = torch.stack([_window_losses(decoder, *row, window, stride) for row in rows])
    scored: NDArray[np.float32] = losses.cpu().numpy()
    return scored


def _window_losses(decoder: Decoder, inputs_T: Tensor, targets_S: Tensor, window: int, stride: int) -> Tensor:
    """Losses [S], each target seen from a recomputed window of full attention that moves on by `stride` tokens.

    So a target has at least window - stride tokens of context, where the inputs hold as many before it.
    """
    num_tokens, num_targets = len(inputs_T), len(targets_S)
    padded = torch.nn.functional.pad(targets_S, (num_tokens - num_targets, 0), value=_PADDING)
    losses = token_losses(decoder, inputs_T[None, :window], padded[None, :window], "causal")[0]
    num_later = -(-max(0, num_tokens - window) // stride)
    missing = num_later * stride + window - max(num_tokens, window)
    if num_later:
        inputs = torch.nn.functional.pad(inputs_T, (0, missing)).unfold(0, window, stride)[1:]
        targets = torch.nn.functional.pad(padded, (0, missing), value=_PADDING)[window:].view(num_later, stride)
        # Windows before the first target have nothing to score.
        skipped = max(0, (num_tokens - num_targets - window) // stride)
        per_batch = max(1, BATCH_TOKENS // window)
        later = [
            token_losses(decoder, inputs[first : first + per_batch], targets[first : first + per_batch], "causal")
            for first in range(skipped, num_later, per_batch)
        ]
        losses = torch.cat((losses, losses.new_zeros(skipped * stride), torch.cat(later).flatten()))
    return losses[num_tokens - num_targets : num_tokens]


def _cross_entropy(decoder: Decoder, hidden_BSE: Tensor, targets_BS: Tensor) -> Tensor:
    num_positions = LOGIT_POSITIONS[hidden_BSE.device.type]
    hidden, targets = hidden_BSE.flatten(0, 1).split(num_positions), targets_BS.flatten().split(num_positions)
    parts = [
        torch.nn.functional.cross_entropy(
            decoder.logits(hidden_SE).float(), targets_S, ignore_index=_PADDING, reduction="none"
        )
        for hidden_SE, targets_S in zip(hidden, targets, strict=True)
    ]
    return torch.cat(parts).view_as(targets_BS)


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
