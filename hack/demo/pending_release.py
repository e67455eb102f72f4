"""Recover from an interrupted helm: its release stays "pending" and refuses every later upgrade.

helm records an upgrade before it begins. An interrupt at the wrong moment leaves that record, and the next attempt
fails with "another operation is in progress". Deleting the record restores the last real state of the release. That is
safe only where one person at a time installs, as here.
"""

from __future__ import annotations


def forget_pending(release: str, namespace: str) -> tuple[str, ...]:
    """The command that deletes the records of unfinished operations; it has no effect where there is none."""
    pending = "status in (pending-install,pending-upgrade,pending-rollback)"
    selector = f"owner=helm,name={release},{pending}"
    return ("kubectl", "delete", "secret", "--namespace", namespace, "--selector", selector)
