"""LLMDeployment files on this machine, read with the operator's own loader, planner and renderer.

The operator package is imported only when a manifest is given: the runtime image does not contain it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from millstream.cluster_only import only_in_a_cluster, without_effect_here
from millstream_runtime.config import RuntimeConfig
from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure

MODEL_ROOT_VARIABLE = "MILLSTREAM_MODELS_DIR"
ALLOWED_ENV_VARIABLE = "MILLSTREAM_ALLOWED_ENV"
ALLOWED_ANNOTATIONS_VARIABLE = "MILLSTREAM_ALLOWED_ANNOTATIONS"
ALLOWED_PRIORITY_CLASSES_VARIABLE = "MILLSTREAM_ALLOWED_PRIORITY_CLASSES"
NETWORK_MODE_VARIABLE = "MILLSTREAM_NETWORK_MODE_DISABLED"
IMAGE_MODEL_ROOT = "/models"


def manifest_reader() -> Callable[[Path], Any]:
    """A function that reads one LLMDeployment and raises RuntimeFailure (InvalidConfig) with one clear sentence.

    Raises:
        InvalidConfigError: this installation has no operator package, or what a cluster allows, as
            $MILLSTREAM_ALLOWED_ENV says it, is malformed.
    """
    _require_operator_package()
    from millstream_operator.api.load import ManifestError, load_manifest

    allowed = _allowed()

    def read(path: Path) -> Any:
        try:
            return load_manifest(path, allowed)
        except ManifestError as error:
            raise RuntimeFailure(FailureReason.INVALID_CONFIG, str(error)) from error

    return read


def manifest_checker() -> Callable[[Path], list[str]]:
    """A function that lists all errors of all LLMDeployments of a file, each as one sentence.

    Raises:
        InvalidConfigError: as `manifest_reader`.
    """
    _require_operator_package()
    from millstream_operator.api.load import manifest_errors

    allowed = _allowed()
    return lambda path: [str(error) for error in manifest_errors(path, allowed)]


def _require_operator_package() -> None:
    try:
        import millstream_operator.api.load  # noqa: F401 - whether it is there
    except ModuleNotFoundError as error:
        raise InvalidConfigError(
            "Reading an LLMDeployment file needs the operator package, which this installation (a runtime image?) "
            "does not have; give a model folder instead."
        ) from error


def _allowed() -> Any:
    """What the cluster's administrators allow besides, as `Allowed`: the chart's runtime.allowedEnv and authors."""
    from millstream_operator.api.validation.allowed import Allowed

    mode = os.environ.get(NETWORK_MODE_VARIABLE, "Refused").strip()
    if mode not in ("Allowed", "Refused"):
        raise InvalidConfigError(
            f"{NETWORK_MODE_VARIABLE} is {mode[:80]!r}; give Allowed or Refused, as the chart's "
            "authors.networkModeDisabled has it."
        )
    return Allowed(
        env=_names(ALLOWED_ENV_VARIABLE, "[A-Za-z_][A-Za-z0-9_]*", "variable's name", "runtime.allowedEnv"),
        annotations=_names(
            ALLOWED_ANNOTATIONS_VARIABLE,
            "[-a-z0-9.]+/[-A-Za-z0-9_.]+",
            "annotation's key",
            "authors.allowedAnnotations",
        ),
        priority_classes=_names(
            ALLOWED_PRIORITY_CLASSES_VARIABLE, "[-a-z0-9.]+", "PriorityClass's name", "authors.allowedPriorityClasses"
        ),
        network_mode_disabled=mode == "Allowed",
    )


def _names(variable: str, pattern: str, what: str, chart_value: str) -> tuple[str, ...]:
    """The names that an environment variable lists, with commas between them."""
    names = tuple(filter(None, map(str.strip, os.environ.get(variable, "").split(","))))
    for name in names:
        if not re.fullmatch(pattern, name):
            raise InvalidConfigError(
                f"{variable} holds {name[:80]!r}, which is no {what}; give names such as A,B, as the chart's "
                f"{chart_value} has them."
            )
    return names


def config_from_manifest(path: Path, host: str, api_keys_file: str | None = None) -> RuntimeConfig:
    """The configuration that the operator would give a pod of this deployment, with a local model root and address.

    What needs the operator and has no effect here is named on stderr. `api_keys_file` takes the place of the Secret
    that spec.auth names, which exists only in a cluster.

    Raises:
        RuntimeFailure: the file is missing, malformed or invalid, or cannot be planned.
    """
    deployment = manifest_reader()(path)
    from millstream_operator.planning.facts import Facts
    from millstream_operator.planning.plan import PlanDefaults
    from millstream_operator.planning.requires import refusal
    from millstream_operator.planning.spec_plan import plan_from_spec
    from millstream_operator.rendering.runtime_config import boot_config, live_config

    if (hint := only_in_a_cluster(deployment.spec)) is not None:
        raise RuntimeFailure(FailureReason.UNSUPPORTED_BY_RUNTIME, f"{path}: {hint}")
    # A draft model's folder is here already: nothing inspects it before the runtime does.
    planned = plan_from_spec(deployment, PlanDefaults(), Facts(draft_is_inspected=True))
    if (missing := refusal(planned.requires)) is not None:
        raise RuntimeFailure(FailureReason.UNSUPPORTED_BY_RUNTIME, f"{path}: {missing}")
    if planned.api_keys is not None and api_keys_file is None:
        raise InvalidConfigError(
            f"{path}: spec.auth.apiKeysSecretRef names a Secret of a cluster; here give the keys by "
            "--api-keys-file FILE."
        )
    if (without_effect := without_effect_here(deployment.spec)) is not None:
        print(f"{path}: {without_effect}", file=sys.stderr)
    boot = replace(boot_config(planned, model_root=str(model_root()), host=host), api_keys_file=api_keys_file)
    live = live_config(deployment.spec)
    asked = deployment.spec.runtime is not None and deployment.spec.runtime.log_level is not None
    # A pod logs at Info by default; here the terminal and $MILLSTREAM_LOG_LEVEL decide.
    return RuntimeConfig.of(boot, live if asked else replace(live, log_level=None))


def model_root() -> Path:
    """Where a relative `spec.model.source.local.path` starts: $MILLSTREAM_MODELS_DIR, else ./models, else /models."""
    configured = os.environ.get(MODEL_ROOT_VARIABLE)
    if configured:
        return Path(configured)
    local = Path("models")
    return local if local.is_dir() else Path(IMAGE_MODEL_ROOT)
