"""What every source answers: which content exactly, in which files or layers, and what its errors mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.sources.client import Client, TransferError
from millstream_runtime.sources.transfer import RemoteFile


@dataclass(frozen=True, slots=True)
class Layer:
    """A tar archive, perhaps compressed. Only what lies below `root` ("" = anywhere) belongs to the model."""

    blob: RemoteFile
    root: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """A source pinned to one content. `files` by plain name; `layers` from the lowest up."""

    revision: str
    files: Mapping[str, RemoteFile]
    layers: tuple[Layer, ...] = field(default=())
    others: frozenset[str] = field(
        default=frozenset()
    )  # never fetched: their names alone, to say what is there instead of weights


class Source(Protocol):
    """A place to fetch a model from."""

    @property
    def client(self) -> Client: ...

    @property
    def identity(self) -> Mapping[str, str]:
        """What the marker records: the kind and the name, neither revision nor endpoint nor credential."""

    @property
    def requested_revision(self) -> str: ...

    def __str__(self) -> str:
        """As a person writes it: `org/name at main`."""

    def at(self, revision: str) -> Source:
        """The same source, pinned."""

    def resolve(self) -> Resolved:
        """Ask. Raises RuntimeFailure."""

    def explain(self, error: TransferError, what: str) -> RuntimeFailure:
        """One sentence that names what is wrong and what to do."""
