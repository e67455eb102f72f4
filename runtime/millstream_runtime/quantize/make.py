"""Make a quantized checkpoint: from a model folder and calibration data to a folder that others load.

    refuse ─► hold out, pack ─► embed ─► layer by layer ─► config, tokenizer ─► compare with the base ─► rename

Memory holds one layer. What is done is on disk: a run that was killed goes on from its last whole layer, and gives the
same bytes as one that was not. The output folder appears whole, in one rename.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from millstream_runtime.config import Device, RuntimeConfig
from millstream_runtime.errors import InvalidConfigError, RuntimeFailure
from millstream_runtime.model_output.companion_files import companions_digest, copy_companions
from millstream_runtime.model_output.resumable_folder import reading, require_free
from millstream_runtime.model_output.unchanged_sources import UnchangedSources
from millstream_runtime.models.loading.checkpoint_digest import checkpoint_digest
from millstream_runtime.models.loading.open_checkpoint import open_checkpoint
from millstream_runtime.models.registry import expected_weights, load_model_config
from millstream_runtime.quality.comparison import ComparisonSettings, compare
from millstream_runtime.quality.documents import MAX_DOCUMENTS, documents_digest, read_documents_once, tokenize
from millstream_runtime.quality.held_out_part import MAX_JUDGED_TOKENS
from millstream_runtime.quality.verdict import check_enough
from millstream_runtime.quantize.calibration import CalibrationData, read_calibration
from millstream_runtime.quantize.layer_loop import LayerLoop, OnProgress
from millstream_runtime.quantize.methods.method_choice import method_for
from millstream_runtime.quantize.output import model_card
from millstream_runtime.quantize.output.gguf_metadata import check_convertible, vocabulary_fields
from millstream_runtime.quantize.output.gguf_model import write_gguf_model
from millstream_runtime.quantize.output.gguf_packing import GgufPacking
from millstream_runtime.quantize.output.packing import (
    ModuleChoice,
    Packing,
    choose_modules,
    group_size_for,
    output_bytes,
)
from millstream_runtime.quantize.output.work_folder import WorkFolder
from millstream_runtime.quantize.settings import Method, QuantizeSettings
from millstream_runtime.quantize.source_model import SourceModel
from millstream_runtime.tokenizing.tokenizer import Tokenizer

JOB_VERSION = 5  # changes when the same job gives other bytes
QUALITY_NAME, CARD_NAME = "quality.json", "README.md"
NUM_WORST = 3
MAX_UNFIT_SHOWN = 12
MIN_CALIBRATION_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class MadeModel:
    """`report`: of `quality.comparison.compare`, None where there was nothing to judge by."""

    folder: Path
    described: dict[str, object]  # its settings
    num_duplicates: int
    report: dict[str, Any] | None


def make(settings: QuantizeSettings, say: Callable[[str], None], on_progress: OnProgress) -> MadeModel | None:
    """Make `settings.out`, or go on where an earlier run stopped. None: `keep_made`, and the model is there.

    Args:
        say: shows one sentence.
        on_progress: called with the stage, and how much of it is done.

    Raises:
        RuntimeFailure: the model, the data or the output folder cannot be used, or the disk is full; one sentence.
    """
    if settings.keeps_what_is_there():
        return None
    require_free(settings.out)
    source = SourceModel.open(settings.model)
    unchanged = UnchangedSources((settings.model,), partial(checkpoint_digest, with_times=False))
    group_size = settings.group_size or group_size_for(source.outline)
    method = method_for(settings, group_size)
    packing = method.packing
    if isinstance(packing, GgufPacking):
        check_convertible(source.values, source.config)
        vocabulary_fields(source.folder, source.values, source.config.vocab_size)  # refuses a damaged one at once
    choice = choose_modules(source.outline, packing)
    _say_unfit(source, packing, choice, say)
    data = _calibration(settings, source, needs_data=method.needs_data)
    if settings.held_out is not None and settings.with_quality:
        _check_held_out(settings.held_out, "--held-out", source, settings.model)
    if settings.check_data is not None:
        _check_held_out(settings.check_data, "--check-data", source, settings.model)
    work = WorkFolder(settings.out, len(source.outline.layers), keeps_layers=not isinstance(packing, GgufPacking))
    job = _job(settings, source, packing, choice)
    with work.locked(say), reading(work.path):
        if settings.keeps_what_is_there():  # another process may have made it meanwhile
            return None
        require_free(settings.out)
        work.open(job, say, discard_other=settings.discard_other_work)
        loop = LayerLoop(source, method, choice, work, _device(settings))
        needed_bytes = output_bytes(source.outline, packing, choice, source.element_bytes)
        work.require_space(needed_bytes * (2 if isinstance(packing, GgufPacking) else 1) + loop.scratch_bytes(data))
        if work.num_done():
            say(f"going on after layer {work.num_done()} of {len(source.outline.layers)}")
        loop.run(data.sequences if data is not None else [], on_progress)
        _write_model(source, packing, choice, work, say)
        unchanged.require()
        report = _judge(settings, data, work, on_progress)
        described = {"method": settings.method.value} | packing.described()
        if method.needs_data and data is not None:
            count, length = len(data.sequences), len(data.sequences[0])
            described["calibration"] = f"{count} sequences of {length} tokens, seed {settings.seed}"
            described["FP8 KV cache"] = "static scales per layer"
        text = model_card.card(settings.out.name, settings.model.name, described, choice.unfit, report)
        work.write_text(work.model / CARD_NAME, text)
        work.finish()
    return MadeModel(settings.out, described, data.num_duplicates if data else 0, report)


def _say_unfit(source: SourceModel, packing: Packing, choice: ModuleChoice, say: Callable[[str], None]) -> None:
    if not choice.packed:
        raise InvalidConfigError(f"No linear layer of {source.folder} fits the format: {packing.needs()}.")
    if choice.unfit:
        shown, more = choice.unfit[:MAX_UNFIT_SHOWN], len(choice.unfit) - MAX_UNFIT_SHOWN
        names = ", ".join(shown) + (f" and {more} more" if more > 0 else "")
        say(f"these modules stay in the model's type ({packing.needs()}): {names}")


def _calibration(settings: QuantizeSettings, source: SourceModel, *, needs_data: bool) -> CalibrationData | None:
    if settings.calibration is None:
        if needs_data:
            raise InvalidConfigError(f"--method {settings.method} needs --calibration FILE.jsonl.")
        return None
    sequence_tokens = min(settings.sequence_tokens, source.config.max_model_len)
    asked_tokens = sequence_tokens * settings.max_sequences
    if needs_data and asked_tokens < MIN_CALIBRATION_TOKENS:
        raise InvalidConfigError(
            f"--max-sequences {settings.max_sequences} of {sequence_tokens} tokens are {asked_tokens} tokens; --method "
            f"{settings.method} needs at least {MIN_CALIBRATION_TOKENS}."
        )
    return read_calibration(
        settings.calibration,
        Tokenizer.from_folder(settings.model),
        source.config.eos_token_ids,
        sequence_tokens=sequence_tokens,
        max_sequences=settings.max_sequences,
        seed=settings.seed,
        least_tokens=MIN_CALIBRATION_TOKENS if needs_data else 0,
        hold_out=settings.held_out is None,
        must_judge=settings.with_quality,
        judged_tokens=min(MAX_JUDGED_TOKENS, source.config.max_model_len),
    )


def _check_held_out(path: Path, flag: str, source: SourceModel, model: Path) -> None:
    """Raises InvalidConfigError: the documents cannot judge the result, which is said before anything is made."""
    documents, _ = read_documents_once(path, MAX_DOCUMENTS, flag=flag)
    max_tokens = min(MAX_JUDGED_TOKENS, source.config.max_model_len)
    check_enough(tokenize(documents, Tokenizer.from_folder(model), source.config.eos_token_ids, max_tokens))


def _device(settings: QuantizeSettings) -> torch.device:
    """Raises InvalidConfigError: there is no such device."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise InvalidConfigError("--device cuda, but torch finds no CUDA device; use --device cpu.")
    on_cuda = settings.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if on_cuda else "cpu")


