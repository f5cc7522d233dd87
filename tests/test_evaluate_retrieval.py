"""Retrieval: what is asked, and that attention of a bounded reach cannot know what lies beyond it."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lex_pretrain.data.shards import TokenDataset
from lex_pretrain.evaluate.documents import ScoredDocument
from lex_pretrain.evaluate.retrieval import DEPTHS, ask, make_context, make_needle, measure_retrieval
from lex_pretrain.model.decoder import Decoder
from lex_pretrain.model_config import AttentionMode
from lex_pretrain.ranks import Ranks
from lex_pretrain.tokenizer import Tokenizer
from tests.test_attention import model_section

EOD = 1


@pytest.fixture(scope="module")
def tokenizer(dataset: Path) -> Tokenizer:
    return TokenDataset.open(dataset, "test").tokenizer()


def test_needles_say_ask_and_answer(tokenizer: Tokenizer) -> None:
    told = make_needle("pass-key", 3, tokenizer)
    key = tokenizer.decode(told.answer.tolist()).strip()
    assert len(key) == 5
    assert int(key) >= 10_000
    assert f"The pass key is {key}." in tokenizer.decode(told.statement.tolist())
    assert tokenizer.decode(told.question.tolist()).endswith("The pass key is")
    row = make_needle("copy", 3, tokenizer)
    np.testing.assert_array_equal(np.concatenate((row.question, row.answer)), row.statement)
    assert len(row.statement) == 16
    assert not np.array_equal(row.statement, make_needle("copy", 4, tokenizer).statement)
    assert all(tokenizer.piece(int(index)).strip("\u2581").isalpha() for index in row.statement)


@pytest.mark.parametrize("depth", DEPTHS)
def test_context_holds_the_needle_at_its_depth_and_the_text_around_it(tokenizer: Tokenizer, depth: float) -> None:
    needle = make_needle("copy", 0, tokenizer)
    document = np.arange(1000, 2000)
    context = make_context(needle, document, 132, depth, EOD)
    # The last token is only ever a target, and EOD only ever an input.
    assert len(context) == 133
    assert context[0] == EOD
    np.testing.assert_array_equal(context[-16:], needle.statement)
    text = 132 - 32
    start = 1 + round(depth * text)
    np.testing.assert_array_equal(context[start : start + 16], needle.statement)
    around = np.concatenate((context[1:start], context[start + 16 : -16]))
    np.testing.assert_array_equal(around, document[:text])
    with pytest.raises(ValueError, match="does not fit a length of 31"):
        make_context(needle, document, 31, depth, EOD)


@pytest.mark.parametrize("attention", ["causal", "blockwise", "sliding"])
def test_answers_are_compared_with_the_full_pass(attention: AttentionMode, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    decoder = Decoder(model_section()).eval()
    context = np.random.default_rng(0).integers(2, 40, 60)
    with torch.inference_mode():
        logits = decoder(torch.from_numpy(context)[None, :-1], attention)[0, -5:]
    # Three of the answer's tokens are the likeliest; the second and the last are made wrong.
    context[-5:] = logits.argmax(dim=-1).numpy()
    with torch.inference_mode():
        logits = decoder(torch.from_numpy(context)[None, :-1], attention)[0, -5:]
    target = torch.from_numpy(context[-5:])
    right = int((logits.argmax(dim=-1) == target).sum())
    expected = -float(logits.log_softmax(dim=-1)[torch.arange(5), target].sum())
    for chunk_tokens in (10_000, 7, 2):
        monkeypatch.setattr("lex_pretrain.evaluate.perplexity.BATCH_TOKENS", chunk_tokens)
        answer = ask(decoder, context, 5, attention)
        assert (answer.num_right, answer.num_tokens) == (right, 5)
        assert answer.nll_sum == pytest.approx(expected, rel=1e-4)


def test_what_lies_beyond_the_reach_of_blockwise_attention_cannot_be_known() -> None:
    """Two layers with blocks of 4 reach less than 16 tokens back; full attention sees everything."""
    torch.manual_seed(0)
    decoder = Decoder(model_section()).eval()
    one, other = (np.random.default_rng(0).integers(2, 40, 61) for _ in range(2))
    other[1:30] = np.random.default_rng(1).integers(2, 40, 29)
    assert ask(decoder, one, 6, "blockwise") == ask(decoder, other, 6, "blockwise")
    assert ask(decoder, one, 6, "causal").nll_sum != ask(decoder, other, 6, "causal").nll_sum


def test_records_cover_the_grid_and_do_not_depend_on_ranks(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    decoder = Decoder(model_section(vocab_size=320)).eval()
    torch.nn.init.zeros_(decoder.embedding.weight)
    documents = [ScoredDocument(np.random.default_rng(n).integers(2, 320, 128), 1, 1) for n in range(2)]
    modes: list[AttentionMode] = ["causal", "blockwise"]

    def measure(rank: int, num_ranks: int) -> list[object]:
        ranks = Ranks(rank, num_ranks, rank, num_ranks)
        return list(measure_retrieval(decoder, documents, [16, 96, 128], modes, 3, tokenizer, ranks))

    alone = measure(0, 1)
    cells = {(r.task, r.attention, r.length, r.depth) for r in alone}  # type: ignore[attr-defined]
    # The pass key does not fit 16 tokens with this tokenizer.
    assert cells == set(itertools.product(("pass-key", "copy"), modes, (96, 128), DEPTHS))
    for record in alone:
        assert record.num_trials == 3  # type: ignore[attr-defined]
        assert record.nll == pytest.approx(math.log(320), rel=1e-6)  # type: ignore[attr-defined]
        assert record.exact == 0  # type: ignore[attr-defined]
    shares: list[list[object]] = []
    gather: Callable[..., list[object]] = lambda mine, ranks: shares.append(mine) or mine  # noqa: E731
    monkeypatch.setattr("lex_pretrain.evaluate.retrieval.gather_lists", gather)
    for rank in range(3):
        measure(rank, 3)
    merged = [item for share in shares for item in share]
    assert len(merged) == len(alone) * 3
    monkeypatch.setattr("lex_pretrain.evaluate.retrieval.gather_lists", lambda mine, ranks: merged)
    assert measure(0, 3) == alone
