"""Filters in their order, duplicates over the whole corpus, decontamination: each counted and located."""

import json
from pathlib import Path

import numpy as np
import pytest

from data_prep.verify import verify
from data_prep.word_runs import hash_runs
from lex_pretrain.errors import RequestError
from tests.conftest import make_text
from tests.preparing import digests, options, pack, rejections_of, texts_of


def write_lines(file: Path, texts: list[str]) -> Path:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def reasons_of(folder: Path) -> dict[int, str]:
    return {line["record"]: line["reason"] for line in rejections_of(folder)}


def test_filters_reject_in_their_declared_order(dataset: Path, tmp_path: Path) -> None:
    texts = ["  ", "ab", "secret", "x" * 30, "a good text", "a secret much too long for it", "a good text"]
    file = write_lines(tmp_path / "in.jsonl", texts)
    settings = options(dataset, min_document_bytes=3, max_document_bytes=25, reject_pattern="s.cret")
    with pytest.raises(RequestError, match="no document was fit"):
        pack([write_lines(tmp_path / "none.jsonl", texts[:3])], tmp_path / "none", settings)
    # The limit holds for the stored line too, so lines beyond it are never parsed.
    settings = options(dataset, min_document_bytes=3, max_document_bytes=29, reject_pattern="s.cret")
    manifest = pack([file], tmp_path / "out", settings)
    assert reasons_of(tmp_path / "out") == {
        1: "empty",
        2: "too short",
        3: "matches pattern",
        4: "too long",
        6: "too long",
        7: "exact duplicate",
    }
    assert texts_of(tmp_path / "out") == ["a good text"]
    assert manifest.account.rejected["too long"].documents == 2


@pytest.fixture
def repeated(tmp_path: Path) -> Path:
    """Forty documents in many units, of which numbers 30 to 39 repeat 0 to 9 and 12 repeats 11."""
    texts = [make_text(seed, 40) for seed in range(30)]
    texts[12] = texts[11]
    return write_lines(tmp_path / "in.jsonl", texts + texts[:10])


def test_exact_duplicates_go_wherever_they_stand(dataset: Path, tmp_path: Path, repeated: Path) -> None:
    texts = [json.loads(line)["text"] for line in repeated.read_text().splitlines()]
    split = {"validation_fraction": 0.3, "unit_bytes": 900}
    manifest = pack([repeated], tmp_path / "out", options(dataset, **split))
    found = texts_of(tmp_path / "out") + texts_of(tmp_path / "out", "validation")
    assert sorted(found) == sorted(set(texts))
    assert reasons_of(tmp_path / "out") == dict.fromkeys([13, *range(31, 41)], "exact duplicate")
    assert manifest.account.rejected["exact duplicate"].bytes == sum(len(texts[n]) for n in [12, *range(30, 40)])
    assert verify(tmp_path / "out", full=True) == []
    kept = pack([repeated], tmp_path / "kept", options(dataset, keep_duplicates=True, **split))
    assert kept.account.packed.documents == 40


def test_dropping_ends_the_same_for_any_workers_and_after_a_stop(dataset: Path, tmp_path: Path, repeated: Path) -> None:
    settings = options(dataset, unit_bytes=900)
    pack([repeated], tmp_path / "one", settings)
    pack([repeated], tmp_path / "three", settings, num_workers=3)
    assert digests(tmp_path / "three") == digests(tmp_path / "one")
    # As if killed after the shards were written anew, or before the manifest: the record does not fit, or all is done.
    for name in ("one", "three"):
        (tmp_path / name / "manifest.json").unlink()
    shrunk = sorted((tmp_path / "three" / ".units").glob("unit-*.dropped.npy"))[0].name.partition(".")[0]
    record = tmp_path / "three" / ".units" / f"{shrunk}.json"
    value = json.loads(record.read_text())
    value["num_dropped"] = 0
    value["shards"][0]["num_tokens"] += 7
    record.write_text(json.dumps(value))
    for name in ("one", "three"):
        pack([repeated], tmp_path / name, settings)
    assert digests(tmp_path / "three") == digests(tmp_path / "one")
    assert verify(tmp_path / "one", full=True) == []


def test_near_duplicates_go_and_different_texts_stay(dataset: Path, tmp_path: Path) -> None:
    words = make_text(1, 400).split()
    changed = [*words[:200], "different", *words[201:]]
    half = words[:200] + make_text(2, 200).split()
    texts = [" ".join(words), " ".join(half), " ".join(changed).upper(), make_text(3, 400), "!!!", "???"]
    file = write_lines(tmp_path / "in.jsonl", texts)
    pack([file], tmp_path / "out", options(dataset, near_duplicate_similarity=0.8, unit_bytes=2000))
    assert reasons_of(tmp_path / "out") == {3: "near duplicate"}
    assert verify(tmp_path / "out", full=True) == []


def test_documents_that_quote_an_evaluation_file_go(dataset: Path, tmp_path: Path) -> None:
    evaluation = tmp_path / "evaluation.txt"
    words = [f"word{number}" for number in range(60)]
    evaluation.write_text(" ".join(words))
    quoting = "before it, " + ",\n".join(words[20:33]).title() + " and after"
    shorter = " ".join(words[20:32]) + " something else " + " ".join(words[40:52])
    file = write_lines(tmp_path / "in.jsonl", [shorter, quoting, "short"])
    pack([file], tmp_path / "out", options(dataset, decontaminate=(str(evaluation),)))
    assert reasons_of(tmp_path / "out") == {2: "contaminated"}
    assert texts_of(tmp_path / "out") == [shorter, "short"]
    evaluation.write_text("changed " + " ".join(words))
    with pytest.raises(RequestError, match=r"evaluation\.txt has changed"):
        pack([file], tmp_path / "out", options(dataset, decontaminate=(str(evaluation),)))


def test_documents_that_are_a_short_evaluation_text_go(dataset: Path, tmp_path: Path) -> None:
    evaluation = tmp_path / "evaluation.txt"
    evaluation.write_text("too few words")
    quoting = "these are too few words, it says"
    file = write_lines(tmp_path / "in.jsonl", ["Too few\nwords!", quoting, "too few"])
    pack([file], tmp_path / "out", options(dataset, decontaminate=(str(evaluation),)))
    assert reasons_of(tmp_path / "out") == {1: "contaminated"}
    assert texts_of(tmp_path / "out") == [quoting, "too few"]
    evaluation.write_text("!!!")
    with pytest.raises(RequestError, match=r"--decontaminate: no document of .*evaluation\.txt has a word"):
        pack([file], tmp_path / "none", options(dataset, decontaminate=(str(evaluation),)))


def test_runs_are_equal_exactly_where_the_words_are() -> None:
    one, other = hash_runs("a b c d e f", 3), hash_runs("X, B c\tD! e", 3)
    assert len(one) == 4
    assert np.argwhere(one[:, None] == other[None, :]).tolist() == [[1, 1], [2, 2]]
    assert len(hash_runs("too short", 3)) == 1
