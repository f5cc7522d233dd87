"""Hostfiles in DeepSpeed's format: a line `HOST slots=N` for each host; `#` begins a comment."""

import re
from pathlib import Path

from lex_pretrain.errors import RequestError

_LINE = re.compile(r"(?P<host>[A-Za-z0-9][A-Za-z0-9._:-]*)\s+slots\s*=\s*(?P<slots>\d+)")


def read_hostfile(file: Path) -> dict[str, int]:
    """Processes of each host, in the file's order. RequestError with every bad line and its number."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError:
        raise RequestError(f"hostfile {file} does not exist; hostfile.example shows the format") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"hostfile {file} cannot be read: {error}") from error
    slots: dict[str, int] = {}
    faults = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            faults.append(f"{file}, line {number}: {text!r} is not `HOST slots=N`")
        elif int(match["slots"]) == 0:
            faults.append(f"{file}, line {number}: host {match['host']} has no slots; remove it or comment it out")
        elif match["host"] in slots:
            faults.append(f"{file}, line {number}: host {match['host']} stands there twice")
        else:
            slots[match["host"]] = int(match["slots"])
    if not faults and not slots:
        faults.append(f"hostfile {file} names no host")
    if faults:
        raise RequestError("\n".join(faults))
    return slots
