"""What a cluster's administrators allow the authors of LLMDeployments besides: the chart's values for authors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Allowed:
    """`env`: the chart's runtime.allowedEnv. The rest: its values `authors`."""

    env: Collection[str] = ()  # names of environment variables in the default image
    annotations: Collection[str] = ()  # keys of AppArmor's and seccomp's annotations
    priority_classes: Collection[str] = ()  # names that start with system-
    network_mode_disabled: bool = False


NOTHING = Allowed()
