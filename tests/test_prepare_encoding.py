"""Each distinct word once: id for id what the tokenizer gives, and only where that is sure."""

import io
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import SentencePieceTrainer

from data_prep import encoding
from data_prep.encoding import Encoder, UnequalIdsError, has_unbroken_run, parts_of, word_pattern
from data_prep.train_tokenizer import train_tokenizer
from lex_pretrain.tokenizer import Tokenizer
from tests.conftest import make_text
from tests.preparing import options, pack, texts_of

SAMPLE = [make_text(seed, 400) for seed in range(20)]


def model_of(folder: Path, name: str, **changes: object) -> Tokenizer:
    """A tokenizer with some of the trainer's settings changed, as a user may bring one."""
    settings = {
        "model_type": "bpe",
        "vocab_size": 320,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "eos_id": 1,
        "unk_id": 0,
        "bos_id": -1,
        "minloglevel": 2,
        **changes,
    }
    model = io.BytesIO()
    lines = iter([line for text in SAMPLE for line in text.splitlines()])
    SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, **settings)
    file = folder / f"{name}.model"
    file.write_bytes(model.getvalue())
    return Tokenizer(file)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    file = tmp_path_factory.mktemp("words") / "tokenizer.model"
    file.write_bytes(train_tokenizer(SAMPLE, 400))
    return Tokenizer(file)


def expected(tokenizer: Tokenizer, text: str) -> list[int]:
    return [*tokenizer.encode(text), tokenizer.eod_id]


ALPHABET = st.sampled_from([*"   \n\t\rabcdet.,0é\u2581🤗", "token", "attention", "   ", "\u00a0"])


@given(st.lists(ALPHABET, max_size=60).map("".join))
def test_joined_words_give_the_ids_of_the_text(tokenizer: Tokenizer, text: str) -> None:
    (ids,) = Encoder(tokenizer, word_cache=True).encode([text])
    assert ids.tolist() == expected(tokenizer, text)
    assert ids.dtype == np.uint16


def test_long_documents_are_the_same_in_parts(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = make_text(5, 3000) + "  " * 50 + "x" * 500 + make_text(6, 300)
    for size in (1, 10, 777):
        monkeypatch.setattr(encoding, "_PART_CHARACTERS", size)
        (ids,) = Encoder(tokenizer, word_cache=True).encode([text])
        assert ids.tolist() == expected(tokenizer, text)


@given(st.lists(st.sampled_from(["a", " ", "b ", "\n"]), max_size=40).map("".join), st.integers(1, 9))
def test_parts_are_cut_before_runs_of_spaces_alone(text: str, size: int) -> None:
    parts = list(parts_of(text, size))
    assert "".join(parts) == text
    assert all(part[0] == " " for part in parts[1:])
    assert all(not part.endswith(" ") for part in parts[:-1])


def test_a_full_cache_is_emptied_and_still_right(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_CACHE_BYTES", 2000)
    texts = [make_text(seed, 100) for seed in range(30)]
    found = Encoder(tokenizer, word_cache=True).encode(texts)
    assert [ids.tolist() for ids in found] == [expected(tokenizer, text) for text in texts]


@pytest.mark.parametrize(
    ("changes", "sure"),
    [
        ({}, True),
        ({"split_by_unicode_script": False, "split_by_number": False}, True),
        ({"user_defined_symbols": ["token,"]}, True),
        ({"split_by_whitespace": False, "vocab_size": 500}, False),
        ({"user_defined_symbols": ["of the"]}, False),
        ({"model_type": "unigram"}, False),
        ({"byte_fallback": False}, False),
        ({"add_dummy_prefix": True}, False),
        ({"remove_extra_whitespaces": True}, False),
        ({"normalization_rule_name": "nmt_nfkc"}, False),
        ({"treat_whitespace_as_suffix": True}, False),
    ],
)
def test_words_are_joined_only_for_models_that_allow_the_proof(
    tmp_path: Path, changes: dict[str, object], sure: bool
) -> None:
    tokenizer = model_of(tmp_path, "changed", **changes)
    assert (word_pattern(tokenizer) is not None) == sure
    texts = [*SAMPLE[:3], "of the token,token, x  of the"]
    found = Encoder(tokenizer, word_cache=True).encode(texts)
    assert [ids.tolist() for ids in found] == [expected(tokenizer, text) for text in texts]


def test_pieces_with_line_ends_keep_their_lines_together(tmp_path: Path) -> None:
    tokenizer = model_of(tmp_path, "lines", user_defined_symbols=["\n\n", ",\n"])
    pattern = word_pattern(tokenizer)
    assert pattern is not None
    assert re.findall(pattern, "a,\n\nb c") == ["a,\n\nb", " c"]
    text = "a,\n\nb, \n\n\n c\n\n"
    assert Encoder(tokenizer, True).encode([text])[0].tolist() == expected(tokenizer, text)


class _Wrong(Tokenizer):
    """Gives other ids for whole texts than for words: what the comparison is there to catch."""

    def encode(self, text: str) -> list[int]:
        ids = super().encode(text)
        return ids[::-1] if " " not in text.strip() else ids


def test_a_difference_is_found_and_everything_is_packed_plainly(
    dataset: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = _Wrong(dataset / "tokenizer.model")
    with pytest.raises(UnequalIdsError):
        Encoder(wrong, word_cache=True).encode([make_text(1, 50)])
    monkeypatch.setattr("data_prep.packing.Tokenizer", _Wrong)
    inputs = sorted(corpus.iterdir())[:10]
    with caplog.at_level("INFO", logger="lex_pretrain"):
        pack(inputs, tmp_path / "out", options(dataset, unit_bytes=1000))
    assert "joined words were found to differ" in caplog.text
    assert texts_of(tmp_path / "out") == [file.read_text() for file in inputs]


def test_unbroken_runs_are_measured_between_spaces_and_line_ends() -> None:
    assert has_unbroken_run("a" * 11, 10)
    assert not has_unbroken_run("a" * 10, 10)
    assert not has_unbroken_run(("a" * 9 + "\n") * 5 + ("a" * 9 + " ") * 5, 10)
    assert has_unbroken_run("a " * 50 + "a" * 21, 10)
