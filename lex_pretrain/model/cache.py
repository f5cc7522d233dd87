"""Keys and values of the tokens seen so far, for decoding and for streaming a document of any length.

Keys are stored without positions: where a key stands relative to the attention's centre changes as the context
grows, so each use rotates what it reads. That keeps cached and full passes equal at every position.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class LayerCache:
    """One layer's context: keys and values [B, T, G, D] of the tokens that a next token may see.

    Where the rows of a batch stand at different positions, `rows` holds a context [1, T, G, D] for each instead.
    """

    def __init__(self, num_rows: int = 0) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self.rows = [LayerCache() for _ in range(num_rows)]

    @property
    def num_tokens(self) -> int:
        """Tokens held, of the longest row."""
        if self.rows:
            return max(row.num_tokens for row in self.rows)
        return 0 if self._keys is None else self._keys.shape[1]

    def extend(self, k_BTGD: Tensor, v_BTGD: Tensor, num_kept: int, num_first: int = 0) -> tuple[Tensor, Tensor]:
        """Context followed by the given keys and values.

        `num_kept` tokens of both stay as next context: the first `num_first` ever seen, and the latest.
        """
        if self._keys is not None and self._values is not None:
            k_BTGD = torch.cat((self._keys, k_BTGD), dim=1)
            v_BTGD = torch.cat((self._values, v_BTGD), dim=1)
        num_dropped = k_BTGD.shape[1] - num_kept
        self._keys, self._values = (_without(x, min(num_first, num_kept), num_dropped) for x in (k_BTGD, v_BTGD))
        return k_BTGD, v_BTGD


def _without(x_BTGD: Tensor, first: int, num_dropped: int) -> Tensor:
    """All tokens but `num_dropped` from `first` on, as a copy where any is dropped: a view would hold them all."""
    if num_dropped == 0:
        return x_BTGD
    return torch.cat((x_BTGD[:, :first], x_BTGD[:, first + num_dropped :]), dim=1)


class Cache:
    """The context of a whole decoder; made empty, filled by its forward pass, in one attention mode throughout.

    `padding` says how many tokens at the left of each row are none, where rows begin at different places.
    """

    def __init__(self, num_layers: int, padding: Sequence[int] = ()) -> None:
        self.padding = tuple(padding)
        self.layers = [LayerCache(len(padding)) for _ in range(num_layers)]
        self.num_tokens_seen = 0
        self.attention: str | None = None

    def take(self, attention: str, num_rows: int, num_tokens: int) -> int:
        """Account for a pass over tokens [num_rows, num_tokens]; returns how many came before. ValueError if it
        does not continue those."""
        if self.attention not in (None, attention):
            raise ValueError(f"the cache was filled with {self.attention} attention, not {attention}")
        if self.padding and len(self.padding) != num_rows:
            raise ValueError(f"the cache was made for {len(self.padding)} rows, not {num_rows}")
        self.attention = attention
        start = self.num_tokens_seen
        self.num_tokens_seen += num_tokens
        return start
