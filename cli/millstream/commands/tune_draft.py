"""Tune a draft model for speculative decoding on the answers that its target gives to your own prompts.

    millstream tune-draft models/llama models/llama-draft --data traffic.jsonl --out models/llama-draft-tuned

Each line of the file is one document: {"messages": […], "slice": "chat"}, {"prompt": "…", "completion": "…"} or
{"text": "…"}. The target answers the prompts, and the draft learns the target's distributions on these answers. A part
of the documents is held out, and judges the result. The output folder appears when it is complete; a run that was
interrupted goes on where it stopped when the same command is given again. Exit code 0: made, and the target accepts
more of its drafts; 3: not better, and made unless --only-better is given; 1 and 2: not made. docs/draft-tuning.md
explains the figures.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream.arguments import CommandLineParser
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
from millstream_runtime.config import MAX_DRAFT_TOKENS_LIMIT
from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.model_output.resumable_folder import remove_leftover
from millstream_runtime.strict_json import read_strict_json
from millstream_runtime.tune_draft.settings import REPORT_NAME, TuneSettings

if TYPE_CHECKING:
    from millstream_runtime.tune_draft.tune import TunedDraft

EXIT_BETTER, EXIT_NOT_BETTER = 0, 3
MAX_TEMPERATURE = 2.0  # as in the API
MAX_LEARNING_RATE = 0.1


def run(argv: Sequence[str]) -> int:
    """Make the folder and print what was gained; EXIT_BETTER, EXIT_NOT_BETTER, or 130 after Ctrl-C.

    Raises:
        RuntimeFailure: bad flags, models or data, or a full disk.
    """
    settings = _settings(command_parser().parse_args(list(argv)))
    if settings.keeps_what_is_there():
        return _kept(settings)
    tuned = run_resumable(
        lambda progress: _tune(settings, progress), settings.out, "run the same command again to go on"
    )
    if isinstance(tuned, int):
        return tuned
    if tuned is None:
        return _kept(settings)
    print(_text(tuned))
    return _answered(tuned.report)


def _tune(settings: TuneSettings, progress: StageProgress) -> TunedDraft | None:
    from millstream_runtime.tune_draft.tune import tune

    return tune(settings, progress.say, progress)


def _kept(settings: TuneSettings) -> int:
    """Answer as the run did that made the folder.

    Raises:
        InvalidConfigError: its report cannot be read.
    """
    path = settings.out / REPORT_NAME
    try:
        code = _answered(read_strict_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        raise InvalidConfigError(
            f"--keep-made: {path} is no report of `millstream tune-draft`; remove that folder, or give another --out."
        ) from None
    remove_leftover(settings.out, "tune-draft", StageProgress().say)
    print(f"{settings.out} is there already; --keep-made takes it as it is")
    return code


def _answered(report: dict[str, Any]) -> int:
    """The exit code. In a pod verdict and figures are the termination message, too, as one line of JSON."""
    from millstream_runtime.tune_draft.tuning_report import BETTER, summary

    write_termination_message(summary(report))
    return EXIT_BETTER if report["verdict"] == BETTER else EXIT_NOT_BETTER


def _text(tuned: TunedDraft) -> str:
    found = tuned.report
    made = f"made {tuned.folder}" if tuned.is_made else f"did not make {tuned.folder}"
    lines = [f"{made}: {found['verdict']}"]
    if tuned.num_duplicates:
        lines.append(f"  {tuned.num_duplicates} lines repeat others and were left out")
    if tuned.num_cut:
        lines.append(f"  {tuned.num_cut} prompts are longer than --sequence-tokens allows: their ends were used")
    lines += [
        "",
        f"  {'slice':<16}{'answers':>9}{'tokens':>9}{'stand before':>14}{'after':>9}{'points':>9}"
        f"{'per check of ' + str(found['draft_tokens_per_check']):>22}",
    ]
    lines += [_row(one) for one in found["slices"]]
    lines += [f"  {reason}." for reason in found["reasons"]]
    return "\n".join(lines)


def _row(one: dict[str, Any]) -> str:
    before, after = one["before"], one["after"]
    per_check = f"{before['accepted_tokens_per_check']:.2f} to {after['accepted_tokens_per_check']:.2f}"
    return (
        f"  {one['slice']:<16}{one['answers']:>9}{one['tokens']:>9}"
        f"{before['percent']:>12.1f} %{after['percent']:>7.1f} %"
        f"{one['gain_points']['value']:>+9.1f}{per_check:>22}"
    )


def _settings(given: argparse.Namespace) -> TuneSettings:
    ranges = (
        ("--steps", given.steps, 1, 100_000),
        ("--minutes", given.minutes, 1, 10_000),
        ("--temperature", given.temperature, 0, MAX_TEMPERATURE),
        ("--max-answer-tokens", given.max_answer_tokens, 8, 1 << 14),
        ("--sequence-tokens", given.sequence_tokens, 32, 1 << 15),
        ("--max-documents", given.max_documents, 20, 100_000),
        ("--rows", given.rows, 2, 1024),
        ("--draft-tokens", given.draft_tokens, 1, MAX_DRAFT_TOKENS_LIMIT),
        ("--seed", given.seed, 0, (1 << 62) - 1),
    )
    require_ranges(ranges)
    require_outside(given.out, given.target, given.draft)
    rate = given.learning_rate
    if rate is not None and not (math.isfinite(rate) and 0 < rate <= MAX_LEARNING_RATE):
        raise InvalidConfigError(f"--learning-rate is {rate}; it must be above 0 and at most {MAX_LEARNING_RATE}.")
    if given.steps is not None and given.minutes is not None:
        raise InvalidConfigError("--steps and --minutes both bound the training; give one of them.")
    return TuneSettings(
        target=given.target,
        draft=given.draft,
        data=given.data,
        out=Path(given.out.absolute()),
        general=given.general,
        held_out=given.held_out,
        steps=given.steps,
        minutes=given.minutes,
        temperature=given.temperature,
        answer_tokens=given.max_answer_tokens,
        sequence_tokens=given.sequence_tokens,
        max_documents=given.max_documents,
        rows=given.rows,
        learning_rate=rate,
        draft_tokens=given.draft_tokens,
        seed=given.seed,
        device=given.device,
        keep_made=given.keep_made,
        discard_other_work=given.discard_other_work,
        only_better=given.only_better,
    )


def command_parser() -> CommandLineParser:
    """Return the flags of the command."""
    parser = making_parser("tune-draft", __doc__)
    flag = parser.add_argument
    flag("target", type=Path, metavar="TARGET", help="folder of the model that is served, in any format that is served")
    flag("draft", type=Path, metavar="DRAFT", help="folder of its draft, in 16 or 32 bits")
    flag("--data", type=Path, required=True, metavar="FILE.jsonl", help="prompts like those that are served")
    add_output_flags(parser, keep_made="if --out is a tuned draft already, leave it; the exit code is its")
    flag("--only-better", action="store_true", help="make no folder of a draft that is not better")
    flag(
        "--general",
        type=Path,
        metavar="FILE.jsonl",
        help="documents of other work that must not get worse; a quarter of each step trains on them",
    )
    flag("--held-out", type=Path, metavar="FILE.jsonl", help="judge by these documents, and train on all of --data")
    flag(
        "--minutes",
        type=int,
        metavar="N",
        help="limit of the whole run; the number of steps follows from the measured speed",
    )
    flag("--steps", type=int, metavar="N", help="steps of training (default: each sequence is seen three times)")
    flag(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="temperature of the requests that are served; 0: greedy alone (default: 1)",
    )
    flag("--max-answer-tokens", type=int, default=256, metavar="N", help="length of an answer (default: 256)")
    flag(
        "--sequence-tokens",
        type=int,
        default=1024,
        metavar="N",
        help="limit of prompt and answer together (default: 1024)",
    )
    flag(
        "--max-documents",
        type=int,
        default=2000,
        metavar="N",
        help="documents to train on, of each file (default: 2000)",
    )
    flag("--rows", type=int, default=16, metavar="N", help="sequences per training step (default: 16)")
    flag(
        "--learning-rate",
        type=float,
        metavar="X",
        help="peak of the learning rate (default: 0.25 / hidden size of the draft)",
    )
    flag(
        "--draft-tokens", type=int, default=5, metavar="N", help="drafts per check in the reported figures (default: 5)"
    )
    add_run_flags(parser, seed="seed of what is held out, of the drawn answers and of the order")
    return parser
