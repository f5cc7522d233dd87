"""The tokenizer of a dataset: trained on what the corpus is, and refused where a document would not come back."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_prep.losses import LossCheck, ways_to_lose
from lex_pretrain.errors import RequestError
from lex_pretrain.tokenizer import Tokenizer
from tests.conftest import Program, make_text
from tests.preparing import options, pack, texts_of
from tests.test_prepare_encoding import model_of


def write_lines(file: Path, texts: list[str]) -> Path:
    file.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8")
    return file


@pytest.mark.parametrize("unbroken", [False, True])
def test_lines_of_any_length_take_part(program: Program, tmp_path: Path, unbroken: bool) -> None:
    """The long lines are nearly all of the text, in characters of two bytes, whole or in words."""
    word = "žřčšěýáíéů"
    write_lines(tmp_path / "long.jsonl", [(word if unbroken else f"{word} ") * 9000 for _ in range(3)])
    (tmp_path / "short.txt").write_text(make_text(1, 300))
    done = program("prepare", "long.jsonl", "short.txt", "--output", "out", "--vocab-size", "320", "--keep-duplicates")
    assert done.returncode == 0, done.stderr
    assert len(Tokenizer(tmp_path / "out" / "tokenizer.model").encode(word)) <= 3


def test_an_unreadable_file_of_the_sample_is_the_error_that_is_shown(program: Program, tmp_path: Path) -> None:
    write_lines(tmp_path / "good.jsonl", [make_text(number, 200) for number in range(5)])
    (tmp_path / "bad.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 99)[:-12])
    arguments = [
        "prepare",
        "bad.jsonl.gz",
        "good.jsonl",
        "--output",
        "out",
        "--vocab-size",
        "300",
        "--max-rejected",
        "1",
    ]
    done = program(*arguments)
    assert done.returncode == 2
    assert "bad.jsonl.gz cannot be read" in done.stderr
    assert "--skip-bad-files" in done.stderr
    assert program(*arguments, "--skip-bad-files").returncode == 0


def test_no_text_for_the_sample_says_why(program: Program, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [make_text(number, 50) for number in range(9)])
    arguments = ["prepare", "in.jsonl", "--output", "out", "--vocab-size", "300"]
    wrong = program(*arguments, "--text-key", "body")
    assert wrong.returncode == 2
    assert "9 records are rejected, most because: no key body" in wrong.stderr
    # In the same folder, for nothing of worth is in it.
    assert program(*arguments).returncode == 0


def test_rejected_documents_do_not_train_the_tokenizer(program: Program, tmp_path: Path) -> None:
    secret = "qxzjqxzj"
    texts = [make_text(number, 100) for number in range(10)] + [f"secret {secret} " * 500 + str(n) for n in range(5)]
    write_lines(tmp_path / "in.jsonl", texts)
    done = program("prepare", "in.jsonl", "--output", "out", "--vocab-size", "300", "--reject-pattern", "secret")
    assert done.returncode == 0, done.stderr
    assert len(Tokenizer(tmp_path / "out" / "tokenizer.model").encode(secret)) >= 6


def test_a_vocabulary_too_small_for_the_characters_names_options_that_exist(program: Program, tmp_path: Path) -> None:
    characters = "".join(chr(code) for code in range(0x4E00, 0x4E00 + 400))
    write_lines(tmp_path / "in.jsonl", [f"{number} " + characters[number:] + characters for number in range(20)])
    arguments = ["prepare", "in.jsonl", "--output", "out", "--vocab-size"]
    small = program(*arguments, "300")
    assert small.returncode == 2
    assert "--vocab-size 300 is too small" in small.stderr
    assert "--character-coverage" in small.stderr
    needed = int(small.stderr.replace("\n", " ").split("of the sample take ")[1].split(".")[0])
    assert program(*arguments, str(needed)).returncode == 0
    assert program("prepare", "--help").stdout.count("--character-coverage") == 1
    outside = program(*arguments, "300", "--character-coverage", "0.5")
    assert outside.returncode == 2
    assert "--character-coverage" in outside.stderr


LOSSY = {
    "normalising": {"normalization_rule_name": "nmt_nfkc"},
    "folding": {"normalization_rule_name": "nmt_nfkc_cf"},
    "spaces": {"remove_extra_whitespaces": True},
    "unknown": {"byte_fallback": False},
}
EXACT = {
    "plain": {},
    "unigram": {"model_type": "unigram", "vocab_size": 300},
    "prefix": {"add_dummy_prefix": True},
    "suffix": {"treat_whitespace_as_suffix": True},
}
# What each of the lossy models loses; the last of many documents, far into it.
LOST = {"normalising": "ﬁ", "folding": "A", "spaces": "  ", "unknown": "🤗"}
ALPHABET = st.sampled_from([*" \n\t\rabcA.,0é▁🤗", "token", "  ", "\u00a0", "ﬁ", "e\u0301"])


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("models")
    return {name: model_of(folder, name, **changes) for name, changes in (LOSSY | EXACT).items()}


@pytest.mark.parametrize("name", EXACT)
@given(text=st.lists(ALPHABET, max_size=40).map("".join))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_model_without_a_way_to_lose_gives_every_text_back(
    models: dict[str, Tokenizer], name: str, text: str
) -> None:
    assert ways_to_lose(models[name]) == []
    if LossCheck(models[name]).loss(text) is None:
        assert models[name].decode(models[name].encode(text)) == text


@pytest.mark.parametrize("name", LOSSY)
def test_a_loss_in_any_document_is_found_and_named(
    models: dict[str, Tokenizer], tmp_path: Path, program: Program, name: str
) -> None:
    texts = [" ".join(make_text(number, 60).split()) for number in range(90)]
    file = write_lines(tmp_path / "in.jsonl", texts)
    model = models[name].model_file
    lossless = options(tmp_path, tokenizer=model, unit_bytes=4000)
    pack([file], tmp_path / "lossless", lossless)
    assert texts_of(tmp_path / "lossless") == texts
    texts[80] = " ".join([texts[80]] * 60) + LOST[name] + texts[80]
    write_lines(file, texts)
    with pytest.raises(RequestError, match=r"the tokenizer loses text.*comes back as.*--allow-lossy-tokenizer"):
        pack([file], tmp_path / "out", lossless)
    # The corrected command goes on, whichever correction it is.
    arguments = ["prepare", "in.jsonl", "--validation-fraction", "0", "--test-fraction", "0", "--workers", "1"]
    refused = program(*arguments, "--output", "again", "--tokenizer", model)
    assert refused.returncode == 2
    assert refused.stderr.count("loses text") == 1
    allowed = program(*arguments, "--output", "again", "--tokenizer", model, "--allow-lossy-tokenizer")
    assert allowed.returncode == 0, allowed.stderr
    assert "that is allowed" in allowed.stderr
    program(*arguments, "--output", "other", "--tokenizer", model)
    exact = program(*arguments, "--output", "other", "--tokenizer", models["plain"].model_file)
    assert exact.returncode == 0, exact.stderr
    assert sorted(texts_of(tmp_path / "other")) == sorted(texts)
