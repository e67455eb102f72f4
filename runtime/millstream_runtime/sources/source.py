"""The interface of a model source: its exact content, as files or layers, and the meaning of its errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.sources.client import Client, TransferError
from millstream_runtime.sources.transfer import RemoteFile


@dataclass(frozen=True, slots=True)
class ImageLayer:
    """A tar archive, perhaps compressed. Only entries below `root` ("" = anywhere) belong to the model."""

    blob: RemoteFile
    root: str


@dataclass(frozen=True, slots=True)
class ResolvedSource:
    """A source pinned to one content. `files` by plain name; `layers` from the lowest up."""

    revision: str
    files: Mapping[str, RemoteFile]
    layers: tuple[ImageLayer, ...] = field(default=())
    others: frozenset[str] = frozenset()  # names of files that are never fetched, for error messages


class Source(Protocol):
    """A place to fetch a model from."""

    @property
    def client(self) -> Client: ...

    @property
    def identity(self) -> Mapping[str, str]:
        """The kind and name for the marker; neither revision nor endpoint nor credential."""

    @property
    def requested_revision(self) -> str: ...

    def __str__(self) -> str:
        """As a person writes it: `org/name at main`."""

    def at(self, revision: str) -> Source:
        """The same source, pinned to `revision`."""

    def resolve(self) -> ResolvedSource:
        """Resolve the content of the source. Raises RuntimeFailure."""

    def explain(self, error: TransferError, what: str) -> RuntimeFailure:
        """Convert an error to one sentence that says what is wrong and what to do."""
