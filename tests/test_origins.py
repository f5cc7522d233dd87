"""Which document a token belongs to, and which record of which source that document was."""

import json
import re
import shutil
from pathlib import Path

import numpy as np

from data_prep.options import PrepareOptions
from data_prep.prepare import prepare
from lex_pretrain.data.loader import Loader
from lex_pretrain.data.origins import origin_of
from lex_pretrain.data.shards import TokenDataset
from tests.conftest import make_text


def make(tmp_path: Path, dataset: Path) -> TokenDataset:
    """One large .jsonl over several units, with blank lines and duplicates, between two text files."""
    lines = [json.dumps({"text": make_text(number % 90, 60)}) if number % 7 else "" for number in range(120)]
    (tmp_path / "b.jsonl").write_text("\n".join(lines) + "\n")
    for name in ("a.txt", "c.txt"):
        (tmp_path / name).write_text(make_text(1000 + ord(name[0]), 50))
    options = PrepareOptions(
        tokenizer=dataset / "tokenizer.model", validation_fraction=0.3, test_fraction=0.0, unit_bytes=8000
    )
    prepare([str(tmp_path / name) for name in ("a.txt", "b.jsonl", "c.txt")], tmp_path / "made", options, 1)
    return TokenDataset.open(tmp_path / "made")


def test_every_document_is_traced_to_its_record(dataset: Path, tmp_path: Path) -> None:
    for split in (made := make(tmp_path, dataset)).split, "validation":
        stream = TokenDataset.open(made.folder, split)
        tokenizer = stream.tokenizer()
        for start, end in stream.document_bounds():
            place = stream.document_at(start + (end - start) // 2)
            assert (place.start, place.end) == (start, end)
            origin = origin_of(stream.folder, place.shard.stem, stream.split, place.number)
            source, record = re.fullmatch(r"(.*), record (\d+)", origin).groups()  # type: ignore[union-attr]
            text = Path(source).read_text()
            if source.endswith(".jsonl"):
                text = json.loads(text.splitlines()[int(record) - 1])["text"]
            assert tokenizer.decode(stream.read(start, end - start - 1).tolist()) == text
    assert len(made.shards) > 3


def test_windows_name_all_their_documents_and_shards_where_the_origins_are_gone(dataset: Path, tmp_path: Path) -> None:
    made = make(tmp_path, dataset)
    loader = Loader([made], [1.0], sequence_length=64, seed=1)
    samples = np.arange(5)
    bounds = list(made.document_bounds())
    _, windows = loader.order.locate(samples)
    expected = {
        bound for bound in bounds for window in windows if bound[0] <= window * 64 + 64 and bound[1] > window * 64
    }
    assert len(loader.documents(samples)) == len(expected)
    within = Loader([made], [1.0], sequence_length=64, seed=1, within_documents=True)
    assert [len(within.documents(samples[index : index + 1])) for index in range(5)] == [1] * 5
    shutil.rmtree(made.folder / ".units")
    named = loader.documents(samples)
    assert len(named) == len(expected)
    assert all(re.fullmatch(r".*/made/shard-\d{5}, document \d+", name) for name in named), named
