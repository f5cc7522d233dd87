"""A document of any length in constant memory."""

import subprocess
import sys

import pytest
import torch

from lex_pretrain.evaluate.perplexity import BATCH_TOKENS, token_losses
from lex_pretrain.model.decoder import Decoder
from lex_pretrain.model_config import AttentionMode
from tests.test_attention import model_section

# Prints the peak memory of a process that scores a document, in bytes.
SCORE = """
import resource, sys
import numpy as np
import torch
from lex_pretrain.model_config import ModelSection
from lex_pretrain.evaluate.perplexity import score_pieces
from lex_pretrain.model.decoder import Decoder
torch.set_num_threads(1)
config = ModelSection(num_layers=2, hidden_size=32, num_heads=2, sequence_length=256, vocab_size=128)
document = np.random.default_rng(0).integers(0, 128, int(sys.argv[1]))
losses = score_pieces(Decoder(config).eval(), document, len(document), sys.argv[2], eod_id=1)
assert np.isfinite(losses).all() and len(losses) == len(document)
sys.stdout.write(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
"""


@pytest.mark.parametrize("mode", ["blockwise", "sliding", "sinks"])
def test_streamed_losses_are_those_of_one_pass(mode: AttentionMode) -> None:
    torch.manual_seed(0)
    decoder = Decoder(model_section(num_layers=1)).eval()
    tokens = torch.randint(0, 40, (1, 2 * BATCH_TOKENS + 5))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    with torch.inference_mode():
        expected = torch.nn.functional.cross_entropy(decoder(inputs, mode)[0], targets[0], reduction="none")
    found = token_losses(decoder, inputs, targets, mode)[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["blockwise", "sinks"])
def test_a_million_tokens_take_the_memory_of_sixteen_thousand(mode: AttentionMode) -> None:
    def peak_bytes(num_tokens: int) -> int:
        command = [sys.executable, "-c", SCORE, str(num_tokens), mode]
        return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout)

    assert peak_bytes(1_048_576) <= 1.1 * peak_bytes(16_384)
