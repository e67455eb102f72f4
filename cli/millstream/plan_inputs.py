"""Inputs of `millstream plan` from files: config.json, nodes, custom prices. Each error is one sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from millstream.manifest import model_root
from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.load import yaml_problem
from millstream_operator.api.model import ModelSource
from millstream_operator.api.spec import Accelerator, AcceleratorType, LLMDeploymentSpec
from millstream_operator.catalog.catalog_file import YAML_ERRORS, read_catalog_file
from millstream_operator.catalog.config_fields import ConfigError
from millstream_operator.catalog.gpu import CatalogError, GpuCatalog, load_catalog
from millstream_operator.catalog.gpu_names import UnknownGPUError, find_part, parse_island
from millstream_operator.catalog.inspected_model import read_inspected_head
from millstream_operator.catalog.known_models import known_shape
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.catalog.read_shape import read_shape, read_shape_file
from millstream_operator.facts.cluster_facts import ClusterFacts
from millstream_operator.facts.gpu_pods import read_pod
from millstream_operator.inventory.node_kinds import Inventory, inventory_of, whole_catalog
from millstream_operator.inventory.nodes import NodesError, nodes_of, pods_of, read_node
from millstream_operator.kube.index import Index
from millstream_operator.planning.calibration import NO_CALIBRATION, Calibration
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.requires import draft_source, head_method
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.gguf.gguf_model import gguf_files_left_out, read_gguf_folder
from millstream_runtime.sources.inspection.inspect import inspect_folder

MAX_FILE_BYTES = 512 << 20  # a thousand nodes print as some ten megabytes
DEFAULT_NAMESPACE = "default"
DRAFT_OPTION = "--draft-config"
NOT_READ = "none read, so nothing is corrected; --kubeconfig reads what the runtimes of a cluster measured"


def bad_input(message: str) -> RuntimeFailure:
    """Something that was given cannot be used; the command ends with exit code 1."""
    return RuntimeFailure(FailureReason.INVALID_CONFIG, message)


def read_catalog(path: Path | None) -> GpuCatalog:
    """The built-in catalogue, overridden by a file of custom prices and parts."""
    if path is None:
        return load_catalog()
    try:
        return read_catalog_file(path)
    except CatalogError as error:
        raise bad_input(str(error)) from None


def shape_of(source: ModelSource, config: Path | None, option: str) -> ModelShape:
    """The shape of a model: from `config` where it is given, else from the local folder or the table of known ones.

    Raises:
        RuntimeFailure: nothing says what the model looks like; the message names `option`.
    """
    try:
        if config is not None:
            return read_shape_file(config)
        if source.local is not None:
            path = model_root() / source.local.path / "config.json"
            gguf = read_gguf_folder(path.parent) if path.parent.is_dir() else None
            if gguf is not None:
                return replace(read_shape(gguf.config(), str(gguf.path)), is_gguf=True)
            if not path.is_file():
                raise bad_input(
                    f"{path} does not exist; set MILLSTREAM_MODELS_DIR to the folder of the models, or give {option}."
                )
            left_out = gguf_files_left_out([one.name for one in path.parent.iterdir() if one.is_file()])
            return replace(read_shape_file(path), gguf_left_out=next(iter(left_out), ""))
    except ConfigError as error:
        raise bad_input(str(error)) from None
    if source.hugging_face is not None:
        repository = source.hugging_face.repository
        if (found := known_shape(repository)) is not None:
            return found
        raise bad_input(f"{repository} is not in the catalogue of known models; give its config.json with {option}.")
    raise bad_input(f"The model's config.json cannot be read from a volume or image here; give it with {option}.")


def draft_shape_of(spec: LLMDeploymentSpec, config: Path | None) -> ModelShape | None:
    """The shape of the draft model or head; None where the spec names none. `config`: of --draft-config.

    A head's tensors say what it is, so its folder must be here.

    Raises:
        RuntimeFailure: nothing says what it looks like.
    """
    if (source := draft_source(spec)) is None:
        return None
    if (method := head_method(spec)) is None:
        return shape_of(source, config, DRAFT_OPTION)
    if config is not None:
        folder = config.parent
    elif source.local is not None:
        folder = model_root() / source.local.path
    else:
        raise bad_input(
            f"speculation.method is {method}, and the weights of the head cannot be read from its source here; give "
            f"the config.json in a folder of the head with {DRAFT_OPTION}."
        )
    try:
        return read_inspected_head(inspect_folder(folder), method).shape
    except ConfigError as error:
        raise bad_input(f"{folder}: {error}") from None


def require_a_draft_for(config: Path | None, deployments: Sequence[LLMDeployment]) -> None:
    """Raises RuntimeFailure: `config`, of --draft-config, and no deployment names a draft model."""
    if config is not None and all(draft_source(one.spec) is None for one in deployments):
        raise bad_input(f"{DRAFT_OPTION} needs a spec that names speculation.draftModel; leave the flag out.")


def inventory_for(
    deployment: LLMDeployment,
    catalog: GpuCatalog,
    *,
    gpus: Sequence[str],
) -> Inventory:
    """The GPUs that were given; where none were, those of accelerator.products or of the whole catalogue, to buy."""
    try:
        if gpus:
            return inventory_of([parse_island(catalog, text) for text in gpus])
        accelerator = deployment.spec.accelerator or Accelerator()
        if accelerator.type is AcceleratorType.CPU or not accelerator.products:
            return whole_catalog(catalog)
        parts = [find_part(catalog, name) for name in accelerator.products]
    except UnknownGPUError as error:
        raise bad_input(str(error)) from None
    return inventory_of(((part, part.gpus_per_node) for part in parts), hypothetical=True)


@dataclass(frozen=True, slots=True)
class ClusterObjects:
    """Nodes and pods as kubectl prints them, and what the cluster's operator measured.

    `calibration_note` says where the calibration is from, or why there is none. `image`: what that operator runs by
    default; None where it is not known. `notes`: what could not be read, for a person.
    """

    nodes: Sequence[Mapping[str, Any]]
    pods: Sequence[Mapping[str, Any]] = ()
    notes: tuple[str, ...] = ()
    calibration: Calibration = NO_CALIBRATION
    calibration_note: str = NOT_READ
    image: str | None = None

    def facts(self, deployment: LLMDeployment, catalog: GpuCatalog, shape: ModelShape) -> Facts:
        """What the operator would know of these: taints, cordons, held GPUs, and the deployment's own pods."""
        found = ClusterFacts(Index(), catalog=catalog, shapes=lambda owner, source: shape)
        found.problem = None
        found.use_calibration(self.calibration)
        found.replace_nodes(filter(None, map(read_node, self.nodes)))
        found.replace_pods(filter(None, (read_pod(_with_uid(pod)) for pod in self.pods)))
        namespace = deployment.metadata.namespace or DEFAULT_NAMESPACE
        metadata = deployment.metadata.model_copy(update={"namespace": namespace})
        return found.of(deployment.model_copy(update={"metadata": metadata}))


