"""The committed table of an architecture: for each linear kernel and class of rows the tiles that its `plan()` takes.

    sm_80.json   GPUs before sm_90      sm_90.json   sm_90 and later
    {"format": 1, "capability": 90, "kernels": {"w16a16": {"measured_on": null, "choices": [
        {"most_rows": 16, "block_rows": 16, "num_warps": 4, "num_stages": 5}, ...]}}}

`python -m millstream_kernels.tune` writes one on a GPU. `measured_on` names that GPU; null: no GPU has timed the
kernel, its choices are reasoned. The variants that are compiled ahead follow from the same tables (`linear.tuned`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream_kernels.tuning.candidates import SPACES, Tiles

FOLDER = Path(__file__).parent
FORMAT = 1
ARCHITECTURES = (80, 90)
TILE_FIELDS = ("block_rows", "num_warps", "num_stages")


class TuningTableError(ValueError):
    """A table that cannot be used. The message names the file and the field."""

    def __init__(self, source: str, problem: str) -> None:
        super().__init__(f"tuning table {source}: {problem}")


@dataclass(frozen=True, slots=True)
class Choices:
    """Of one kernel."""

    by_class: Mapping[int | None, Tiles]  # by the most rows of a class, in order; None: any number
    measured_on: str | None = None  # the GPU's name; None: not timed


@dataclass(frozen=True, slots=True)
class Table:
    """Of one architecture."""

    capability: int  # 80 for sm_80
    kernels: Mapping[str, Choices]

    def tiles(self, kernel: str, num_rows: int) -> Tiles:
        """The choice for `num_rows` rows, of the first class that has room for them.

        Raises:
            KeyError: no such kernel.
            ValueError: more rows than the kernel takes.
        """
        for most_rows, tiles in self.kernels[kernel].by_class.items():
            if most_rows is None or num_rows <= most_rows:
                return tiles
        raise ValueError(f"{kernel} has no tiles for {num_rows} rows")


_tables: dict[int, Table] = {}


def architecture_of(capability: int) -> int:
    """The table that a GPU's choices come from: 80 for all before sm_90."""
    return 90 if capability >= 90 else 80


def table_of(capability: int) -> Table:
    """The table of a GPU, read once.

    Raises:
        TuningTableError: it is missing, damaged, or of another architecture.
    """
    architecture = architecture_of(capability)
    if architecture not in _tables:
        _tables[architecture] = read(path_of(architecture), architecture)
    return _tables[architecture]


def tiles_for(kernel: str, num_rows: int, capability: int) -> Tiles:
    """The tiles by which a GPU of `capability` multiplies `num_rows` rows. Raises as `table_of` and `Table.tiles`."""
    return table_of(capability).tiles(kernel, num_rows)


def classes_of(kernel: str) -> tuple[int | None, ...]:
    """The most rows of each class of a kernel, in order; None: any number."""
    return tuple(SPACES[kernel].block_rows)


@contextmanager
def using(table: Table) -> Iterator[None]:
    """`table` instead of the committed one of its architecture, in this block: to time a candidate."""
    before = _tables.get(table.capability)
    _tables[table.capability] = table
    try:
        yield
    finally:
        if before is None:
            del _tables[table.capability]
        else:
            _tables[table.capability] = before


def path_of(architecture: int) -> Path:
    """The committed file of an architecture."""
    return FOLDER / f"sm_{architecture}.json"


def read(path: Path, architecture: int) -> Table:
    """Read the table of an architecture.

    Raises:
        TuningTableError: it is missing, damaged, or of another architecture.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TuningTableError(path.name, f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise TuningTableError(path.name, "is no JSON") from None
    return parse(document, architecture, path.name)


def parse(document: Any, architecture: int, source: str) -> Table:
    """Check what a file holds. Raises: as `read`."""
    head = _fields(document, ("format", "capability", "kernels"), source, "the document")
    if head["format"] != FORMAT:
        raise TuningTableError(source, f"format is {head['format']!r}; {FORMAT} is expected")
    if head["capability"] != architecture:
        raise TuningTableError(source, f"capability is {head['capability']!r}; {architecture} is expected")
    kernels = _fields(head["kernels"], tuple(SPACES), source, "kernels")
    return Table(architecture, {name: _choices(name, kernels[name], source) for name in SPACES})


def document_of(table: Table) -> dict[str, Any]:
    """What `parse` reads."""
    kernels = {
        name: {
            "measured_on": choices.measured_on,
            "choices": [
                {"most_rows": most_rows} | {field: getattr(tiles, field) for field in TILE_FIELDS}
                for most_rows, tiles in choices.by_class.items()
            ],
        }
        for name, choices in table.kernels.items()
    }
    return {"format": FORMAT, "capability": table.capability, "kernels": kernels}


def write(path: Path, table: Table) -> None:
    """One line per choice, whole or not at all."""
    document = document_of(table)
    parts = []
    for name, kernel in document["kernels"].items():
        lines = ",\n".join(f"   {json.dumps(one)}" for one in kernel["choices"])
        head = f'{json.dumps(name)}: {{"measured_on": {json.dumps(kernel["measured_on"])}, "choices": ['
        parts.append(f"  {head}\n{lines}\n  ]}}")
    head = f' "format": {FORMAT},\n "capability": {table.capability},\n "kernels": {{\n'
    text = "{\n" + head + ",\n".join(parts) + "\n }\n}\n"
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _choices(kernel: str, value: Any, source: str) -> Choices:
    classes, fields = classes_of(kernel), _fields(value, ("measured_on", "choices"), source, f"kernels.{kernel}")
    measured_on, choices = fields["measured_on"], fields["choices"]
    if measured_on is not None and (not isinstance(measured_on, str) or not measured_on):
        problem = f"kernels.{kernel}.measured_on is {measured_on!r}; a GPU's name or null is expected"
        raise TuningTableError(source, problem)
    if not isinstance(choices, list) or len(choices) != len(classes):
        raise TuningTableError(source, f"kernels.{kernel}.choices is no list of {len(classes)}")
    found: dict[int | None, Tiles] = {}
    for number, (most_rows, choice) in enumerate(zip(classes, choices, strict=True)):
        place = f"kernels.{kernel}.choices[{number}]"
        fields = _fields(choice, ("most_rows", *TILE_FIELDS), source, place)
        for name, value in fields.items():
            if type(value) is not int and not (name == "most_rows" and value is None):
                raise TuningTableError(source, f"{place}.{name} is {value!r}; a whole number is expected")
        if fields["most_rows"] != most_rows:
            raise TuningTableError(source, f"{place}.most_rows is {fields['most_rows']!r}; {most_rows!r} is expected")
        tiles = Tiles(*(fields[name] for name in TILE_FIELDS))
        if tiles not in SPACES[kernel].candidates(most_rows):
            raise TuningTableError(source, f"{place} is no candidate of this kernel: {tiles}")
        found[most_rows] = tiles
    return Choices(found, measured_on)


def _fields(value: Any, names: tuple[str, ...], source: str, place: str) -> dict[str, Any]:
    """`value`, an object that has these fields and no others."""
    if not isinstance(value, dict):
        raise TuningTableError(source, f"{place} is no object")
    if missing := [name for name in names if name not in value]:
        raise TuningTableError(source, f"{place} lacks {', '.join(missing)}")
    if unknown := sorted({*value} - {*names}):
        raise TuningTableError(source, f"{place} has unknown fields: {', '.join(unknown)}")
    return value
