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
IMAGE_MODEL_ROOT = "/models"


def manifest_reader() -> Callable[[Path], Any]:
    """A function that reads one LLMDeployment and raises RuntimeFailure (InvalidConfig) with one clear sentence.

    Raises:
        InvalidConfigError: this installation has no operator package, or $MILLSTREAM_ALLOWED_ENV is no list of names.
    """
    _require_operator_package()
    from millstream_operator.api.load import ManifestError, load_manifest

    allowed_env = _allowed_env()

    def read(path: Path) -> Any:
        try:
            return load_manifest(path, allowed_env)
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

    allowed_env = _allowed_env()
    return lambda path: [str(error) for error in manifest_errors(path, allowed_env)]


def _require_operator_package() -> None:
    try:
        import millstream_operator.api.load  # noqa: F401 - whether it is there
    except ModuleNotFoundError as error:
        raise InvalidConfigError(
            "Reading an LLMDeployment file needs the operator package, which this installation (a runtime image?) "
            "does not have; give a model folder instead."
        ) from error


def _allowed_env() -> tuple[str, ...]:
    """Names of variables that the cluster's default image takes besides: the chart's runtime.allowedEnv."""
    names = tuple(filter(None, map(str.strip, os.environ.get(ALLOWED_ENV_VARIABLE, "").split(","))))
    for name in names:
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            raise InvalidConfigError(
                f"{ALLOWED_ENV_VARIABLE} holds {name[:80]!r}, which is no variable's name; give names such as A,B, as "
                "the chart's runtime.allowedEnv has them."
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
