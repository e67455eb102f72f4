"""helm after it was interrupted: a release that stays "pending" for ever, and refuses every later upgrade.

helm writes down that an upgrade is under way before it begins. Who presses Ctrl-C at the wrong moment leaves that
record behind, and the next attempt ends with "another operation is in progress". Nothing is: taking the record away
brings the release back to its last real state. That is right only where one person at a time installs, as here.
"""

from __future__ import annotations


def forget_pending(release: str, namespace: str) -> tuple[str, ...]:
    """The command that removes the records of operations that never ended. It does nothing where there is none."""
    pending = "status in (pending-install,pending-upgrade,pending-rollback)"
    selector = f"owner=helm,name={release},{pending}"
    return ("kubectl", "delete", "secret", "--namespace", namespace, "--selector", selector)
