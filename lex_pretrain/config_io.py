"""Reading a config: YAML files with a `base:` list, dotted overrides, and every fault reported at once.

OmegaConf merges, pydantic validates. A fault names the key, where it was set and the nearest right name.
"""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from lex_pretrain.config import Config
from lex_pretrain.errors import RequestError
from lex_pretrain.files import write_text

BASE_KEY = "base"
COMMAND_LINE = "the command line"


def load_config(file: Path, overrides: Sequence[str] = ()) -> Config:
    """The config of `file`, its bases and `KEY=VALUE` overrides. Raises RequestError with all faults."""
    layers = _layers(file, chain=())
    if overrides:
        layers.append((COMMAND_LINE, _parse_overrides(overrides)))
    try:
        merged = OmegaConf.merge(*(layer for _, layer in layers))
        values = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise RequestError(f"{file}: {error}") from error
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        faults = [_describe(fault, layers) for fault in error.errors()]
        raise RequestError(f"{file} is not a valid config:\n" + "\n".join(f"  {fault}" for fault in faults)) from None


def save_config(config: Config, file: Path) -> None:
    """Write the resolved config, which `load_config` reads back to the same values."""
    write_text(file, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True))


def differing_keys(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Dotted keys in which two dumped configs differ, each with both values."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [] if old == new else [f"{prefix}: {old!r} there, {new!r} here"]
    faults = []
    for key in old | new:
        faults += differing_keys(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else str(key))
    return faults


def _layers(file: Path, chain: tuple[Path, ...]) -> list[tuple[str, DictConfig]]:
    """The file's bases, in order, then the file itself, each with its name."""
    if file.resolve() in chain:
        raise RequestError(f"{file} includes itself through its `{BASE_KEY}:` list")
    try:
        loaded = OmegaConf.load(file)
    except FileNotFoundError:
        included = f" (a base of {chain[-1]})" if chain else ""
        raise RequestError(f"config file {file} does not exist{included}") from None
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise RequestError(f"config file {file} cannot be read: {error}") from error
    if not isinstance(loaded, DictConfig):
        raise RequestError(f"config file {file} must hold keys and values, not a list")
    bases = loaded.pop(BASE_KEY, None) or []
    layers = []
    for base in [bases] if isinstance(bases, str) else bases:
        layers += _layers(file.parent / base, (*chain, file.resolve()))
    return [*layers, (str(file), loaded)]


def _parse_overrides(overrides: Sequence[str]) -> DictConfig:
    for override in overrides:
        if "=" not in override:
            raise RequestError(f"override {override!r} is not KEY=VALUE, for example model.hidden_size=512")
    try:
        return OmegaConf.from_dotlist(list(overrides))
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise RequestError(f"overrides {' '.join(overrides)}: {error}") from error


def _describe(fault: ErrorDetails, layers: list[tuple[str, DictConfig]]) -> str:
    location = fault["loc"]
    key = ".".join(str(part) for part in location)
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        message = f"unknown key{_suggestion(location)}"
    elif fault["type"] == "missing":
        message = f"missing ({_description(location)})"
    elif not isinstance(fault["input"], dict):
        message += f", not {fault['input']!r}"
    origin = _origin(location, layers)
    return f"{key or 'config'}: {message}{f'  [{origin}]' if origin else ''}"


def _section(location: tuple[int | str, ...]) -> type[BaseModel] | None:
    """The section class that a key path leads to, or None below a list or a plain value."""
    section: Any = Config
    for part in location:
        field = section.model_fields.get(part) if isinstance(part, str) else None
        section = field.annotation if field else None
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            return None
    return section if isinstance(section, type) and issubclass(section, BaseModel) else None


def _suggestion(location: tuple[int | str, ...]) -> str:
    section, wrong = _section(location[:-1]), str(location[-1])
    near = difflib.get_close_matches(wrong, section.model_fields, n=1) if section else []
    if near:
        return f"; did you mean {'.'.join([*map(str, location[:-1]), near[0]])}?"
    everywhere = {
        field: f"{name}.{field}"
        for name in Config.model_fields
        for field in getattr(_section((name,)), "model_fields", ())
    }
    near = difflib.get_close_matches(wrong, everywhere, n=1, cutoff=0.8)
    if near:
        return f"; did you mean {everywhere[near[0]]}?"
    return f"; known here: {', '.join(section.model_fields)}" if section else ""


def _description(location: tuple[int | str, ...]) -> str:
    section = _section(location[:-1])
    field = section.model_fields.get(str(location[-1])) if section else None
    if field is None:
        return "required"
    target = _section(location)
    return field.description or (target.__doc__ if target and target.__doc__ else "required")


def _origin(location: tuple[int | str, ...], layers: list[tuple[str, DictConfig]]) -> str:
    """Where a key was set last: the command line, or a file with its line."""
    for name, layer in reversed(layers):
        node: Any = OmegaConf.to_container(layer)
        for part in location:
            try:
                node = node[part]
            except (KeyError, IndexError, TypeError):
                break
        else:
            if location:
                return name if name == COMMAND_LINE else f"{name}, line {_line(Path(name), location)}"
    return ""


def _line(file: Path, location: tuple[int | str, ...]) -> int:
    node = yaml.compose(file.read_text(encoding="utf-8"))
    line = node.start_mark.line if node else 0
    for part in location:
        if isinstance(node, yaml.MappingNode):
            for key_node, value_node in node.value:
                if key_node.value == str(part):
                    line, node = key_node.start_mark.line, value_node
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
            line = node.start_mark.line
    return line + 1
