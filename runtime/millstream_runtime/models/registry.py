"""Load a model: config.json, then the weights, by the file that `model_families.py` names for its architecture."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from millstream_runtime.config_json_fields import problem_with_unread, unread_fields
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.gguf.gguf_model import gguf_files_left_out, read_gguf_folder
from millstream_runtime.logs import log
from millstream_runtime.model_families import RUNNABLE, WITH_VISION, with_class_defaults
from millstream_runtime.models.arithmetic import Arithmetic
from millstream_runtime.models.config.fields import Fields
from millstream_runtime.models.config.model_config import ModelConfig, architecture_of
from millstream_runtime.models.config.text_config import language_model_fields
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.linear.tensor_parallel import SINGLE_PROCESS, Ranks
from millstream_runtime.models.loading.layer_kernels import LayerKernels
from millstream_runtime.models.loading.open_checkpoint import open_checkpoint
from millstream_runtime.models.loading.placement import Placement
from millstream_runtime.models.loading.staged_placement import placement_for
from millstream_runtime.models.loading.tied_head import with_stored_head
from millstream_runtime.models.loading.unread_tensors import refuse_unread
from millstream_runtime.models.loading.weights import ExpectedWeights, LayoutOf, LoadedWeights, Weights
from millstream_runtime.quantization.layouts import layout_for
from millstream_runtime.quantization_config.modelopt import MODELOPT_LIMIT_BYTES, MODELOPT_NAME, refuse_modelopt
from millstream_runtime.strict_json import read_strict_json

if TYPE_CHECKING:
    from millstream_kernels.cpu.bfloat16.product import Bfloat16Product
    from millstream_kernels.cpu.loaded_code import LoadedCode

OnRead = Callable[[int, int], None]  # done_bytes, total_bytes


@dataclass(frozen=True, slots=True)
class FamilyCode:
    """The two functions of a family's file. `build` gets the config that `read_config` made, a subclass or not."""

    read_config: Callable[[Fields], ModelConfig]
    build: Callable[[Any, Weights], Decoder]


ARCHITECTURES = {family.architecture: family for family in RUNNABLE}
OTHER_NAMES = {name: family.architecture for family in RUNNABLE for name in family.other_architectures}


def family_code(architecture: str) -> FamilyCode:
    """Import the file that runs a runnable architecture; the others stay unread.

    Raises:
        KeyError: no runnable family of the table has this architecture.
    """
    module = importlib.import_module(f"millstream_runtime.models.families.{ARCHITECTURES[architecture].module}")
    return FamilyCode(module.read_config, module.build)


def load_model_config(folder: Path) -> ModelConfig:
    """Read `config.json`, or the metadata of a GGUF file, and, where it exists, `generation_config.json`.

    Raises:
        RuntimeFailure: CheckpointInvalid (no folder, unreadable JSON, a field missing or impossible) or
            UnsupportedByRuntime (another architecture, activation, rope type, or a quantised checkpoint).
    """
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise RuntimeFailure(
            FailureReason.CHECKPOINT_INVALID,
            f"Model folder {folder} {problem}; name a folder with config.json and *.safetensors, or with *.gguf.",
        )
    gguf = read_gguf_folder(folder)
    fields = Fields(folder / "config.json") if gguf is None else Fields(gguf.path, gguf.config())
    architecture = architecture_of(fields)
    if architecture in WITH_VISION:
        fields = language_model_fields(fields, WITH_VISION[architecture])
        architecture = architecture_of(fields)
    if architecture in OTHER_NAMES:
        architecture = OTHER_NAMES[architecture]
        fields = Fields(fields.path, {**fields.values, "architectures": [architecture]})
    if architecture not in ARCHITECTURES:
        raise fields.unsupported("architecture", architecture, ", ".join((*ARCHITECTURES, *OTHER_NAMES, *WITH_VISION)))
    if gguf is None and (unread := unread_fields(fields.values, ARCHITECTURES[architecture].model_type)):
        raise RuntimeFailure(FailureReason.CHECKPOINT_INVALID, f"{fields.path}: {problem_with_unread(unread)}")
    with_defaults = Fields(fields.path, with_class_defaults(fields.values, ARCHITECTURES[architecture]))
    config = family_code(architecture).read_config(with_defaults)
    if config.quantization is None:
        _refuse_modelopt(folder)
    return with_stored_head(config, folder)


