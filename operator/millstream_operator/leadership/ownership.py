"""Which release manages an LLMDeployment: one, which `status.managedBy` records. Pure.

    recorded       the Lease of the recorded release          decision
    nobody         –                                          CLAIM
    this release   –                                          KEEP
    another        absent                                     CLAIM
    another        not renewed for ten minutes                CLAIM
    another        renewed since, or not readable             LEAVE

A release is known by its Lease: namespace and name. No two releases of a cluster share one, and a release that is
upgraded keeps its own. Two operators that write the same objects undo each other's writes without end, since each
renders its own keys, addresses and defaults.

A Lease counts as not renewed where this process saw it unchanged for ten minutes. Where its renewTime is ten minutes
old, a minute of it is enough: a leader renews every two seconds, so a clock that is wrong takes nothing from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

Manifest = dict[str, Any]
MANAGED_BY = "managedBy"  # of the status
STALE_SECONDS = 600.0
LEAST_UNCHANGED_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Release:
    """An installation of the operator, by its Lease."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    def as_json(self) -> dict[str, str]:
        return {"namespace": self.namespace, "name": self.name}


class LeaseState(Enum):
    ABSENT = auto()
    UNREADABLE = auto()  # this release has no right to read it
    PRESENT = auto()


@dataclass(frozen=True, slots=True)
class LeaseSight:
    """What this process knows of another release's Lease."""

    state: LeaseState
    unchanged_seconds: float = 0.0  # how long this process has seen it unchanged, on a steady clock
    renewed_seconds_ago: float | None = None  # by its renewTime and the wall clock; None: it has none that can be read

    @property
    def is_abandoned(self) -> bool:
        if self.state is not LeaseState.PRESENT:
            return self.state is LeaseState.ABSENT
        if self.unchanged_seconds >= STALE_SECONDS:
            return True
        is_old = self.renewed_seconds_ago is None or self.renewed_seconds_ago >= STALE_SECONDS
        return is_old and self.unchanged_seconds >= LEAST_UNCHANGED_SECONDS


class ManagerDecision(Enum):
    KEEP = auto()  # it is ours
    CLAIM = auto()  # record this release, then go on
    LEAVE = auto()  # write nothing to the object or its children


def manager_of(status: Mapping[str, Any]) -> Release | None:
    """Return the release that a status records; None where it records none that can be read."""
    recorded = status.get(MANAGED_BY)
    if not isinstance(recorded, Mapping):
        return None
    namespace, name = recorded.get("namespace"), recorded.get("name")
    return Release(namespace, name) if isinstance(namespace, str) and isinstance(name, str) else None


def without_others(manifests: Iterable[Manifest], own: Release) -> Iterator[Manifest]:
    """Yield the LLMDeployments that no other release manages."""
    return (manifest for manifest in manifests if manager_of(manifest.get("status") or {}) in (None, own))


def decide_manager(recorded: Release | None, own: Release, sight: LeaseSight | None) -> ManagerDecision:
    """Return what to do. `sight`: of the recorded release's Lease, where that is another than `own`."""
    if recorded == own:
        return ManagerDecision.KEEP
    if recorded is None or (sight is not None and sight.is_abandoned):
        return ManagerDecision.CLAIM
    return ManagerDecision.LEAVE


def managed_by_another(subject: str, recorded: Release, own: Release, sight: LeaseSight) -> str:
    """Return what the log and the Event say. `subject`: `LLMDeployment team/demo`."""
    when = "It takes over when that Lease has not been renewed for 10 minutes"
    if sight.state is LeaseState.UNREADABLE:
        when = "It may not read that Lease (it needs `get` on leases there), so it never takes over by itself"
    return (
        f"{subject} is managed by the release with the Lease {recorded}; this release ({own}) writes "
        f"nothing to it. {when}; to hand it over now, remove status.managedBy."
    )