def judging_device(settings: QuantizeSettings) -> Device:
    """Return where the result is compared with its base: where it was made, and GGUF, which no GPU computes, on a CPU.

    Raises:
        InvalidConfigError: there is no such device.
    """
    return Device.CPU if settings.method is Method.GGUF else Device(_device(settings).type)


def _job(settings: QuantizeSettings, source: SourceModel, packing: Packing, choice: ModuleChoice) -> dict[str, Any]:
    """Everything that the bytes of the weights follow from."""
    data = settings.calibration
    return {
        "version": JOB_VERSION,
        "model": checkpoint_digest(settings.model).hex(),
        "tokenizer": companions_digest(settings.model),
        "method": settings.method.value,
        "quantization_config": packing.config(source.outline, choice),
        "calibration_data": None if data is None else documents_digest(data, "--calibration"),
        "held_out_part": settings.held_out is None,
        "sequence_tokens": settings.sequence_tokens,
        "max_sequences": settings.max_sequences,
        "seed": settings.seed,
        "device": _device(settings).type,
    }


def _write_model(
    source: SourceModel, packing: Packing, choice: ModuleChoice, work: WorkFolder, say: Callable[[str], None]
) -> None:
    """What makes layers a model, and what is copied; then the checkpoint is read as a loader would."""
    if isinstance(packing, GgufPacking):
        tensors = work.tensors()
        work.write(
            work.model / f"model-{packing.type_name}.gguf",
            lambda path: write_gguf_model(path, source, packing, tensors, say),
        )
    else:
        work.write_index()
        values = source.values | {"quantization_config": packing.config(source.outline, choice)}
        text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
        work.write_text(work.model / "config.json", text)
    copy_companions(source.folder, work)
    wanted = expected_weights(load_model_config(work.model), torch.float32)
    with open_checkpoint(work.model) as checkpoint:
        checkpoint.check(wanted.expected.items(), wanted.dtypes, wanted.optional, wanted.squeezable, wanted.documents)


