"""What the Jobs of a preparation answer, and the same in words. Pure.

    {"version": 1, "event": "quantized", "weights_bytes": 3400000, …}
    {"version": 1, "event": "judged", "verdict": "passed", "slices": [{"slice": "chat", "mean_kl": 0.004, …}],
     "files": {"candidate": {"sha256": "0a1b…", "files": 9, "sampled": 1, …}, …}, …}
    {"version": 1, "event": "tuned", "verdict": "better", "slices": [{"slice": "chat", "before_percent": 40.1, …}], …}

They are written by the command line (`millstream quantize`, `quality`, `tune-draft`) as the pod's termination message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.rendering.preparation_job import StepKind
from millstream_runtime.strict_json import read_strict_json

VERSION = 1
EVENTS = {StepKind.QUANTIZE: "quantized", StepKind.JUDGE: "judged", StepKind.TUNE: "tuned"}
COMMANDS = {StepKind.QUANTIZE: "quantize", StepKind.JUDGE: "quality", StepKind.TUNE: "tune-draft"}
VERDICTS = {StepKind.JUDGE: ("passed", "failed"), StepKind.TUNE: ("better", "not better")}
MAX_SLICES, MAX_FAILURES = 6, 3  # in words: a condition is read by people
DIGITS_SHOWN = 12  # of a digest; the record has all
_SHA256 = re.compile(r"[0-9a-f]{64}")
FIGURES = ("mean_kl", "top1_agreement_percent", "perplexity_ratio")


def read_step_answer(kind: StepKind, text: str) -> dict[str, Any] | Diagnosis:
    """Return the answer in a termination message, or why it is none."""
    try:
        answer = read_strict_json(text)
    except (ValueError, RecursionError):
        answer = None
    is_known = isinstance(answer, dict) and (answer.get("version"), answer.get("event")) == (VERSION, EVENTS[kind])
    if not is_known or not isinstance(answer, dict):
        return _unknown(kind)
    if kind is StepKind.QUANTIZE:
        return answer if _is_count(answer.get("weights_bytes")) else _unknown(kind)
    verdict = answer.get("verdict")
    is_known = isinstance(verdict, str) and verdict in VERDICTS[kind] and _is_judged(answer)
    return answer if is_known else _unknown(kind)


def _is_judged(answer: Mapping[str, Any]) -> bool:
    """Whether its parts have the types that are read; another image than ours may have written it."""
    slices, left_out = answer.get("slices"), answer.get("slices_left_out") or 0
    if not isinstance(slices, list) or not all(isinstance(one, dict) for one in slices):
        return False
    lists = [answer.get("reasons"), *(one.get("failures") for one in slices)]
    return all(one is None or isinstance(one, list) for one in lists) and (not left_out or _is_count(left_out))


def has_passed(answer: Mapping[str, Any]) -> bool:
    """Whether a model that was judged may serve."""
    return answer.get("verdict") == "passed"


def is_better(answer: Mapping[str, Any]) -> bool:
    """Whether more of a tuned draft's drafts stand."""
    return answer.get("verdict") == "better"


def acceptance_in_words(answer: Mapping[str, Any]) -> str:
    """`code: 12.9 % of the drafts stood, 74.3 % stand; chat: …`: on held-out prompts."""
    slices = answer["slices"]
    words = [
        f"{one.get('slice', '?')}: {_number(one.get('before_percent'))} % of the drafts stood, "
        f"{_number(one.get('after_percent'))} % stand"
        for one in slices[:MAX_SLICES]
    ]
    left_out = len(slices) - len(words) + (answer.get("slices_left_out") or 0)
    return "; ".join(words) + (f"; {left_out} more slices" if left_out else "")


def figures_in_words(answer: Mapping[str, Any]) -> str:
    """`chat: mean KL 0.004, top-1 98.6 %, perplexity × 1.002; code: …`."""
    slices = answer["slices"]
    words = [_slice_in_words(one) for one in slices[:MAX_SLICES]]
    left_out = len(slices) - len(words) + (answer.get("slices_left_out") or 0)
    return "; ".join(words) + (f"; {left_out} more slices" if left_out else "")


def files_in_words(answer: Mapping[str, Any]) -> str:
    """`files sha256:0a1b2c3d4e5f (1 of 9 by its size, header and samples)`: of the candidate; empty where the answer
    does not name them, as that of an older image."""
    files = answer.get("files")
    candidate = files.get("candidate") if isinstance(files, dict) else None
    digest = candidate.get("sha256") if isinstance(candidate, dict) else None
    if not isinstance(candidate, dict) or not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        return ""
    words, sampled, count = f"files sha256:{digest[:DIGITS_SHOWN]}", candidate.get("sampled"), candidate.get("files")
    if _is_count(sampled) and _is_count(count):
        return f"{words} ({sampled} of {count} by size, header and samples)"
    return words


def failures_in_words(answer: Mapping[str, Any]) -> str:
    """`code: mean_kl 0.31 (0.2 to 0.4), limit 0.02`: of the slices that failed."""
    words = [
        f"{one.get('slice', '?')}: {', '.join(str(failure) for failure in (one.get('failures') or ())[:MAX_FAILURES])}"
        for one in answer["slices"]
        if one.get("failures")
    ]
    return "; ".join(words[:MAX_SLICES])


def _slice_in_words(one: Mapping[str, Any]) -> str:
    kl, top1, ratio = (one.get(name) for name in FIGURES)
    return f"{one.get('slice', '?')}: mean KL {_number(kl)}, top-1 {_number(top1)} %, perplexity × {_number(ratio)}"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) and not isinstance(value, bool) else "not finite"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 60


def _unknown(kind: StepKind) -> Diagnosis:
    return Diagnosis(
        Reason.INVALID_CONFIG,
        f"The runtime image answered `millstream {COMMANDS[kind]}` in a form that this operator does not read (version "
        f"{VERSION} is what it reads); use an image of the operator's own version.",
    )
