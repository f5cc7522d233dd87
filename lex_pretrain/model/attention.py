"""Attention modes. One object is made for a forward pass and serves all its layers, so tables are built once.

`causal`     every token before. Cut into runs of queries where the scheme allows only a limited span (xPos scales
             would overflow, an ALiBi bias would be a matrix of the whole length squared).
`blockwise`  the paper's blockwise causal attention (section 3.2 of arXiv 2212.10554): the own block causally and the
             whole block before it, positions counted from the own block's start. Time and memory grow linearly.

Shapes: B batch, T tokens (S with context), H heads, D head size, N blocks, L block size.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from lex_pretrain.config import AttentionMode, ModelSection
from lex_pretrain.model.cache import LayerCache
from lex_pretrain.model.positions import Positions, rotate

Attention = Callable[[Tensor, Tensor, Tensor, "LayerCache | None", float], Tensor]


def score_dtype(x: Tensor) -> torch.dtype:
    """Precision of the scores. On the CPU float32: its bf16 kernel takes 2.5 times as long at training lengths."""
    return torch.float32 if x.device.type == "cpu" else x.dtype


def causal_attention(
    q_BTHD: Tensor,
    k_BSHD: Tensor,
    v_BSHD: Tensor,
    mask: Tensor | None,
    dropout: float,
) -> Tensor:
    """Scaled dot-product attention in which the last query stands at the last key; returns [B, T, H, D].

    Works in the dtype of queries and keys and returns that of the values.

    `mask` [T, S] or [H, T, S] from `lower_right_mask`; None where there are as many queries as keys.
    """
    out_BHTD = F.scaled_dot_product_attention(
        q_BTHD.transpose(1, 2),
        k_BSHD.transpose(1, 2),
        v_BSHD.to(k_BSHD.dtype).transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        dropout_p=dropout,
        enable_gqa=q_BTHD.shape[2] != k_BSHD.shape[2],
    )
    return out_BHTD.transpose(1, 2).to(v_BSHD.dtype)


def lower_right_mask(positions: Positions, num_queries: int, num_keys: int, like: Tensor) -> Tensor | None:
    """What `causal_attention` needs to know about order and scheme: None, a bool mask, or a bias with -inf."""
    bias = positions.bias(num_queries, num_keys, like.device)
    if bias is None and num_queries == num_keys:
        return None
    allowed = torch.ones(num_queries, num_keys, dtype=torch.bool, device=like.device)
    allowed = allowed.tril(num_keys - num_queries)
    if bias is None:
        return allowed
    return bias.masked_fill(~allowed, float("-inf")).to(like.dtype)


class CausalAttention:
    """Full causal attention of queries at start .. start + num_tokens - 1 over all keys from 0 on."""

    def __init__(self, positions: Positions, start: int, num_tokens: int) -> None:
        self.positions = positions
        self.start = start
        self.stop = start + num_tokens
        self._tables = functools.lru_cache(maxsize=None)(self._make_tables)

    def __call__(
        self, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, cache: LayerCache | None, dropout: float
    ) -> Tensor:
        k_BSHD, v_BSHD = (k_BTHD, v_BTHD) if cache is None else cache.extend(k_BTHD, v_BTHD, self.stop)
        span = self.positions.max_span_tokens or self.stop
        pieces = []
        for first in range(self.start, self.stop, span):
            stop = min(first + span, self.stop)
            dtype = score_dtype(q_BTHD)
            query_factors, key_factors, mask = self._tables(first, stop, q_BTHD.device, dtype)
            q = rotate(q_BTHD[:, first - self.start : stop - self.start], query_factors, dtype)
            k = rotate(k_BSHD[:, :stop], key_factors, dtype)
            pieces.append(causal_attention(q, k, v_BSHD[:, :stop], mask, dropout))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def _make_tables(
        self, first: int, stop: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Rotations and mask for queries first .. stop - 1.

        The centre lies amid the queries, so no scale leaves the range of floating point: keys far before the
        centre scale towards zero, which is what the true decay does.
        """
        centre = (first + stop) // 2
        like = torch.empty(0, device=device, dtype=dtype)
        return (
            self.positions.rotation(first - centre, stop - first, "query", device),
            self.positions.rotation(-centre, stop, "key", device),
            lower_right_mask(self.positions, stop - first, stop, like),
        )


