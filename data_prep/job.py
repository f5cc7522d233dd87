"""`prepare.json`: what a folder was begun from, so that it is only ever finished from the same, and how it went."""

import shutil
from pathlib import Path
from typing import Any

from data_prep.options import PrepareOptions
from data_prep.rejections import REJECTED_FILE
from data_prep.sources import States, list_sources, stamp, states_of
from lex_pretrain import __version__
from lex_pretrain.data.manifest import MANIFEST_FILE
from lex_pretrain.data.origins import UNITS_FOLDER
from lex_pretrain.data.shards import TOKENIZER_FILE
from lex_pretrain.errors import RequestError
from lex_pretrain.files import atomic_write, json_bytes, read_json, sha256_of_file
from lex_pretrain.folder_lock import LOCK_FILES
from lex_pretrain.progress import logger
from lex_pretrain.tokenizer import Tokenizer

JOB_FILE = "prepare.json"


def describe_job(states: States, options: PrepareOptions) -> dict[str, Any]:
    """Everything that decides the bytes of the dataset: settings, tokenizer, and the states of every source.

    Raises RequestError when the tokenizer is not a model, or a source is gone.
    """
    return {
        "version": __version__,
        "options": options.identity(),
        "tokenizer_sha256": sha256_of_file(Tokenizer(options.tokenizer).model_file) if options.tokenizer else None,
        "sources": [stamp(source, found) for source, found in states.items()],
        "evaluation_files": [stamp(source, states_of(source)) for source in evaluation_sources(options)],
    }


def evaluation_sources(options: PrepareOptions) -> list[str]:
    """The files that no document may quote from."""
    return list_sources(list(options.decontaminate)).paths if options.decontaminate else []


def check_same_job(output: Path, job: dict[str, Any]) -> None:
    """Note the job in a new folder; RequestError, naming what differs, in one that was begun from something else."""
    file = output / JOB_FILE
    if not file.is_file():
        others = [path.name for path in output.iterdir() if path.name not in LOCK_FILES]
        if others:
            raise RequestError(
                f"{output} holds something else ({', '.join(sorted(others)[:3])}); choose another --output"
            )
        save_job(output, job)
        return
    old = read_json(file).get("job")
    if old is None:
        raise RequestError(f"{file} is not of a preparation; choose another --output")
    faults = _differences(old, job)
    if faults and not _holds_work(output):
        _clear(output)
        save_job(output, job)
        logger.info("%s was begun otherwise and holds nothing yet, so it is begun anew", output)
    elif faults:
        listed = "\n".join(f"  {fault}" for fault in sorted(faults)[:10])
        more = f"\n  and {len(faults) - 10} more" if len(faults) > 10 else ""
        raise RequestError(f"{output} was begun from something else:\n{listed}{more}\nchoose another --output")


def save_job(output: Path, job: dict[str, Any], **more: Any) -> None:
    # On one line: with many inputs, laying it out would take longer than all else that is done once.
    with atomic_write(output / JOB_FILE) as file:
        file.write(json_bytes({"job": job, **more}) + b"\n")


def decided_fractions(output: Path) -> dict[str, float]:
    """The fractions of the splits that an attempt before this one found to leave none of them empty."""
    fractions: dict[str, float] = read_json(output / JOB_FILE).get("fractions", {})
    return fractions


def _holds_work(output: Path) -> bool:
    """Whether something would be lost: a dataset, or a unit in which a document was packed."""
    if (output / MANIFEST_FILE).is_file():
        return True
    records = (output / UNITS_FOLDER).glob("unit-?????.json")
    return any(read_json(record)["account"]["packed"]["documents"] for record in records)


def _clear(output: Path) -> None:
    """Remove what an attempt left that ended before any document was packed."""
    shutil.rmtree(output / UNITS_FOLDER, ignore_errors=True)
    for name in (TOKENIZER_FILE, REJECTED_FILE):
        (output / name).unlink(missing_ok=True)
    for shard in output.rglob("shard-*.npy"):
        shard.unlink()


def _differences(old: dict[str, Any], job: dict[str, Any]) -> list[str]:
    before, now = old["options"], job["options"]
    changed = [key for key in before.keys() | now.keys() if before.get(key) != now.get(key)]
    faults = [f"--{key.replace('_', '-')} was {before.get(key, 'not given')}" for key in changed]
    if old["version"] != job["version"]:
        faults.append(f"lex-pretrain was {old['version']} and is {job['version']}")
    if old["tokenizer_sha256"] != job["tokenizer_sha256"]:
        faults.append("the tokenizer file has changed" if job["tokenizer_sha256"] else "--tokenizer was given")
    for kind in ("sources", "evaluation_files"):
        states = [{state["path"]: state for state in value[kind]} for value in (old, job)]
        faults += [f"{path} is new" for path in states[1].keys() - states[0].keys()]
        faults += [f"{path} is no longer among the inputs" for path in states[0].keys() - states[1].keys()]
        both = states[0].keys() & states[1].keys()
        faults += [f"{path} has changed" for path in both if states[0][path] != states[1][path]]
    return faults