def _judge(
    settings: QuantizeSettings, data: CalibrationData | None, work: WorkFolder, on_progress: OnProgress
) -> dict[str, Any] | None:
    """The report on held-out documents, written next to the weights; None where there is nothing to judge by."""
    held_out = settings.held_out
    if held_out is None and data is not None and data.held_out:
        lines = "\n".join(data.held_out) + "\n"
        held_out = work.held_out
        work.write_text(held_out, lines)
    if held_out is None or not settings.with_quality:
        return None
    asked = ComparisonSettings(held_out, MAX_JUDGED_TOKENS, 100_000, NUM_WORST, 0, None, {})
    device = judging_device(settings)
    base, candidate = (
        RuntimeConfig(model=str(folder), served_model_name="model", device=device, enable_prefix_caching=False)
        for folder in (settings.model, work.model)
    )
    try:
        report = compare(base, candidate, asked, lambda done, total: on_progress("quality", done, total))
    except RuntimeFailure as failure:
        raise RuntimeFailure(
            failure.reason,
            f"The checkpoint is made but could not be compared with its base: {failure.message} Run the same command "
            "again with --no-quality to take it as it is"
            + (", and judge it by `millstream quality --device cpu`." if device is Device.CUDA else "."),
        ) from None
    del report["date"]  # the same run gives the same file
    report["base"]["path"], report["candidate"]["path"] = settings.model.name, settings.out.name
    report["data"]["path"] = held_out.name
    text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    work.write_text(work.model / QUALITY_NAME, text)
    return report
