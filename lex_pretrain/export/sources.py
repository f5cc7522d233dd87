"""The Python files of an exported folder: the project's own, with the imports among them made relative."""

import re
from collections.abc import Sequence
from importlib.resources import files

from lex_pretrain import __version__

_OWN_IMPORT = re.compile(r"^( *)from (lex_pretrain[\w.]*)\.(\w+) import ", re.MULTILINE)


def collect_sources(modules: Sequence[str]) -> dict[str, str]:
    """File name and text of each module and of all that it imports from this project, for one flat folder.

    The library copies the modules that a file imports with a dot, and theirs, to where it runs them. ValueError where
    two modules would have the same file name.
    """
    origins: dict[str, str] = {}
    sources: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        package, _, name = module.rpartition(".")
        file_name = f"{name}.py"
        if origins.setdefault(file_name, module) != module:
            raise ValueError(f"{origins[file_name]} and {module} would both be {file_name}")
        if file_name in sources:
            continue
        text = files(package).joinpath(file_name).read_text(encoding="utf-8")
        waiting += [f"{found[2]}.{found[3]}" for found in _OWN_IMPORT.finditer(text)]
        origin = f"# {module} of lex-pretrain {__version__}, MIT licence.\n"
        sources[file_name] = origin + _OWN_IMPORT.sub(r"\1from .\3 import ", text)
    return sources
