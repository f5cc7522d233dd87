"""The whole decoder: what xPos costs, speed at long lengths, decoding, and how close a step comes to its products."""

from collections.abc import Callable

import torch
from torch import Tensor

from lex_pretrain.model.decoder import Decoder
from lex_pretrain.model_config import ModelSection
from lex_pretrain.train.loss import NextTokenLoss
from tests.benchmarks.timing import median_seconds

WIDTH, NUM_HEADS, TRAINING_LENGTH, VOCAB_SIZE = 768, 12, 1024, 8192
SHORT, LONG = 4096, 65_536
DECODED = 32


def run() -> list[str]:
    """Lines of the result, each a ratio of median times."""
    torch.manual_seed(0)
    return [*_position_cost(), _share_of_products(), _long_lengths(), _decoding()]


def _decoder(position: str, num_layers: int) -> Decoder:
    config = ModelSection.model_validate(
        {
            "position": position,
            "num_layers": num_layers,
            "hidden_size": WIDTH,
            "num_heads": NUM_HEADS,
            "sequence_length": TRAINING_LENGTH,
            "vocab_size": VOCAB_SIZE,
        }
    )
    return Decoder(config).bfloat16()


def _training_step(position: str, num_layers: int) -> Callable[[], None]:
    module = NextTokenLoss(_decoder(position, num_layers))
    tokens = torch.randint(0, VOCAB_SIZE, (1, TRAINING_LENGTH + 1))

    def step() -> None:
        module.zero_grad()
        module(tokens[:, :-1], tokens[:, 1:]).backward()

    return step


def _forward(position: str, num_layers: int) -> Callable[[], Tensor]:
    decoder = _decoder(position, num_layers).eval()
    tokens = torch.randint(0, VOCAB_SIZE, (1, TRAINING_LENGTH))

    def forward() -> Tensor:
        with torch.inference_mode():
            return decoder.hidden_states(tokens)

    return forward


def _position_cost() -> list[str]:
    lines = []
    for name, make in (("training step", _training_step), ("forward pass", _forward)):
        seconds = median_seconds({"xpos": make("xpos", 12), "learned": make("learned", 12)}, num_rounds=21)
        added = seconds["xpos"] / seconds["learned"] - 1
        lines.append(f"xpos over learned positions, {name} of 12 layers at {TRAINING_LENGTH:,}: {added:+.1%}")
    return lines


def _share_of_products() -> str:
    """A step's time against its linear layers' products alone: each once forward and twice backward."""
    num_layers = 2
    layer = [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
    operands = [
        tuple(torch.randn(shape).bfloat16() for shape in ((TRAINING_LENGTH, n), (n, m), (TRAINING_LENGTH, m)))
        for n, m in [*(layer * num_layers), (WIDTH, VOCAB_SIZE)]
    ]

    def products() -> None:
        for x, weight, gradient in operands:
            torch.mm(x, weight)
            torch.mm(gradient, weight.T)
            torch.mm(x.T, gradient)

    seconds = median_seconds({"step": _training_step("xpos", num_layers), "products": products})
    return f"training step of {num_layers} layers: its products alone take {seconds['products'] / seconds['step']:.0%}"


def _long_lengths() -> str:
    decoder = _decoder("xpos", 2).eval()

    def forward(num_tokens: int) -> None:
        with torch.inference_mode():
            for _ in decoder.stream_hidden_states(torch.zeros(1, num_tokens, dtype=torch.long), "blockwise", SHORT):
                pass

    seconds = median_seconds({"short": lambda: forward(SHORT), "long": lambda: forward(LONG)}, num_rounds=3)
    rate = (LONG / seconds["long"]) / (SHORT / seconds["short"])
    return f"blockwise forward: tokens/s at {LONG:,} are {rate:.0%} of those at {SHORT:,}"


def _decoding() -> str:
    decoder = _decoder("xpos", 2).eval()
    block_size = TRAINING_LENGTH // 2

    def decode(num_seen: int) -> Callable[[], None]:
        cache = decoder.make_cache()
        token = torch.zeros(1, 1, dtype=torch.long)
        with torch.inference_mode():
            for chunk in torch.zeros(1, num_seen, dtype=torch.long).split(SHORT, dim=1):
                decoder.hidden_states(chunk, "blockwise", cache)

        def steps() -> None:
            with torch.inference_mode():
                for _ in range(DECODED):
                    decoder.hidden_states(token, "blockwise", cache)

        return steps

    # Both begin at the start of a block, so that both hold as many keys in every round.
    few, many = 2 * block_size, 196 * block_size
    seconds = median_seconds({"few": decode(few), "many": decode(many)})
    ratio = seconds["many"] / seconds["few"]
    return f"blockwise decoding: a token after {many:,} takes {ratio:.2f} times that after {few:,}"