class BlockwiseAttention:
    """Blockwise causal attention of queries at start .. start + num_tokens - 1.

    Works on the stream of keys from the block before the one under way: first the queries that finish that block,
    then all later blocks at once, each beside the block before it.
    """

    def __init__(self, positions: Positions, block_size: int, start: int, num_tokens: int) -> None:
        self.positions = positions
        self.block_size = block_size
        self.begun = start % block_size
        self.context = self.begun + (block_size if start >= block_size else 0)
        self.num_first = min(num_tokens, block_size - self.begun)
        self.num_blocks = -(-(num_tokens - self.num_first) // block_size)
        stop = start + num_tokens
        self.keep = stop % block_size + (block_size if stop >= block_size else 0)
        self._first_tables = functools.lru_cache(maxsize=None)(self._make_first_tables)
        self._block_tables = functools.lru_cache(maxsize=None)(self._make_block_tables)

    def __call__(
        self, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, cache: LayerCache | None, dropout: float
    ) -> Tensor:
        k_BSHD, v_BSHD = (k_BTHD, v_BTHD) if cache is None else cache.extend(k_BTHD, v_BTHD, self.keep)
        first_keys = self.context + self.num_first
        dtype = score_dtype(q_BTHD)
        query_factors, key_factors, mask = self._first_tables(q_BTHD.device, dtype)
        q = rotate(q_BTHD[:, : self.num_first], query_factors, dtype)
        k = rotate(k_BSHD[:, :first_keys], key_factors, dtype)
        first = causal_attention(q, k, v_BSHD[:, :first_keys], mask, dropout)
        if not self.num_blocks:
            return first
        stream = first_keys - self.block_size
        later = self._later_blocks(q_BTHD[:, self.num_first :], k_BSHD[:, stream:], v_BSHD[:, stream:], dropout)
        return torch.cat((first, later), dim=1)

    def _later_blocks(self, q_BTHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, dropout: float) -> Tensor:
        """All blocks after the first; `k_BSHD` and `v_BSHD` begin one block before `q_BTHD`."""
        B, T, H, D = q_BTHD.shape
        # Keys that pad the last block come after every real query, and padded queries are cut off again.
        padding = self.num_blocks * self.block_size - T
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, padding)) for x in (q_BTHD, k_BSHD, v_BSHD))
        q_BNLHD = q.unflatten(1, (self.num_blocks, self.block_size))
        dtype = score_dtype(q)
        own_factors, previous_factors, query_factors, mask = self._block_tables(q.device, dtype)
        previous_BNLHD, own_BNLHD = self._pairs(k)
        keys = (rotate(previous_BNLHD, previous_factors, dtype), rotate(own_BNLHD, own_factors, dtype))
        out = causal_attention(
            rotate(q_BNLHD, query_factors, dtype).flatten(0, 1),
            torch.cat(keys, dim=2).flatten(0, 1),
            torch.cat(self._pairs(v), dim=2).flatten(0, 1),
            mask,
            dropout,
        )
        return out.reshape(B, -1, H, D)[:, :T]

    def _pairs(self, x_BSHD: Tensor) -> tuple[Tensor, Tensor]:
        """The stream cut into blocks [B, N, L, H, D]: each one's predecessor, and the block itself."""
        blocks = x_BSHD.unflatten(1, (self.num_blocks + 1, self.block_size))
        return blocks[:, :-1], blocks[:, 1:]

    def _make_first_tables(
        self, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        num_keys = self.context + self.num_first
        like = torch.empty(0, device=device, dtype=dtype)
        return (
            self.positions.rotation(self.begun, self.num_first, "query", device),
            self.positions.rotation(self.begun - self.context, num_keys, "key", device),
            lower_right_mask(self.positions, self.num_first, num_keys, like),
        )

    def _make_block_tables(
        self, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        size = self.block_size
        like = torch.empty(0, device=device, dtype=dtype)
        return (
            self.positions.rotation(0, size, "key", device),
            self.positions.rotation(-size, size, "key", device),
            self.positions.rotation(0, size, "query", device),
            lower_right_mask(self.positions, size, 2 * size, like),
        )


def make_attention(
    mode: AttentionMode, config: ModelSection, positions: Positions, start: int, num_tokens: int
) -> Attention:
    """The attention of one forward pass over positions start .. start + num_tokens - 1."""
    match mode:
        case "causal":
            return CausalAttention(positions, start, num_tokens)
        case "blockwise":
            return BlockwiseAttention(positions, config.resolved_block_size, start, num_tokens)