def _with_uid(pod: Mapping[str, Any]) -> dict[str, Any]:
    """A pod whose uid was cut out of the file still counts once."""
    metadata = {"namespace": DEFAULT_NAMESPACE, **(pod.get("metadata") or {})}
    return {**pod, "metadata": {"uid": f"{metadata['namespace']}/{metadata.get('name')}", **metadata}}


def objects_of_files(nodes: Path, pods: Path | None) -> ClusterObjects:
    """The output of `kubectl get nodes -o yaml`, and of `kubectl get pods --all-namespaces -o yaml`."""
    listed_pods = _listed(pods, pods_of, lambda pod: read_pod(_with_uid(pod))) if pods is not None else ()
    return ClusterObjects(_listed(nodes, nodes_of, read_node), listed_pods)


def _listed(
    path: Path, read: Callable[[Any], list[Mapping[str, Any]]], understand: Callable[[Mapping[str, Any]], object]
) -> list[Mapping[str, Any]]:
    """The objects of a file, each of which `understand` can read."""
    try:
        found = read(read_yaml(path, MAX_FILE_BYTES))
    except NodesError as error:
        raise bad_input(f"{path}: {error}") from None
    for number, one in enumerate(found, 1):
        try:
            understand(one)
        except (AttributeError, TypeError, LookupError, ValueError):
            raise bad_input(
                f"{path}: object {number} of {len(found)} has a field of another type than Kubernetes gives it; write "
                "the file anew with kubectl."
            ) from None
    return found


def read_yaml(path: Path, limit_bytes: int) -> Any:
    """The value of a YAML or JSON file. The C loader where PyYAML has it: a thousand nodes take seconds in Python.

    Raises:
        RuntimeFailure: the file cannot be read, is too large, or is neither.
    """
    try:
        if path.stat().st_size > limit_bytes:
            raise bad_input(f"{path}: larger than {limit_bytes >> 20} MiB.")
        text = path.read_text(encoding="utf-8")
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both are safe
    except OSError as error:
        raise bad_input(f"{path}: cannot be read: {error.strerror}.") from None
    except yaml.YAMLError as error:
        raise bad_input(f"{path}: {yaml_problem(error)}") from None
    except YAML_ERRORS:
        raise bad_input(f"{path}: not a YAML or JSON file in UTF-8.") from None
