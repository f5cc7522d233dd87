"""A table's row is a row: strict quotes, whole rows, text columns by their type, bad texts one by one."""

import csv
import re
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from data_prep.prepare import prepare
from lex_pretrain.errors import RequestError
from tests.conftest import make_text
from tests.preparing import options, pack, rejections_of, texts_of

BAD = [b"first", b"\xff\xfe no text", None, b"last"]
TEXTS = ["first", "last"]
REASONS = [(2, "not UTF-8"), (3, "text is not text")]


def reasons_of(folder: Path) -> list[tuple[int, str]]:
    return [(line["record"], line["reason"]) for line in rejections_of(folder)]


def bad_column(kind: pyarrow.DataType) -> pyarrow.Array:
    return pyarrow.array(BAD, pyarrow.large_binary()).cast(kind, safe=False)


@pytest.mark.parametrize("quote_line", [2, 12, 40])
def test_a_quote_that_is_never_closed_is_named_by_its_line(dataset: Path, tmp_path: Path, quote_line: int) -> None:
    rows = [f"{number},{make_text(number, 8).strip().splitlines()[0]}" for number in range(2, 41)]
    rows[quote_line - 2] = f'{quote_line},"' + rows[quote_line - 2].partition(",")[2]
    (tmp_path / "in.csv").write_text("id,text\n" + "\n".join(rows) + "\n")
    with pytest.raises(RequestError, match=rf"in\.csv cannot be read: the row that begins on line {quote_line} "):
        pack([tmp_path / "in.csv"], tmp_path / "out", options(dataset))
    settings = options(dataset, skip_bad_files=True, max_rejected=1)
    if quote_line > 2:
        manifest = pack([tmp_path / "in.csv"], tmp_path / "out", settings)
        assert manifest.account.rejected["unreadable file"].documents == 1
        assert len(texts_of(tmp_path / "out")) == quote_line - 2


@pytest.mark.parametrize("cell", ['"a" and b', '"a""" b'])
def test_text_after_a_closing_quote_is_a_fault(dataset: Path, tmp_path: Path, cell: str) -> None:
    (tmp_path / "in.tsv").write_text(f'text\tid\n"two\nlines"\t1\n{cell}\t2\n')
    with pytest.raises(RequestError, match=r"in\.tsv .* begins on line 4 "):
        pack([tmp_path / "in.tsv"], tmp_path / "out", options(dataset))


def test_quotes_inside_a_cell_and_all_that_a_writer_quotes_come_back(dataset: Path, tmp_path: Path) -> None:
    texts = ['say "hello"', "a, b; c\td", "two\nlines\r\nand one", "'single'", ' " ', 'plain 5" inch']
    for name, delimiter in (("in.csv", ","), ("in.tsv", "\t")):
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.writer(file, delimiter=delimiter)
            writer.writerows([["id", "text"], *enumerate(texts)])
        pack([tmp_path / name], tmp_path / f"out-{name}", options(dataset))
        assert texts_of(tmp_path / f"out-{name}") == texts


def test_a_row_of_other_cells_than_the_header_is_rejected(dataset: Path, tmp_path: Path) -> None:
    """An unquoted comma would otherwise cut the text short, and nothing would say so."""
    (tmp_path / "in.csv").write_text("id,text,more\n1,whole,x\n2,Hello, world,x\n\n3,short\n4\n")
    pack([tmp_path / "in.csv"], tmp_path / "out", options(dataset, max_rejected=1))
    assert texts_of(tmp_path / "out") == ["whole"]
    found = [(line["record"], line["reason"], line["detail"]) for line in rejections_of(tmp_path / "out")]
    assert found == [
        (2, "cells unlike the header", "line 3: 4 cells, the header has 3"),
        (3, "cells unlike the header", "line 5: 2 cells, the header has 3"),
        (4, "no key text", "line 6"),
    ]


