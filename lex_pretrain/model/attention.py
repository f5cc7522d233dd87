"""Attention modes: which keys a query sees. One object is made for a forward pass and serves all its layers.

`causal`     every token before.
`blockwise`  the paper's blockwise causal attention (section 3.2 of arXiv 2212.10554): the own block causally and the
             whole block before it.
`sliding`    the `window_size` latest tokens, its own included.
`sinks`      the first `num_sinks` tokens and the latest ones, `window_size` in all; positions are counted within
             these, as in StreamingLLM (arXiv 2309.17453), so that no distance exceeds the window.

Time and memory of all but `causal` grow linearly, and no query meets a distance that training did not have.

Shapes: B batch, T tokens of this pass, S context and T, H heads, G key-value heads, D head size, N blocks of L tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lex_pretrain.model.attend import CausalAttend, Documents, Sinks
from lex_pretrain.model.cache import LayerCache
from lex_pretrain.model.positions import Positions
from lex_pretrain.model_config import AttentionMode, ModelSection

# Queries [B, T, H, D], keys and values [B, T, G, D], the layer's cache, dropout; returns [B, T, H, D].
Attention = Callable[[Tensor, Tensor, Tensor, LayerCache | None, float], Tensor]


@dataclass(frozen=True)
class Layout:
    """How the queries of a pass are cut: a first stretch, then blocks that each see themselves and the block before.

    `num_context` keys stand before the first query; the last `num_kept` of all stay in the cache.
    """

    num_context: int
    num_first: int
    block_size: int
    num_kept: int
    window: int | None = None

    @staticmethod
    def causal(start: int, num_tokens: int) -> "Layout":
        return Layout(num_context=start, num_first=num_tokens, block_size=num_tokens, num_kept=start + num_tokens)

    @staticmethod
    def blockwise(start: int, num_tokens: int, block_size: int) -> "Layout":
        """The first stretch finishes the block under way; the cache holds less than two blocks."""

        def context(position: int) -> int:
            return position % block_size + (block_size if position >= block_size else 0)

        num_first = min(num_tokens, block_size - start % block_size)
        return Layout(context(start), num_first, block_size, num_kept=context(start + num_tokens))

    @staticmethod
    def sliding(start: int, num_tokens: int, window: int) -> "Layout":
        """A window reaches at most one block back when blocks are as long as it."""
        num_context = min(start, window - 1)
        num_kept = min(start + num_tokens, window - 1)
        return Layout(num_context, min(num_tokens, window), block_size=window, num_kept=num_kept, window=window)


class StreamAttention:
    """Attention over a stream of keys, as a layout cuts it. `documents_BT` numbers the document of each token."""

    def __init__(self, positions: Positions, layout: Layout, documents_BT: Tensor | None = None) -> None:
        self.layout = layout
        self.documents_BT = documents_BT
        self._attend = CausalAttend(positions, layout.window)

    def __call__(
        self, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, cache: LayerCache | None, dropout: float
    ) -> Tensor:
        if cache is not None:
            k_BTGD, v_BTGD = cache.extend(k_BTGD, v_BTGD, self.layout.num_kept)
        return self.over_stream(q_BTHD, k_BTGD, v_BTGD, dropout)

    def over_stream(
        self, q_BTHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, dropout: float, sinks: Sinks | None = None
    ) -> Tensor:
        """Attention over context and this pass; all queries see `sinks` as well."""
        num_first = self.layout.num_first
        num_keys = self.layout.num_context + num_first
        documents = None
        if self.documents_BT is not None:
            documents = Documents(self.documents_BT[:, :num_first], self.documents_BT[:, :num_keys])
        first = self._attend(
            q_BTHD[:, :num_first], k_BSGD[:, :num_keys], v_BSGD[:, :num_keys], dropout, documents, sinks
        )
        if num_first == q_BTHD.shape[1]:
            return first
        stream = num_keys - self.layout.block_size
        later = self._blocks(q_BTHD[:, num_first:], k_BSGD[:, stream:], v_BSGD[:, stream:], dropout, sinks)
        return torch.cat((first, later), dim=1)

    def _blocks(self, q_BTHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, dropout: float, sinks: Sinks | None) -> Tensor:
        """All blocks after the first stretch at once; keys and values begin one block before `q_BTHD`."""
        num_tokens, size = q_BTHD.shape[1], self.layout.block_size
        num_blocks = -(-num_tokens // size)
        # Keys that pad the last block come after every real query, and padded queries are cut off again.
        padding = num_blocks * size - num_tokens
        q, k, v = q_BTHD, k_BSGD, v_BSGD
        if padding:
            q, k, v = (F.pad(x, (0, 0, 0, 0, 0, padding)) for x in (q, k, v))
        q_BNLHD = q.unflatten(1, (num_blocks, size))
        documents = None
        if self.documents_BT is not None:
            stream = F.pad(self.documents_BT[:, -k_BSGD.shape[1] :], (0, padding))
            documents = Documents(stream[:, size:].unflatten(1, (num_blocks, size)), _with_block_before(stream, size))
        if sinks is not None:
            keys, values = (x.unsqueeze(1).expand(-1, num_blocks, -1, -1, -1) for x in (sinks.keys, sinks.values))
            sinks = Sinks(keys, values, sinks.distance)
        k_BNLGD, v_BNLGD = _with_block_before(k, size), _with_block_before(v, size)
        out: Tensor = self._attend(q_BNLHD, k_BNLGD, v_BNLGD, dropout, documents, sinks)
        return out.flatten(1, 2)[:, :num_tokens]


def _with_block_before(stream: Tensor, size: int) -> Tensor:
    """[B, (N + 1) L, ...] as overlapping views [B, N, 2 L, ...]: each block behind the one before it."""
    return stream.unfold(1, 2 * size, size).movedim(-1, 2)


class SinkAttention:
    """Mode `sinks`: queries in the first `window_size` positions see all before; later ones sinks and a window."""

    def __init__(self, positions: Positions, window_size: int, num_sinks: int, start: int, num_tokens: int) -> None:
        self.num_sinks = num_sinks
        self.num_kept = min(start + num_tokens, window_size - 1)
        self.num_early = min(num_tokens, max(0, window_size - start))
        self.distance = window_size - 1
        self._early = StreamAttention(positions, Layout.causal(start, self.num_early))
        window = window_size - num_sinks
        self._num_context = window - 1
        num_late = num_tokens - self.num_early
        self._late = StreamAttention(positions, Layout.sliding(start + self.num_early, num_late, window))

    def __call__(
        self, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, cache: LayerCache | None, dropout: float
    ) -> Tensor:
        if cache is not None:
            k_BTGD, v_BTGD = cache.extend(k_BTGD, v_BTGD, self.num_kept, num_first=self.num_sinks)
        num_late = q_BTHD.shape[1] - self.num_early
        outputs = []
        if self.num_early:
            stop = k_BTGD.shape[1] - num_late
            early = q_BTHD[:, : self.num_early]
            outputs.append(self._early.over_stream(early, k_BTGD[:, :stop], v_BTGD[:, :stop], dropout))
        if num_late:
            sinks = Sinks(k_BTGD[:, : self.num_sinks], v_BTGD[:, : self.num_sinks], self.distance)
            local = slice(-(self._num_context + num_late), None)
            late = q_BTHD[:, self.num_early :]
            outputs.append(self._late.over_stream(late, k_BTGD[:, local], v_BTGD[:, local], dropout, sinks))
        return torch.cat(outputs, dim=1)


class RaggedAttention:
    """Rows that stand at different positions, each with an attention and a cache of its own.

    The first `num_padding` tokens of a row are none; their outputs are zeros.
    """

    def __init__(self, rows: Sequence[tuple[int, Attention]]) -> None:
        self.rows = rows

    def __call__(
        self, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, cache: LayerCache | None, dropout: float
    ) -> Tensor:
        if cache is None:
            raise ValueError("rows with padding need the cache that was made for them")
        out = torch.zeros_like(q_BTHD)
        for row, (num_padding, attention) in enumerate(self.rows):
            if num_padding < q_BTHD.shape[1]:
                real = (slice(row, row + 1), slice(num_padding, None))
                out[real] = attention(q_BTHD[real], k_BTGD[real], v_BTGD[real], cache.rows[row], dropout)
        return out


def make_attention(
    mode: AttentionMode,
    config: ModelSection,
    positions: Positions,
    start: int,
    num_tokens: int,
    documents_BT: Tensor | None = None,
) -> Attention:
    """The attention of one forward pass over positions start .. start + num_tokens - 1.

    With `documents_BT`, which numbers the document of each token, no query sees another document. ValueError where
    the mode has no meaning for several documents.
    """
    match mode:
        case "causal":
            return StreamAttention(positions, Layout.causal(start, num_tokens), documents_BT)
        case "blockwise":
            layout = Layout.blockwise(start, num_tokens, config.resolved_block_size)
            return StreamAttention(positions, layout, documents_BT)
        case "sliding":
            layout = Layout.sliding(start, num_tokens, config.resolved_window_size)
            return StreamAttention(positions, layout, documents_BT)
        case "sinks":
            if documents_BT is not None:
                raise ValueError("sinks are the first tokens of one document; they have no meaning for several")
            return SinkAttention(positions, config.resolved_window_size, config.num_sinks, start, num_tokens)
