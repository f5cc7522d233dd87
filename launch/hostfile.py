"""Which hosts take part: hostfiles in DeepSpeed's format, a line `HOST slots=N` for each host; `#` begins a comment."""

import re
from collections.abc import Mapping
from pathlib import Path

from lex_pretrain.errors import RequestError

# A host never begins with `-`, which ssh would read as an option.
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


def select_hosts(slots: Mapping[str, int], include: str | None, exclude: str | None) -> dict[str, int]:
    """The hosts named in `include` (all if None) without those in `exclude`; both are separated by commas.

    Raises RequestError for a name that is not among the hosts, and when no host is left.
    """
    included, excluded = (
        [name.strip() for name in text.split(",")] if text is not None else None for text in (include, exclude)
    )
    for flag, names in (("--include", included), ("--exclude", excluded)):
        if unknown := [name for name in names or [] if name not in slots]:
            raise RequestError(f"{flag} {', '.join(unknown)}: not among the hosts {', '.join(slots)}")
    chosen = {
        host: count
        for host, count in slots.items()
        if (included is None or host in included) and host not in (excluded or [])
    }
    if not chosen:
        raise RequestError("--include and --exclude leave no host")
    return chosen
