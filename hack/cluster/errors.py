"""The one error a user is meant to see: a single clear sentence that names the fix."""

from __future__ import annotations


class ClusterError(Exception):
    """Something the user can act on; its text is one sentence, printed without a traceback."""
