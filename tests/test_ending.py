"""How a command ends: an expected error is one message; another is a bug, and keeps its traceback."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lex_pretrain.ending import run_command
from lex_pretrain.errors import RequestError
from lex_pretrain.progress import logger


def end(error: BaseException, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    def command() -> None:
        raise error

    logger.handlers.clear()
    code = run_command(command, debug=False)
    return code, capsys.readouterr().err


def test_an_unexpected_error_says_that_it_is_a_bug_and_where_its_traceback_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, said = end(KeyError("caf\udce9"), capsys)
    assert code == 1
    assert "this is a bug of lex-pretrain" in said
    (log,) = tmp_path.glob("lex-pretrain-*.log")
    assert str(log) in said
    text = log.read_text()
    assert "Traceback" in text
    assert "KeyError" in text
    assert log.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "free some space"), (errno.EACCES, "allow it"), (errno.EIO, "Input/output error")],
)
def test_what_the_system_refuses_names_the_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, said = end(OSError(number, os.strerror(number), "some/file"), capsys)
    assert code == 1
    assert "some/file" in said
    assert words in said
    assert list(tmp_path.iterdir()) == []


def test_expected_errors_keep_their_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert end(RequestError("name it"), capsys)[0] == 2
    assert end(KeyboardInterrupt(), capsys)[0] == 130
    assert end(MemoryError(), capsys)[0] == 1


def test_a_reader_that_wants_no_more_is_no_error() -> None:
    code = (
        "import sys; sys.argv = ['lex-pretrain', 'doctor', '--help']\n"
        "from lex_pretrain import cli\n"
        "cli.typer.echo = lambda *a, **k: None\n"
        "from lex_pretrain.ending import run_command\n"
        "def write():\n"
        "    for _ in range(100_000): sys.stdout.write('x' * 100)\n"
        "sys.exit(run_command(write, debug=False))"
    )
    done = subprocess.run(
        ["bash", "-c", f'set -o pipefail; "$0" -c "$1" | head -c 10 >{os.devnull}', sys.executable, code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 141
    assert done.stderr == ""


def test_another_locale_changes_nothing(tmp_path: Path) -> None:
    """A minimal container: Python's encoding would be ASCII. Texts, names and what is printed stay as they are."""
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    texts = [f"Où l'été {number} 灯塔 " * 40 for number in range(8)]
    (tmp_path / "été").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "été" / f"где-{number}.txt").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "lex_pretrain", "prepare", "été", "--output", "out", "--vocab-size", "290"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    verified = [sys.executable, "-m", "lex_pretrain", "verify-data", "out", "--full"]
    done = subprocess.run(verified, cwd=tmp_path, env=environment, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    wrong = [sys.executable, "-m", "lex_pretrain", "verify-data", "où"]
    done = subprocess.run(wrong, cwd=tmp_path, env=environment, capture_output=True, timeout=120, check=False)
    assert "où is not a prepared dataset" in done.stderr.decode()
