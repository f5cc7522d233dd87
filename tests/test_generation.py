"""Generation: equal to scoring the whole text anew, bounded, and whole characters only."""

from pathlib import Path

import pytest
import torch

from lex_pretrain.generation import Generator, Sampling, generate_tokens, stop_before, stream_text
from lex_pretrain.model.decoder import Decoder
from lex_pretrain.model_config import AttentionMode
from lex_pretrain.tokenizer import Tokenizer
from tests.test_attention import MODES, model_section


def generate(
    decoder: Decoder, prompt: list[int], num_tokens: int, attention: AttentionMode, sampling: Sampling, eod_id: int = 1
) -> list[int | None]:
    return [token for (token,) in generate_tokens(decoder, [prompt], num_tokens, attention, sampling, eod_id)]


@pytest.mark.parametrize("attention", MODES)
@pytest.mark.parametrize("prompt", [[], [5], list(range(2, 15))])
def test_greedy_tokens_are_those_of_full_passes(attention: AttentionMode, prompt: list[int]) -> None:
    torch.manual_seed(1)
    decoder = Decoder(model_section()).eval()
    found = generate(decoder, prompt, 20, attention, Sampling(temperature=0))
    stream = [1, *prompt]
    for token in found:
        with torch.inference_mode():
            assert int(decoder(torch.tensor([stream]), attention)[0, -1].argmax()) == token
        stream.append(token)  # type: ignore[arg-type]
    assert len(found) == 20 or int(decoder(torch.tensor([stream]), attention)[0, -1].argmax()) == 1


@pytest.mark.parametrize("attention", MODES)
def test_prompts_of_a_batch_go_on_as_they_would_alone(attention: AttentionMode) -> None:
    torch.manual_seed(3)
    decoder = Decoder(model_section()).eval()
    prompts = [[4, 9, 2], [], list(range(2, 19))]
    steps = list(generate_tokens(decoder, prompts, 15, attention, Sampling(seed=5), eod_id=1))
    for row, prompt in enumerate(prompts):
        together = [step[row] for step in steps if step[row] is not None]
        assert together == generate(decoder, prompt, 15, attention, Sampling(seed=5 + row))


def test_an_empty_prompt_begins_a_document(checkpoint: Path) -> None:
    generator = Generator(checkpoint, "blockwise")
    sampling = Sampling(temperature=5)
    (text,) = generator.complete([""], 10, sampling, [])
    assert text
    assert "".join(generator.stream("", 10, sampling, [])) == text


def test_same_seed_same_tokens_and_an_end_of_document_ends() -> None:
    torch.manual_seed(0)
    decoder = Decoder(model_section()).eval()
    first, again, other = (generate(decoder, [3], 15, "blockwise", Sampling(seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    # Without scores, every token is as likely: the seed alone decides, and EOD is drawn sooner or later.
    for parameter in decoder.parameters():
        parameter.data.zero_()
    drawn = generate(decoder, [], 2000, "blockwise", Sampling(temperature=1), eod_id=1)
    assert len(drawn) < 2000
    assert 1 not in drawn


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


def test_min_p_drops_what_is_far_below_the_likeliest() -> None:
    logits = torch.tensor([0.0, 1.0, 0.5]).log()
    generator = torch.Generator().manual_seed(0)
    assert {Sampling(temperature=1, min_p=0.6).draw(logits, generator) for _ in range(200)} == {1}
    assert {Sampling(temperature=1, min_p=0.4).draw(logits, generator) for _ in range(200)} == {1, 2}


def test_repetition_penalty_divides_positive_scores_and_multiplies_negative_ones() -> None:
    generator = torch.Generator()
    greedy = Sampling(temperature=0, repetition_penalty=2.0)
    assert greedy.draw(torch.tensor([3.0, 2.0, -1.0]), generator) == 0
    assert greedy.draw(torch.tensor([3.0, 2.0, -1.0]), generator, seen_ids=[0, 0]) == 1
    assert greedy.draw(torch.tensor([-1.0, -1.5, -9.0]), generator, seen_ids=[0]) == 1


@pytest.mark.parametrize(
    ("parts", "stops", "expected"),
    [
        (["ab", "cd"], [], "abcd"),
        (["one EN", "D two"], ["END"], "one "),
        (["one EN", "Done"], ["ENDS"], "one ENDone"),
        (["a", "b", "a", "b", "c"], ["abc"], "ab"),
        (["x stop y halt"], ["halt", "stop"], "x "),
        (["ends in EN"], ["END"], "ends in EN"),
    ],
)
def test_text_ends_before_a_stop_string_however_it_is_cut(parts: list[str], stops: list[str], expected: str) -> None:
    assert "".join(stop_before(parts, stops)) == expected


def test_streamed_text_never_splits_a_character(dataset: Path) -> None:
    tokenizer = Tokenizer(dataset / "tokenizer.model")
    text = "the é 🤗 of\n\tlength"
    parts = list(stream_text(iter(tokenizer.encode(text)), tokenizer))
    assert "".join(parts) == text
    assert all("\ufffd" not in part for part in parts)
    assert len(parts) > 5
    cut = tokenizer.encode("🤗")[:-1]
    assert "".join(stream_text(iter(cut), tokenizer)) == tokenizer.decode(cut)
