"""Judge a changed model (quantized, fine-tuned, converted) by its base, on held-out documents of your own.

    millstream quality models/llama models/llama-awq --data held_out.jsonl --page report.html

Each line of the file is one document: {"messages": […], "slice": "chat"}, {"prompt": "…", "completion": "…"} or
{"text": "…"}. Documents are grouped by slice, and one slice that fails fails the candidate. Slices named code and math
have strict limits. Exit code 0: passed; 3: failed; 1 and 2: no verdict. In a pod the verdict and the figures are the
termination message, too, as one line of JSON. docs/quality.md explains the figures.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream.arguments import CommandLineParser, words_of
from millstream.saved_files import check_saved_files, write_saved_file
from millstream.stage_progress import StageProgress
from millstream.termination import unwind_on_sigterm, write_termination_message
from millstream_runtime.config import Device, DType, KVCacheDType, RuntimeConfig
from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.model_output.companion_files import model_files

if TYPE_CHECKING:
    from millstream_runtime.quality.comparison import ComparisonSettings

EXIT_PASSED, EXIT_FAILED = 0, 3
PERCENT = ("min-top1-agreement-percent", "max-flip-percent")
LIMIT_FLAGS = ("max-mean-kl", "max-p99-kl", *PERCENT, "max-perplexity-ratio")
MAX_WORST = 100


def run(argv: Sequence[str]) -> int:
    """Print the verdict; EXIT_PASSED or EXIT_FAILED.

    Raises:
        RuntimeFailure: bad flags or data, or a model that cannot be loaded.
    """
    given = command_parser().parse_args(list(argv))
    base, candidate = (_config(path, given) for path in (given.base, given.candidate))
    candidate = replace(candidate, kv_cache_dtype=KVCacheDType(given.candidate_kv_cache_dtype))
    read = (given.data, *model_files(given.base), *model_files(given.candidate))
    check_saved_files({"--json": given.json, "--page": given.page}, read)
    settings = _settings(given)
    unwind_on_sigterm()
    from millstream_runtime.quality.comparison import compare
    from millstream_runtime.quality.page import html
    from millstream_runtime.quality.summary import summary

    progress = StageProgress()
    progress.serve_in_a_pod()
    try:
        report = compare(base, candidate, settings, partial(progress, "quality"))
    finally:
        progress.close()
    print(report_text(report), flush=True)  # before a full disk can take it
    for path, text in ((given.json, json.dumps(report, indent=2) + "\n"), (given.page, html(report))):
        if path is not None:
            write_saved_file(path, text)
            print(f"saved {path}", file=sys.stderr)
    write_termination_message(summary(report))
    return EXIT_PASSED if report["verdict"] == "passed" else EXIT_FAILED


def report_text(report: dict[str, Any]) -> str:
    """The verdict and a table of the slices."""
    lines = [
        f"{report['verdict']}: {report['candidate']['path']} against {report['base']['path']}",
        "",
        f"  {'slice':<16}{'documents':>10}{'tokens':>9}{'mean KL':>10}{'p99 KL':>9}{'top-1 %':>9}{'flips %':>9}"
        f"{'perplexity':>20}",
    ]
    for one in report["slices"]:
        figures = one["figures"]
        value = {name: figure["value"] for name, figure in figures.items() if isinstance(figure, dict)}
        perplexity = f"{figures['base_perplexity']:.4g} × {value['perplexity_ratio']:.4f}"
        lines.append(
            f"  {figures['slice']:<16}{figures['num_documents']:>10}{figures['num_tokens']:>9}{value['mean_kl']:>10.4g}"
            f"{value['p99_kl']:>9.3g}{value['top1_agreement_percent']:>9.2f}{value['flip_percent']:>9.2f}{perplexity:>20}"
        )
    for one in report["slices"]:
        name = one["figures"]["slice"]
        lines += [f"  {name} failed: {words}." for words in one["failures"]]
        lines += [f"  {name} is close: {words}; more documents would tell." for words in one["unsure"]]
    if report["data"]["documents_repeated"]:
        lines.append(f"  {report['data']['documents_repeated']} lines repeat another document and were left out.")
    if report["data"]["documents_cut"]:
        lines.append(f"  {report['data']['documents_cut']} documents are longer than --max-tokens and were cut.")
    return "\n".join(lines)


def _settings(given: argparse.Namespace) -> ComparisonSettings:
    from millstream_runtime.quality.comparison import ComparisonSettings
    from millstream_runtime.quality.verdict import Workload

    limits = {}
    for flag in LIMIT_FLAGS:
        value = getattr(given, flag.replace("-", "_"))
        if value is not None:
            highest = 100.0 if flag in PERCENT else math.inf
            if not 0 <= value <= highest or value == math.inf:
                wanted = f"0 to {highest:g}" if flag in PERCENT else "a finite number from 0"
                raise InvalidConfigError(f"--{flag} is {value}; it must be {wanted}.")
            limits[flag.replace("-", "_")] = value
    for flag, value, low, high in (
        ("--max-tokens", given.max_tokens, 2, 1 << 20),
        ("--max-documents", given.max_documents, 1, 100_000),
        ("--worst", given.worst, 0, MAX_WORST),
        ("--seed", given.seed, 0, (1 << 63) - 1),
    ):
        if not low <= value <= high:
            raise InvalidConfigError(f"{flag} is {value}; it must be {low} to {high}.")
    workload = None if given.workload is None else Workload(given.workload)
    return ComparisonSettings(
        given.data, given.max_tokens, given.max_documents, given.worst, given.seed, workload, limits
    )


def _config(path: Path, given: argparse.Namespace) -> RuntimeConfig:
    config = RuntimeConfig(model=str(path), served_model_name=path.name or "model", enable_prefix_caching=False)
    return replace(config, device=Device(given.device), dtype=DType(given.dtype))


def command_parser() -> CommandLineParser:
    """Return the flags of the command."""
    parser = CommandLineParser(
        prog="millstream quality",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flag = parser.add_argument
    flag("base", type=Path, metavar="BASE", help="folder of the model that the candidate was made from")
    flag("candidate", type=Path, metavar="CANDIDATE", help="folder of the changed model")
    flag("--data", type=Path, required=True, metavar="FILE.jsonl", help="held-out documents: none of the calibration's")
    flag("--workload", choices=("general", "strict"), help="limits of all slices (default: by the slice's name)")
    for name in LIMIT_FLAGS:
        flag(f"--{name}", type=float, metavar="X", help="a limit of your own, for all slices")
    flag("--max-tokens", type=int, default=2048, metavar="N", help="longer documents are cut (default: 2048)")
    flag("--max-documents", type=int, default=100_000, metavar="N", help="take the first N (default: 100000)")
    flag("--worst", type=int, default=5, metavar="N", help="answers to show side by side (default: 5)")
    flag("--seed", type=int, default=0, metavar="N", help="seed of the intervals (default: 0)")
    flag("--device", choices=words_of(Device), default=Device.AUTO.value, help="default: CUDA where there is one")
    flag("--dtype", choices=words_of(DType), default=DType.AUTO.value, help="arithmetic of both models (default: auto)")
    flag(
        "--candidate-kv-cache-dtype",
        choices=words_of(KVCacheDType),
        default=KVCacheDType.AUTO.value,
        help="how the candidate, which may be the base itself, stores keys and values (default: auto)",
    )
    flag("--json", type=Path, metavar="FILE", help="save the report")
    flag("--page", type=Path, metavar="FILE.html", help="save the report as a page with a plot")
    return parser
