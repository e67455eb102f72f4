"""Make a quantized checkpoint from a 16-bit one, layer by layer, and compare it with its base.

    millstream quantize models/llama --method awq --calibration data.jsonl --out models/llama-4bit

Each line of the file is one document: {"messages": […], "slice": "chat"}, {"prompt": "…", "completion": "…"} or
{"text": "…"}. A tenth of the documents is held out, and judges the result as `millstream quality` does. The output
folder appears when it is complete; a run that was interrupted goes on where it stopped when the same command is given
again. Exit code 0: made; 3: made, and worse than its base by the limits of `millstream quality`; 1 and 2: not made.
docs/quantization.md says what each method costs.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from millstream.arguments import CommandLineParser, words_of
from millstream.making_arguments import (
    add_output_flags,
    add_run_flags,
    making_parser,
    require_outside,
    require_ranges,
    run_resumable,
)
from millstream.stage_progress import StageProgress
from millstream.termination import write_termination_message
from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.model_output.resumable_folder import remove_leftover
from millstream_runtime.quantize.settings import (
    FOUR_BIT,
    GGUF_TYPES,
    ActivationScheme,
    ActOrder,
    Method,
    QuantizeSettings,
    check_group_size,
    method_named,
    weights_files,
)

if TYPE_CHECKING:
    from millstream_runtime.quantize.make import MadeModel

EXIT_MADE, EXIT_WORSE = 0, 3
CHECK_DATA_VARIABLE = "MILLSTREAM_CHECK_DATA"  # what the operator sets (`rendering/preparation_job.py`)
ANSWER_VERSION = 1  # of the termination message


def run(argv: Sequence[str]) -> int:
    """Make the folder and print what it is like; EXIT_MADE, EXIT_WORSE, or 130 after Ctrl-C.

    Raises:
        RuntimeFailure: bad flags, model or data, or a full disk.
    """
    given = command_parser().parse_args(list(argv))
    settings = _settings(given)
    if settings.keeps_what_is_there():  # known without torch
        return _kept(settings)
    made = run_resumable(
        lambda progress: _make(settings, progress),
        settings.out,
        "run the same command again to go on from the last whole layer",
    )
    if isinstance(made, int):
        return made
    if made is None:
        return _kept(settings)
    print(_text(made))
    _answer(settings)
    return EXIT_WORSE if made.report is not None and made.report["verdict"] != "passed" else EXIT_MADE


def _make(settings: QuantizeSettings, progress: StageProgress) -> MadeModel | None:
    from millstream_runtime.quantize.make import make

    return make(settings, progress.say, progress)


def _kept(settings: QuantizeSettings) -> int:
    remove_leftover(settings.out, "quantize", StageProgress().say)
    print(f"{settings.out} is there already; --keep-made takes it as it is")
    _answer(settings)
    return EXIT_MADE


def _answer(settings: QuantizeSettings) -> None:
    """In a pod, leave what was made as the termination message."""
    answer = {"version": ANSWER_VERSION, "event": "quantized", "method": settings.method.value}
    write_termination_message(json.dumps(answer | {"weights_bytes": _weights_bytes(settings.out)}))


def _weights_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in weights_files(folder))


def _text(made: MadeModel) -> str:
    settings = ", ".join(f"{key} {value}" for key, value in made.described.items())
    lines = [f"made {made.folder}: {_weights_bytes(made.folder) / 1e9:.3f} GB of weights; {settings}"]
    if made.num_duplicates:
        lines.append(f"  {made.num_duplicates} lines of the calibration data repeat others and were left out")
    if made.report is None:
        lines.append("  not compared with its base: run `millstream quality` before you serve it")
    else:
        from millstream.commands.quality import report_text

        lines += ["", report_text(made.report)]
    return "\n".join(lines)


def _settings(given: argparse.Namespace) -> QuantizeSettings:
    require_ranges(
        (
            ("--sequence-tokens", given.sequence_tokens, 32, 1 << 17),
            ("--max-sequences", given.max_sequences, 1, 1 << 16),
            ("--seed", given.seed, 0, (1 << 63) - 1),
        )
    )
    require_outside(given.out, given.model)
    check_group_size(given.group_size)
    method = method_named(given.method)
    for flag, value, methods in (
        ("--group-size", given.group_size, FOUR_BIT),
        ("--act-order", given.act_order, (Method.GPTQ,)),
        ("--activation-scheme", given.activation_scheme, (Method.FP8,)),
        ("--gguf-type", given.gguf_type, (Method.GGUF,)),
    ):
        if value is not None and method not in methods:
            raise InvalidConfigError(f"{flag} is for --method {', '.join(methods)}; --method {method} has none.")
    return QuantizeSettings(
        model=given.model,
        out=Path(given.out.absolute()),
        method=method,
        group_size=given.group_size,
        calibration=given.calibration,
        held_out=given.held_out,
        check_data=given.check_data or _check_data_of_the_pod(),
        sequence_tokens=given.sequence_tokens,
        max_sequences=given.max_sequences,
        seed=given.seed,
        device=given.device,
        with_quality=not given.no_quality,
        act_order=ActOrder(given.act_order or ActOrder.STATIC),
        activation_scheme=ActivationScheme(given.activation_scheme or ActivationScheme.DYNAMIC),
        gguf_type=given.gguf_type or GGUF_TYPES[0],
        keep_made=given.keep_made,
        discard_other_work=given.discard_other_work,
    )


def _check_data_of_the_pod() -> Path | None:
    """The documents of the quality gate in the Job that quantizes: those are judged by after it."""
    named = os.environ.get(CHECK_DATA_VARIABLE)
    return Path(named) if named else None


def command_parser() -> CommandLineParser:
    """Return the flags of the command."""
    parser = making_parser("quantize", __doc__)
    flag = parser.add_argument
    flag("model", type=Path, metavar="MODEL", help="folder of the model, in 16 or 32 bits")
    flag(
        "--method",
        required=True,
        metavar="METHOD",
        help="rtn, awq, gptq, int8, fp8, nf4, gguf: see docs/quantization.md",
    )
    add_output_flags(parser, keep_made="if --out is a complete model already, leave it and succeed")
    flag("--calibration", type=Path, metavar="FILE.jsonl", help="documents like those that the model will serve")
    flag("--held-out", type=Path, metavar="FILE.jsonl", help="judge by these, and hold none of --calibration out")
    flag("--check-data", type=Path, metavar="FILE.jsonl", help="fail at once if these could not judge the result")
    flag("--no-quality", action="store_true", help="do not compare the result with its base")
    flag("--group-size", type=int, metavar="N", help="weights per scale (default: 128, 64 or 32, what fits all layers)")
    flag("--act-order", choices=words_of(ActOrder), help="of gptq: order in which inputs are rounded (default: static)")
    flag("--gguf-type", choices=GGUF_TYPES, help="of gguf: type of the layers (default: Q4_K)")
    flag(
        "--activation-scheme",
        choices=words_of(ActivationScheme),
        help="of fp8: whether activations have scales from data (default: dynamic)",
    )
    flag("--sequence-tokens", type=int, default=512, metavar="N", help="length of a sequence (default: 512)")
    flag("--max-sequences", type=int, default=128, metavar="N", help="sequences to calibrate with (default: 128)")
    add_run_flags(parser, seed="seed of what is held out and of the order")
    return parser
