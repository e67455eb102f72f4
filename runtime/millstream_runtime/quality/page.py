"""A comparison as one HTML page: verdict, figures by slice, a plot, the worst answers side by side. Pure.

No script and nothing from elsewhere. Texts come from models and documents, so each is escaped.
"""

from __future__ import annotations

import math
from html import escape
from typing import Any

PLOT_WIDTH, PLOT_HEIGHT, LEFT, BOTTOM = 560, 240, 60, 40
LOWEST_KL = 1e-6  # the left end of the axis: below it two distributions are the same
COLOURS = ("#0969da", "#bf3989", "#1a7f37", "#9a6700", "#8250df", "#cf222e")
FIGURES = (
    ("mean_kl", "mean KL"),
    ("p99_kl", "p99 KL"),
    ("top1_agreement_percent", "top-1 agreement %"),
    ("flip_percent", "flips %"),
    ("perplexity_ratio", "perplexity ratio"),
)
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1f2328 }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 } th, td { padding: .3rem .6rem; text-align: right;
border-bottom: 1px solid #d0d7de } th:first-child, td:first-child { text-align: left } .failed { color: #cf222e }
.passed { color: #1a7f37 } small { color: #57606a } pre { white-space: pre-wrap; background: #f6f8fa; padding: .6rem;
margin: 0 } .answers td, .answers th { text-align: left; vertical-align: top; width: 50% } text { font-size: 12px }
"""


def html(report: dict[str, Any]) -> str:
    """The page of a document of `report.build`."""
    base, candidate, data = report["base"], report["candidate"], report["data"]
    title = f"{candidate['path']} against {base['path']}: {report['verdict']}"
    share = candidate["weights_bytes"] / max(1, base["weights_bytes"])
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>',
        f'<h1 class="{report["verdict"]}">{escape(title)}</h1>',
        f"<p>{data['documents']} documents, {data['tokens']} tokens of {escape(data['path'])}, {report['date']}. "
        f"The weights take {share:.2f} times the memory of the base's.</p>",
        _table(report["slices"]),
        _sentences(report["slices"]),
        _plot(report["kl_curves"]),
        *(_answer(one) for one in report["worst_answers"]),
        "</html>",
    ]
    return "\n".join(parts) + "\n"


def _table(slices: list[dict[str, Any]]) -> str:
    head = "".join(f"<th>{escape(label)}</th>" for _, label in FIGURES)
    rows = []
    for one in slices:
        figures = one["figures"]
        verdict = "passed" if one["passes"] else "failed"
        cells = "".join(
            f"<td>{figures[name]['value']:.4g}<br><small>{figures[name]['low']:.4g} to {figures[name]['high']:.4g}"
            "</small></td>"
            for name, _ in FIGURES
        )
        rows.append(
            f"<tr><td>{escape(figures['slice'])} <small>({one['workload']})</small></td><td>{figures['num_documents']}"
            f'</td><td>{figures["num_tokens"]}</td>{cells}<td class="{verdict}">{verdict}</td></tr>'
        )
    return f"<table><tr><th>slice</th><th>documents</th><th>tokens</th>{head}<th></th></tr>{''.join(rows)}</table>"


def _sentences(slices: list[dict[str, Any]]) -> str:
    items = [
        f"<li>{escape(one['figures']['slice'])}: {escape(words)}{note}</li>"
        for one in slices
        for kind, note in (("failures", ""), ("unsure", "; more documents would tell"))
        for words in one[kind]
    ]
    return f"<ul>{''.join(items)}</ul>" if items else ""


def _plot(curves: dict[str, list[float]]) -> str:
    """The share of tokens (upwards) whose KL is at most x (to the right, logarithmic), a curve per slice."""
    values = [value for curve in curves.values() for value in curve]
    highest = max([10 * LOWEST_KL, *values])
    decades = math.log10(highest / LOWEST_KL)

    def place(kl: float) -> float:
        return LEFT + (PLOT_WIDTH - LEFT) * math.log10(max(kl, LOWEST_KL) / LOWEST_KL) / decades

    height = PLOT_HEIGHT - BOTTOM
    parts = [f'<svg viewBox="0 0 {PLOT_WIDTH + 140} {PLOT_HEIGHT}" width="{PLOT_WIDTH + 140}" role="img">']
    for exponent in range(math.ceil(math.log10(LOWEST_KL)), math.floor(math.log10(highest)) + 1):
        x = place(10.0**exponent)
        parts.append(f'<path d="M{x:.1f} 8V{height}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{x:.1f}" y="{height + 16}" text-anchor="middle">1e{exponent}</text>')
    for percent in (0, 50, 100):
        y = height - (height - 8) * percent / 100
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{percent} %</text>')
    parts.append(f'<text x="{LEFT}" y="{PLOT_HEIGHT - 6}">KL of a token, nats; share of tokens at most that</text>')
    for index, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        last = max(1, len(curve) - 1)
        points = " ".join(f"{place(kl):.1f},{height - (height - 8) * rank / last:.1f}" for rank, kl in enumerate(curve))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{PLOT_WIDTH + 8}" y="{20 + 18 * index}" fill="{colour}">{escape(name)}</text>')
    return "".join([*parts, "</svg>"])


def _answer(worst: dict[str, Any]) -> str:
    return (
        f"<h3>Line {worst['line']}, {escape(worst['slice'])}, mean KL {worst['mean_kl']:.3g}</h3>"
        f"<pre>{escape(worst['prompt'])}</pre>"
        '<table class="answers"><tr><th>base</th><th>candidate</th></tr>'
        f"<tr><td><pre>{escape(worst['base'])}</pre></td><td><pre>{escape(worst['candidate'])}</pre></td></tr></table>"
        f"<details><summary>the document itself</summary><pre>{escape(worst['expected'])}</pre></details>"
    )
