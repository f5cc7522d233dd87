"""What the documents show exists: every option of a shown command, every file, folder and test named."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from lex_pretrain.cli import app
from lex_pretrain.config import Config

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def shown_commands() -> list[tuple[str, list[str]]]:
    """Every `lex-pretrain` call in a code block, with the document that shows it."""
    found = []
    for document in DOCUMENTS:
        for block in re.findall(r"^```(?:\w*)\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if "lex-pretrain" in words:
                    found.append((document.name, words[words.index("lex-pretrain") + 1 :]))
    return found


def check(words: list[str]) -> None:
    """Parse a command's words as the program would, without running it."""
    command = get_command(app).commands[words[0]]  # type: ignore[attr-defined]
    options = {option: parameter for parameter in command.params for option in parameter.opts}
    if words[0] == "launch" and "--" in words:
        split = words.index("--")
        check(words[split + 1 :])
        words = words[:split]
    for word in words[1:]:
        assert not word.startswith("--") or word in options, f"{words[0]} has no {word}"
        if "=" in word and words[0] in ("train", "plan"):
            section, field = word.split("=")[0].split(".")[:2]
            assert section in Config.model_fields
            # What lies in the section `deepspeed` is DeepSpeed's.
            if section != "deepspeed":
                assert field in Config.model_fields[section].annotation.model_fields  # type: ignore[union-attr]


def test_documents_show_the_main_commands() -> None:
    shown = {words[0] for _, words in shown_commands()}
    assert {"prepare", "plan", "train", "evaluate", "generate", "launch", "verify-data"} <= shown


@pytest.mark.parametrize(("document", "words"), shown_commands(), ids=lambda value: str(value)[:60])
def test_shown_command_parses(document: str, words: list[str]) -> None:
    check(words)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_named_files_exist(document: Path) -> None:
    text = document.read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in link:
            assert (document.parent / link).exists(), link
    for path in re.findall(r"`((?:lex_pretrain|launch|configs|data_prep|tests|docs)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_named_tests_exist(document: Path) -> None:
    written = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", document.read_text()):
        assert f"def {name}(" in written, name
