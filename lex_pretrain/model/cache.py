"""Keys and values of the tokens seen so far, for decoding and for streaming a document of any length.

Keys are stored without positions: where a key stands relative to the attention's centre changes as the context
grows, so each use rotates what it reads. That keeps cached and full passes equal at every position.
"""

import torch
from torch import Tensor


class LayerCache:
    """One layer's context: keys and values [B, T, H, D] of the tokens that a next token may see."""

    def __init__(self) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return 0 if self._keys is None else self._keys.shape[1]

    def extend(self, k_BTHD: Tensor, v_BTHD: Tensor, keep_tokens: int) -> tuple[Tensor, Tensor]:
        """Context followed by the given keys and values; the last `keep_tokens` of both stay as next context."""
        if self._keys is not None and self._values is not None:
            k_BTHD = torch.cat((self._keys, k_BTHD), dim=1)
            v_BTHD = torch.cat((self._values, v_BTHD), dim=1)
        start = k_BTHD.shape[1] - keep_tokens
        # A copy where something is left behind, so that a long chunk's memory is not held by its tail.
        self._keys = k_BTHD if start == 0 else k_BTHD[:, start:].clone()
        self._values = v_BTHD if start == 0 else v_BTHD[:, start:].clone()
        return k_BTHD, v_BTHD


class Cache:
    """The context of a whole decoder; made empty, filled by its forward pass, in one attention mode throughout."""

    def __init__(self, num_layers: int) -> None:
        self.layers = [LayerCache() for _ in range(num_layers)]
        self.num_tokens_seen = 0
        self.attention: str | None = None
