"""The image's build file: what can be known of it without building it."""

import io
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, str]]:
    """Instructions and their values, in the file's order."""
    parser = DockerfileParser(fileobj=io.BytesIO((ROOT / "launch" / "Containerfile").read_bytes()))
    return [(step["instruction"], step["value"]) for step in parser.structure if step["instruction"] != "COMMENT"]


def copied(steps: list[tuple[str, str]]) -> list[str]:
    return [source for instruction, value in steps if instruction == "COPY" for source in shlex.split(value)[:-1]]


def test_what_is_copied_is_all_that_reaches_the_build(steps: list[tuple[str, str]]) -> None:
    """.dockerignore leaves everything out but for these: no environment, run or secret slips into an image."""
    for source in copied(steps):
        assert (ROOT / source).exists(), source
    first, *others = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert first == "*"
    assert sorted(line[1:] for line in others if line.startswith("!")) == sorted(copied(steps))


def test_all_that_the_installation_needs_is_copied_before_it(steps: list[tuple[str, str]]) -> None:
    names = [f"{instruction} {value}" for instruction, value in steps]
    first, last = (names.index(f"RUN python -m pip install {words}.") for words in ("", "--no-deps --force-reinstall "))
    assert {"pyproject.toml", PROJECT["project"]["readme"]} <= set(copied(steps[:first]))
    packages = {name.rstrip("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages <= set(copied(steps[first:last]))


def test_it_runs_the_program_as_another_user_than_root(steps: list[tuple[str, str]]) -> None:
    by_name = dict(steps)
    (entry_point,) = json.loads(by_name["ENTRYPOINT"])
    assert entry_point in PROJECT["project"]["scripts"]
    user = int(by_name["USER"].split(":")[0])
    assert user > 0
    assert any(re.search(rf"useradd .*--uid {user}\b", value) for instruction, value in steps if instruction == "RUN")


def test_its_python_is_the_one_that_the_project_is_checked_with(steps: list[tuple[str, str]]) -> None:
    base_image = next(value for instruction, value in steps if instruction == "ARG" and value.startswith("BASE_IMAGE="))
    assert f":{PROJECT['tool']['mypy']['python_version']}-" in base_image
    assert dict(steps)["FROM"] == "${BASE_IMAGE}"