def test_a_column_that_stands_twice_is_refused(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("text,id,text\na,1,b\n")
    with pytest.raises(RequestError, match=r"in\.csv: column text stands 2 times"):
        pack([tmp_path / "in.csv"], tmp_path / "out", options(dataset))


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()])
def test_strings_that_are_no_utf8_cost_their_row(dataset: Path, tmp_path: Path, kind: pyarrow.DataType) -> None:
    parquet.write_table(pyarrow.table({"text": bad_column(kind)}), tmp_path / "in.parquet")
    pack([tmp_path / "in.parquet"], tmp_path / "out", options(dataset, max_rejected=1))
    assert texts_of(tmp_path / "out") == TEXTS
    assert reasons_of(tmp_path / "out") == REASONS


def test_bad_strings_inside_structs_and_datasets(dataset: Path, tmp_path: Path) -> None:
    from datasets import Dataset

    column = bad_column(pyarrow.string())
    mask = pyarrow.array([False, False, True, False])
    nested = pyarrow.StructArray.from_arrays([column], ["text"], mask=mask)
    parquet.write_table(pyarrow.table({"meta": nested}), tmp_path / "nested.parquet")
    pack([tmp_path / "nested.parquet"], tmp_path / "nested", options(dataset, text_key="meta.text", max_rejected=1))
    assert reasons_of(tmp_path / "nested") == [(2, "not UTF-8"), (3, "meta.text is not text")]
    (tmp_path / "folder").mkdir()
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "folder" / "a.parquet")
    Dataset(pyarrow.table({"text": column})).save_to_disk(tmp_path / "saved")
    for given in (f"hf://{tmp_path / 'folder'}", f"hf://{tmp_path / 'saved'}"):
        output = tmp_path / f"out-{Path(given).stem}"
        prepare([given], output, options(dataset, max_rejected=1), 1)
        assert texts_of(output) == TEXTS, given
        assert reasons_of(output) == REASONS, given


def test_strings_by_number_are_text(dataset: Path, tmp_path: Path) -> None:
    coded = pyarrow.array(["first", "last", None, "first"]).dictionary_encode()
    parquet.write_table(pyarrow.table({"text": coded}), tmp_path / "in.parquet")
    pack([tmp_path / "in.parquet"], tmp_path / "out", options(dataset, max_rejected=1))
    assert texts_of(tmp_path / "out") == TEXTS
    assert reasons_of(tmp_path / "out") == [(3, "text is not text"), (4, "exact duplicate")]


COLUMNS = {
    "text": pyarrow.array([["a", "b"]]),
    "empty": pyarrow.nulls(1),
    "number": pyarrow.array([3]),
    "bytes": pyarrow.array([b"abc"]),
    "body": pyarrow.array(["good"]),
    "meta": pyarrow.array([{"title": "t", "pages": 2}]),
}


@pytest.mark.parametrize(
    ("key", "kind"),
    [("text", "list<"), ("empty", "null"), ("number", "int64"), ("bytes", "binary"), ("meta", "struct<")],
)
@pytest.mark.parametrize("given", ["parquet", "saved"])
def test_a_column_that_holds_no_text_is_named_with_those_that_do(
    dataset: Path, tmp_path: Path, key: str, kind: str, given: str
) -> None:
    from datasets import Dataset

    table = pyarrow.table(COLUMNS)
    if given == "parquet":
        source = str(tmp_path / "in.parquet")
        parquet.write_table(table, source)
    else:
        source = f"hf://{tmp_path / 'saved'}"
        Dataset(table).save_to_disk(tmp_path / "saved")
    with pytest.raises(RequestError) as caught:
        prepare([source], tmp_path / "out", options(dataset, text_key=key), 1)
    assert re.search(rf"column {key} is of type {kind}.*--text-key can name: body, meta\.title", str(caught.value))
    # The corrected command goes on in the same folder.
    prepare([source], tmp_path / "out", options(dataset, text_key="meta.title"), 1)
    assert texts_of(tmp_path / "out") == ["t"]


def test_a_missing_column_lists_those_that_would_do(dataset: Path, tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table(COLUMNS), tmp_path / "in.parquet")
    settings = options(dataset, text_key="words", max_rejected=1)
    with pytest.raises(RequestError, match="no document was fit to keep"):
        pack([tmp_path / "in.parquet"], tmp_path / "out", settings)
    assert rejections_of(tmp_path / "out")[0]["detail"] == "columns that --text-key can name: body, meta.title"