def _refuse_modelopt(folder: Path) -> None:
    """See `refuse_modelopt`; a file that is no such JSON says nothing."""
    path = folder / MODELOPT_NAME
    if not path.is_file() or path.stat().st_size > MODELOPT_LIMIT_BYTES:
        return
    try:
        values = read_strict_json(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(values, dict):
        refuse_modelopt(values, str(path))


def expected_weights(
    config: ModelConfig, numbers: Arithmetic | torch.dtype, ranks: Ranks = SINGLE_PROCESS
) -> ExpectedWeights:
    """Every tensor that a checkpoint of this configuration must hold, and the bytes that a rank's share will take.

    `numbers`: as in `load_model`.

    Raises:
        InvalidConfigError: the model cannot be divided by the number of ranks; the message names what does not divide.
    """
    weights = ExpectedWeights(numbers, ranks, layouts_of(config))
    family_code(config.architecture).build(config, weights)
    return weights


def load_model(
    config: ModelConfig,
    folder: Path,
    numbers: Arithmetic | torch.dtype,
    device: torch.device,
    ranks: Ranks = SINGLE_PROCESS,
    on_read: OnRead | None = None,
    copy_budget_bytes: int = 0,
    kernels: LayerKernels | None = None,
    *,
    may_round_activations: bool = True,
    code: LoadedCode | None = None,
    product: Bfloat16Product | None = None,
) -> Decoder:
    """Check every tensor of the folder's checkpoint, then load this rank's share; nothing else is read.

    Args:
        numbers: a type is that of all.
        copy_budget_bytes: what second copies of linear weights may take, on a device that uses them.
        kernels: what computes norms, gates and packed linears.
        may_round_activations: see `TensorSource`; not where the user names the arithmetic.
        code: what computes products by weights that a CPU holds in 16 bits.
        product: what computes those of layers where `numbers.rounds_products`.
        on_read: called before the first tensor and after each, with the bytes read so far and the bytes of the share.

    Raises:
        RuntimeFailure: CheckpointInvalid, naming file and tensor; InvalidConfig, as `expected_weights`.
    """
    with open_checkpoint(folder, is_tied=config.tie_word_embeddings) as checkpoint:
        wanted = expected_weights(config, numbers, ranks)
        checkpoint.check(wanted.expected.items(), wanted.dtypes, wanted.optional, wanted.squeezable, wanted.documents)
        if ranks.rank == 0:
            refuse_unread(checkpoint, wanted.expected, config)
            log_what_is_read(config, folder, checkpoint.num_skipped)
        total_bytes = sum(numel * checkpoint.element_bytes(name) for name, numel in wanted.reads if name in checkpoint)

        def report() -> None:
            if on_read is not None:
                on_read(checkpoint.bytes_read, total_bytes)

        report()
        layout_of = layouts_of(config)
        with placement_for(device) as placement:
            weights = LoadedWeights(
                checkpoint,
                numbers,
                device,
                ranks,
                report,
                copy_budget_bytes,
                layout_of,
                kernels,
                placement,
                may_round_activations=may_round_activations,
                code=code,
                product=product,
            )
            model = build_model(config, weights, placement)
        if weights.implementations and ranks.rank == 0:
            for (words, reason), layers in weights.implementations.items():
                log.info("quantized_layers", computed_by=words, layers=layers, reason=reason)
        return model


def log_what_is_read(config: ModelConfig, folder: Path, num_skipped_tensors: int) -> None:
    """Log what of the folder is not read, and what is to be said of its format."""
    if left_out := gguf_files_left_out([path.name for path in folder.iterdir() if path.is_file()]):
        about = "*.safetensors are served; put the GGUF file into a folder of its own to serve it"
        log.warning("gguf_left_out", file=left_out[0], about=about)
    if num_skipped_tensors:
        log.warning("text_only", tensors=num_skipped_tensors, about="no images: their tensors are not read")
    if config.quantization is not None and config.quantization.about:
        log.info("quantized", method=config.quantization.method, about=config.quantization.about)


def build_model(config: ModelConfig, weights: LoadedWeights, placement: Placement) -> Decoder:
    """Build the model from weights that go through `placement`, which has checked all numbers then.

    Raises:
        RuntimeFailure: CheckpointInvalid or UnsupportedByRuntime.
    """
    try:
        model: Decoder = family_code(config.architecture).build(config, weights)
    except RuntimeFailure:
        placement.finish()  # numbers that are not finite explain more than what followed from them
        raise
    placement.finish()
    return model


def layouts_of(config: ModelConfig) -> LayoutOf | None:
    """Return how each linear module is stored; None: none is quantized."""
    scheme = config.quantization
    if scheme is None:
        return None
    return cache(lambda module: layout_for(scheme.format_of(module)))
