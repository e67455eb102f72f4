"""How many LLMDeployments may replace what serves by an adopted plan at a time (updatePolicy FollowOperator).

An adoption is under way from its record until the revision answered or failed. That is read from the records, so a
restarted operator finds the same ones. Who is waiting is remembered in the order in which it asked, and goes first.
"""

from __future__ import annotations

from typing import Any

from millstream_operator.kube.index import Index, OwnerKey, owner_key
from millstream_operator.kube.kinds import CONTROLLER_REVISION, LLM_DEPLOYMENT
from millstream_operator.rollout.revisions import newest_first, read_pin

Manifest = dict[str, Any]
MAX_CONCURRENT_ADOPTIONS = 2


class AdoptionLimit:
    """For use within one event loop."""

    def __init__(self, index: Index, most: int = MAX_CONCURRENT_ADOPTIONS) -> None:
        self._index, self._most = index, most
        self._started: dict[OwnerKey, str] = {}  # names of records that are not in the index yet
        self._queue: dict[OwnerKey, None] = {}  # who waits, in the order in which they asked

    def may_start(self, key: OwnerKey) -> bool:
        """Whether this one may adopt a plan now. Otherwise it waits in the queue until it asks again, or leaves."""
        self._queue.setdefault(key, None)
        place = list(self._queue).index(key)
        return place < self._most and place < self._most - len(self._under_way() - {key})

    def start(self, key: OwnerKey, record: str) -> None:
        """It adopts a plan. `record`: the name of the ControllerRevision that is about to be written."""
        self._queue.pop(key, None)
        self._started[key] = record

    def leave(self, key: OwnerKey) -> None:
        """It has nothing to adopt, or is gone."""
        self._queue.pop(key, None)

    def _under_way(self) -> set[OwnerKey]:
        found = set()
        owners = {owner_key(LLM_DEPLOYMENT, one): one for one in self._index.all(LLM_DEPLOYMENT)}
        for key in [key for key in self._queue if key not in owners]:
            del self._queue[key]
        for key, owner in owners.items():
            records = self._index.children(key, CONTROLLER_REVISION)
            started = self._started.get(key)
            if started is not None and any(record["metadata"]["name"] == started for record in records):
                del self._started[key]
                started = None
            if started is not None or _adopts(owner, records):
                found.add(key)
        return found


def _adopts(owner: Manifest, records: list[Manifest]) -> bool:
    """Whether its newest revision was adopted, over one that answered, and has neither answered nor failed."""
    uid = owner["metadata"].get("uid")
    mine = [one for one in records if any(o.get("uid") == uid for o in one["metadata"].get("ownerReferences", ()))]
    if len(mine) < 2 or owner.get("spec", {}).get("replicas", 1) == 0:
        return False
    newest, before = (read_pin(record) for record in newest_first(mine)[:2])
    if newest is None or before is None or newest.marks.answered or newest.marks.failure is not None:
        return False
    return before.marks.answered and newest.revision.input_hash == before.revision.input_hash
