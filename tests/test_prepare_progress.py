"""What a preparation shows while it runs and at its end."""

import json
import re
from pathlib import Path

import pytest

from data_prep.running import running_units
from lex_pretrain.data.manifest import SPLITS, Manifest
from tests.conftest import Program, make_text
from tests.preparing import options, pack


def test_a_long_unit_is_seen_to_move_before_it_is_done(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("data_prep.running._SECONDS_BETWEEN_REPORTS", 0.0)
    monkeypatch.setattr("data_prep.dispatch._SECONDS_BETWEEN_LOOKS", 0.02)
    monkeypatch.setattr("lex_pretrain.progress.SECONDS_BETWEEN_LOG_LINES", 0.0)
    file = tmp_path / "in.jsonl"
    lines = [json.dumps({"text": make_text(number, 500)}) for number in range(400)]
    file.write_text("\n".join([*lines, *['{"text": ""}'] * 4]) + "\n")
    caplog.set_level("INFO", logger="lex_pretrain")
    manifest = pack([file], tmp_path / "out", options(dataset))
    shown = [record.getMessage() for record in caplog.records if record.getMessage().startswith("tokenizing:")]
    shares = [int(re.findall(r"(\d+) %", line)[0]) for line in shown]
    assert len([share for share in shares if 0 < share < 100]) > 2
    assert shares == sorted(shares)
    assert "MB/s" in shown[-1]
    assert "tokens/s" in shown[-1]
    assert f"rejected 4 empty, packed 400 into {manifest.account.packed.tokens:,} tokens" in shown[-1]
    assert shown[-1].endswith(" s left")
    assert running_units(tmp_path / "out") == {}


def test_the_end_shows_the_account_by_split_and_reason(program: Program, dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"text": make_text(number // 2, 50)}) + "\n" for number in range(40)) + '{"text": ""}\n'
    )
    arguments = ["--tokenizer", dataset / "tokenizer.model", "--validation-fraction", "0.3", "--workers", "1"]
    result = program("prepare", "in.jsonl", "--output", "out", *arguments)
    assert result.returncode == 0
    rows = {
        cells[0].strip(): [int(cell.replace(",", "")) for cell in (cells[1], cells[3])]
        for line in result.stderr.splitlines()
        if len(cells := line.strip("│┃ ").split("│")) == 4
    }
    account = Manifest.load(tmp_path / "out").account
    assert rows["read"] == [41, account.read.tokens]
    assert rows["rejected: empty"] == [1, 0]
    assert rows["rejected: exact duplicate"] == [20, account.rejected["exact duplicate"].tokens]
    assert rows["packed"] == [20, account.packed.tokens]
    assert [sum(column) for column in zip(*(rows[split] for split in SPLITS), strict=True)] == rows["packed"]
    assert account.read.tokens == account.packed.tokens + account.rejected["exact duplicate"].tokens
    assert account.balances()
    assert json.loads((tmp_path / "out" / "prepare.json").read_text())["account"] == account.model_dump(mode="json")
