"""README's commands for one's own text, on a few books and on some more."""

import random
import re
import shlex
from pathlib import Path

import pytest

from tests.conftest import Program

README = Path(__file__).parent.parent / "README.md"
SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er", "il", "os", "um")]


def write_books(folder: Path, count: int) -> None:
    """Invented novels of some 200 KB, with words enough for the vocabulary that README asks for."""
    folder.mkdir()
    generator = random.Random(7)
    words = ["".join(generator.choices(SYLLABLES, k=generator.randint(1, 4))) for _ in range(12_000)]
    for number in range(count):
        lines = (" ".join(generator.choices(words, k=12)).capitalize() + "." for _ in range(1800))
        (folder / f"book {number}.txt").write_text("\n".join(lines))


def own_text_commands() -> list[list[str]]:
    section = README.read_text(encoding="utf-8").partition("## On your own text")[2].partition("\n## ")[0]
    block = re.findall(r"^```\n(.*?)^```", section, re.DOTALL | re.MULTILINE)[0]
    return [words[1:] for line in block.splitlines() if (words := shlex.split(line))[0] == "lex-pretrain"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 20])
def test_readme_goes_from_books_to_an_exported_model(program: Program, tmp_path: Path, count: int) -> None:
    """As it stands there, but for the number of steps."""
    write_books(tmp_path / "my-texts", count)
    (tmp_path / "configs").symlink_to(README.parent / "configs")
    commands = own_text_commands()
    assert [words[0] for words in commands] == ["prepare", "train", "evaluate", "generate", "export"]
    for words in commands:
        shorter = [re.sub(r"^train\.num_steps=\d+$", "train.num_steps=20", word) for word in words]
        done = program(*shorter)
        assert done.returncode == 0, done.stderr
        if words[0] == "prepare":
            splits = re.findall(r"(train|validation|test)\s+│\s+(\d+) │", done.stderr)
            assert sum(int(number) for _, number in splits) == count
            assert all(int(number) for _, number in splits)
    assert (tmp_path / "evaluation" / "report.html").is_file()
    assert (tmp_path / "exported" / "model.safetensors").is_file()
