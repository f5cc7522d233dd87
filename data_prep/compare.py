"""Proof against the sources: packed documents decoded and compared with the texts that they were made from."""

from pathlib import Path

import numpy as np

from data_prep.job import JOB_FILE
from data_prep.options import PrepareOptions
from data_prep.packing import shard_stem
from data_prep.readers import SegmentReader
from data_prep.records import Document
from data_prep.sources import stamp, states_of
from data_prep.units import Unit, make_units
from lex_pretrain.data.manifest import SPLITS, Manifest, Split
from lex_pretrain.data.origins import DocumentTable, kept_rows, table_file
from lex_pretrain.data.shards import TOKENIZER_FILE, documents_file, tokens_file
from lex_pretrain.errors import RequestError
from lex_pretrain.files import read_json
from lex_pretrain.progress import logger, progress
from lex_pretrain.tokenizer import Tokenizer

_COMPARED_UNITS = 8

# A document's tokens are those of this place of this split's shard.
Place = tuple[Split, int]


def compare_with_sources(folder: Path, manifest: Manifest) -> list[str]:
    """Every document of up to eight units, spread over the corpus, that does not decode to its source's text.

    Raises RequestError when the sources are no longer there as they were.
    """
    if not (folder / JOB_FILE).is_file():
        raise RequestError(f"{folder} was not prepared from text, so --full has nothing to compare it with")
    changed = [state["path"] for state in read_json(folder / JOB_FILE)["job"]["sources"] if not _is_unchanged(state)]
    if changed:
        raise RequestError(f"--full compares with the sources, and {changed[0]} is gone or has changed")
    # Sources that hold ids are read by the folder's own copy of the tokenizer.
    options = PrepareOptions.model_validate({**manifest.config, "tokenizer": folder / TOKENIZER_FILE})
    units = make_units(list(manifest.sources), options.unit_bytes)
    chosen = units[:: max(1, len(units) // _COMPARED_UNITS)][:_COMPARED_UNITS]
    tokenizer = Tokenizer(folder / TOKENIZER_FILE)
    faults = []
    num_documents = 0
    with progress("comparing with the sources", max(1, sum(unit.num_bytes for unit in chosen)), "bytes") as reporter:
        for unit in chosen:
            places = _places(folder, unit)
            num_documents += len(places)
            faults += _compare_unit(folder, unit, places, tokenizer, options)
            reporter.advance(unit.num_bytes)
    logger.info("compared %s documents with their sources", f"{num_documents:,}")
    return faults


def _is_unchanged(state: dict[str, object]) -> bool:
    source = str(state["path"])
    try:
        return stamp(source, states_of(source)) == state
    except RequestError:
        return False


def _places(folder: Path, unit: Unit) -> dict[tuple[int, int], Place]:
    """Where each packed document of the unit stands, by the segment and record that it came from."""
    table = DocumentTable.load(table_file(folder, unit.number))
    places: dict[tuple[int, int], Place] = {}
    for split in SPLITS:
        for place, row in enumerate(kept_rows(folder, unit.number, table, split).tolist()):
            places[int(table.segment[row]), int(table.record[row])] = split, place
    return places


def _compare_unit(
    folder: Path,
    unit: Unit,
    places: dict[tuple[int, int], Place],
    tokenizer: Tokenizer,
    options: PrepareOptions,
) -> list[str]:
    shards = {}
    for split in {split for split, _ in places.values()}:
        stem = shard_stem(unit.number, split)
        tokens = np.load(tokens_file(folder, stem), mmap_mode="r", allow_pickle=False)
        starts = np.load(documents_file(folder, stem), allow_pickle=False)
        shards[split] = tokens, np.append(starts, len(tokens))
    faults = []
    for index, segment in enumerate(unit.segments):
        for item in SegmentReader(segment, options):
            place = places.pop((index, item.record), None)
            if place is None or not isinstance(item, Document):
                continue
            split, number = place
            tokens, borders = shards[split]
            text = tokenizer.decode(tokens[borders[number] : borders[number + 1] - 1].tolist())
            if text != item.text:
                stem = shard_stem(unit.number, split)
                faults.append(f"{stem}: document {number} is not record {item.record} of {segment.source}")
    faults += [f"unit {unit.number}: record {record} is packed and was not read again" for _, record in places]
    return faults
