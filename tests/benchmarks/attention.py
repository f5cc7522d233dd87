"""Attention alone: what xPos and ALiBi add, and blockwise against full causal attention and separate pieces."""

import torch

from lex_pretrain.model.attention import make_attention
from lex_pretrain.model.positions import make_positions
from lex_pretrain.model_config import ModelSection
from tests.benchmarks.timing import median_seconds

NUM_TOKENS = 16_384
TRAINING_LENGTH = 1024
NUM_HEADS, HEAD_SIZE = 12, 64


def run() -> list[str]:
    """Lines of the result, each a ratio of median times."""
    torch.manual_seed(0)
    whole = tuple(torch.randn(1, NUM_TOKENS, NUM_HEADS, HEAD_SIZE) for _ in range(3))
    pieces = tuple(x.view(-1, TRAINING_LENGTH, NUM_HEADS, HEAD_SIZE) for x in whole)

    def attend(position: str, mode: str, qkv: tuple[torch.Tensor, ...]) -> torch.Tensor:
        config = ModelSection.model_validate(
            {
                "position": position,
                "num_layers": 1,
                "hidden_size": NUM_HEADS * HEAD_SIZE,
                "num_heads": NUM_HEADS,
                "sequence_length": TRAINING_LENGTH,
            }
        )
        attention = make_attention(mode, config, make_positions(config), 0, qkv[0].shape[1])  # type: ignore[arg-type]
        return attention(*qkv, None, 0.0)

    with torch.inference_mode():
        seconds = median_seconds(
            {
                "full": lambda: attend("none", "causal", whole),
                "full with alibi": lambda: attend("alibi", "causal", whole),
                "blockwise": lambda: attend("xpos", "blockwise", whole),
                "pieces": lambda: attend("none", "causal", pieces),
                "pieces with xpos": lambda: attend("xpos", "causal", pieces),
            },
            num_rounds=7,
        )
    faster, longer = seconds["full"] / seconds["blockwise"], seconds["blockwise"] / seconds["pieces"]
    added = seconds["pieces with xpos"] / seconds["pieces"] - 1
    alibi = seconds["full with alibi"] / seconds["full"]
    return [
        f"full causal with alibi at {NUM_TOKENS:,}: {alibi:.1f} times the time of full causal without positions",
        f"blockwise at {NUM_TOKENS:,}: {faster:.1f} times as fast as full causal",
        f"blockwise at {NUM_TOKENS:,}: {longer:.2f} times the time of separate pieces",
        f"xpos on pieces of {TRAINING_LENGTH:,}: {added:+.0%} attention time",
    ]
