"""Tokenizers give every text back exactly, and training says what it cannot do."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.train_tokenizer import train_tokenizer
from lex_pretrain.errors import RequestError
from lex_pretrain.tokenizer import Tokenizer
from tests.conftest import make_text


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    file.write_bytes(train_tokenizer([make_text(seed, 500) for seed in range(20)], 320))
    return Tokenizer(file)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  a   b  ",
        "\t\tx\n\n y \n",
        "a\r\nb\r",
        "\x00\x01",
        "</s> <unk> <0x0A>",
        "\ufeff",
        "ﬁ①Ａ é e\u0301",
        "🤗",
    ],
)
def test_round_trip_of_awkward_texts(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_character_that_sentencepiece_writes_for_a_space_comes_back(tokenizer: Tokenizer) -> None:
    text = "\u2581 a\u2581\u2581b \u2581"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    arrays = tokenizer.encode_arrays([text, "plain"])
    assert [ids.tolist() for ids in arrays] == [tokenizer.encode(text), tokenizer.encode("plain")]


# Surrogates (Cs) are no characters on their own: UTF-8 cannot hold them.
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_round_trip_of_any_text(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_end_of_document_never_comes_from_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.piece(tokenizer.eod_id) == "</s>"
    assert tokenizer.eod_id not in tokenizer.encode("</s>")


def test_fingerprint_follows_the_pieces(tokenizer: Tokenizer, tmp_path: Path) -> None:
    copy = tmp_path / "copy.model"
    copy.write_bytes(tokenizer.model_file.read_bytes())
    assert Tokenizer(copy).fingerprint == tokenizer.fingerprint
    other = tmp_path / "other.model"
    other.write_bytes(train_tokenizer([make_text(seed, 500) for seed in range(20, 40)], 320))
    assert Tokenizer(other).fingerprint != tokenizer.fingerprint


def test_too_small_a_sample_names_the_largest_vocabulary_and_that_one_works(tmp_path: Path) -> None:
    texts = [make_text(1, 30)]
    with pytest.raises(RequestError, match="the largest that works is") as caught:
        train_tokenizer(texts, 50_000)
    largest = int(str(caught.value).rsplit(" ", 1)[1])
    file = tmp_path / "largest.model"
    file.write_bytes(train_tokenizer(texts, largest))
    assert Tokenizer(file).vocab_size == largest
    with pytest.raises(RequestError):
        train_tokenizer(texts, largest + 1)


def test_vocabulary_smaller_than_the_bytes_is_refused() -> None:
    with pytest.raises(RequestError, match="258"):
        train_tokenizer(["text"], 100)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "wrong.model"
    file.write_bytes(b"not a model")
    with pytest.raises(RequestError, match=r"wrong\.model is not a SentencePiece model"):
        Tokenizer(file)
    with pytest.raises(RequestError, match="does not exist"):
        Tokenizer(tmp_path / "missing.model")
