"""The kstatus library, asked by its own small program (`hack/cluster/go/kstatus`)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from hack.cluster.steps import Steps
from hack.cluster.tools import go_tools


def verdicts(objects: Sequence[Mapping[str, Any]]) -> list[str]:
    """Current, InProgress, Failed or Terminating for each object. The program is compiled once a machine."""
    go_tools.ensure([go_tools.KSTATUS], Steps())
    done = subprocess.run(
        [go_tools.KSTATUS.binary()], input=json.dumps(list(objects)), capture_output=True, text=True, check=True
    )
    return [answer["status"] for answer in json.loads(done.stdout)]
