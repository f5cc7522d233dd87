"""Generation: equal to scoring the whole text anew, bounded, and whole characters only."""

from pathlib import Path

import pytest
import torch

from lex_pretrain.config import AttentionMode
from lex_pretrain.generation import Sampling, generate_tokens, stream_text
from lex_pretrain.model.decoder import Decoder
from lex_pretrain.tokenizer import Tokenizer
from tests.test_attention import model_section


@pytest.mark.parametrize("attention", ["causal", "blockwise"])
@pytest.mark.parametrize("prompt", [[], [5], list(range(2, 15))])
def test_greedy_tokens_are_those_of_full_passes(attention: AttentionMode, prompt: list[int]) -> None:
    torch.manual_seed(1)
    decoder = Decoder(model_section()).eval()
    found = list(generate_tokens(decoder, prompt, 20, attention, Sampling(temperature=0), eod_id=1))
    stream = [1, *prompt]
    for token in found:
        with torch.inference_mode():
            assert int(decoder(torch.tensor([stream]), attention)[0, -1].argmax()) == token
        stream.append(token)
    assert len(found) == 20 or int(decoder(torch.tensor([stream]), attention)[0, -1].argmax()) == 1


def test_same_seed_same_text_and_an_end_of_document_ends() -> None:
    torch.manual_seed(0)
    decoder = Decoder(model_section()).eval()
    first, again, other = (
        list(generate_tokens(decoder, [3], 15, "blockwise", Sampling(seed=seed), eod_id=1)) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    ended = first[0]
    assert list(generate_tokens(decoder, [3], 15, "blockwise", Sampling(seed=1), eod_id=ended)) != first


def test_top_k_and_top_p_keep_only_the_likeliest() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 0.0])
    generator = torch.Generator().manual_seed(0)
    two = {Sampling(temperature=5, top_k=2).draw(logits, generator) for _ in range(200)}
    assert two == {1, 2}
    # The likeliest token holds 64 % of the mass, the two likeliest 88 %.
    one = {Sampling(temperature=1, top_p=0.6).draw(logits, generator) for _ in range(200)}
    assert one == {1}
    everything = {Sampling(temperature=5, top_p=1.0).draw(logits, generator) for _ in range(500)}
    assert everything == {0, 1, 2, 3}


def test_streamed_text_never_splits_a_character(dataset: Path) -> None:
    tokenizer = Tokenizer(dataset / "tokenizer.model")
    text = "the é 🤗 of\n\tlength"
    parts = list(stream_text(iter(tokenizer.encode(text)), tokenizer))
    assert "".join(parts) == text
    assert all("\ufffd" not in part for part in parts)
    assert len(parts) > 5
    cut = tokenizer.encode("🤗")[:-1]
    assert "".join(stream_text(iter(cut), tokenizer)) == tokenizer.decode(cut)
