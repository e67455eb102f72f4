"""Time limits of a connection, and how many connections may be open. Pure, but for the limit of open files.

connection made ─ head ─▶ headers complete ─ body ─▶ request complete ─▶ the engine works ─▶ the answer is written
                  │                          │                          (no limit here)       │
                  └ head_seconds             └ body_seconds per piece,                        └ write_seconds per
                    for all of it              least_body_bytes_per_second                      piece that is read
"""

from __future__ import annotations

import random
import resource
from dataclasses import dataclass

MAX_CONNECTIONS = 4096
OTHER_OPEN_FILES = 128  # sockets of the engine, log files, libraries
FURTHER_CONNECTIONS = 1024  # besides one for each generation that may be admitted


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What a client may take its time for. A slow engine never counts against its client."""

    head_seconds: float = 30.0  # from the connection, or the first byte of a further request, to the end of the headers
    body_seconds: float = 30.0  # between two pieces of a body
    least_body_bytes_per_second: float = 500.0  # on average; Apache's `MinRate`
    write_seconds: float = 60.0  # for the client to read anything of an answer that waits for it
    # A body that comes after its answer (a 413, a 401) is read and dropped for this long, so that the client, which
    # may read only when it has sent everything, gets the answer and not a reset connection.
    linger_seconds: float = 30.0
    linger_bytes: int = 64 << 20
    # A kept-alive connection ends with the first answer that begins after this age. The pods of a Service get new
    # connections alone, so a new pod would get nothing from clients that pool theirs.
    least_age_seconds: float = 60.0
    most_age_seconds: float = 120.0
    max_connections: int = MAX_CONNECTIONS

    def age_seconds(self) -> float:
        """Return the age of one connection, at random: those that were made together do not end together."""
        return random.uniform(self.least_age_seconds, self.most_age_seconds)  # noqa: S311 - no secret

    def body_seconds_left(self, seconds_so_far: float, bytes_so_far: int) -> float:
        """How long to wait for the next piece of a body. Large uploads get more time, drops that trickle in do not."""
        in_all = self.body_seconds + bytes_so_far / self.least_body_bytes_per_second
        return max(0.0, min(self.body_seconds, in_all - seconds_so_far))


def connection_limits(admission_capacity: int) -> ConnectionLimits:
    """The limits of a server that admits `admission_capacity` generations, within what this process may open.

    It is allowed to open more first, up to its hard limit: the soft limit of many container runtimes is 1024 files.
    """
    wanted = max_connections(admission_capacity, resource.RLIM_INFINITY)
    return ConnectionLimits(max_connections=max_connections(admission_capacity, _raise_open_files(wanted)))


def _raise_open_files(wanted_connections: int) -> int:
    """Raise the soft limit of open files to what that number of connections needs, where the hard limit allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = OTHER_OPEN_FILES + 2 * wanted_connections
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return soft
    raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    return raised


def max_connections(admission_capacity: int, open_files: int) -> int:
    """`open_files`: how many file descriptors the process may have, half of them for connections not yet counted."""
    wanted = max(MAX_CONNECTIONS, admission_capacity + FURTHER_CONNECTIONS)
    if open_files == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, (open_files - OTHER_OPEN_FILES) // 2))
