"""A plan as one page of text: values, reasons, alternatives, and where every byte goes."""

from __future__ import annotations

import textwrap

from millstream_operator.api.optimization import HEAD_METHODS
from millstream_operator.api.spec import AcceleratorType
from millstream_operator.explaining.text import Style, bar, columns, dollars, gigabytes
from millstream_operator.planning.choices.cpu_dtype import WIDEST
from millstream_operator.planning.fixes.patch import kubectl_patch
from millstream_operator.planning.plan import Infeasible, Plan, Rejected
from millstream_operator.planning.requires import refusal
from millstream_operator.planning.sizing.memory_ledger import MemoryLedger

MAX_REJECTED_SHOWN = 8
LEAST_PROSE = 40  # characters
DRAFT_KEY = "draftWeightsBytes"
LEDGER_NAMES = {
    "weightsBytes": "weights",
    "embeddingsBytes": "embeddings",
    DRAFT_KEY: "draft model",
    "activationsBytes": "activations",
    "graphsBytes": "CUDA graphs",
    "ncclBytes": "NCCL",
    "contextBytes": "context",
    "kvCacheBytes": "KV cache",
    "headroomBytes": "headroom",
}


def plan_table(
    name: str, found: Plan | Infeasible, style: Style, namespace: str | None = None, calibration: str | None = None
) -> str:
    """Return the whole page, without a newline at the end.

    `namespace`: for commands to copy. `calibration`: which measurements the predictions were corrected with.
    """
    lines = [style.bold(f"{name}: {found.summary}"), ""]
    if isinstance(found, Infeasible):
        lines += _wrapped(found.message, style) + _fixes(name, namespace, found, style)
    else:
        lines += _facts(found, style, calibration)
        if found.memory is not None:
            lines += ["", *ledger_lines(found, found.memory, style)]
        reasons = [[reason.field, reason.reason] for reason in found.reasons]
        lines += ["", style.bold("  why"), *_columns_wrapped(reasons, style)]
    lines += _rejected(found.rejected, style)
    if isinstance(found, Plan) and (missing := refusal(found.requires)) is not None:
        lines += ["", *_wrapped(f"Not applicable yet. {missing}", style)]
    return "\n".join(line.rstrip() for line in lines)


def ledger_lines(plan: Plan, ledger: MemoryLedger, style: Style) -> list[str]:
    """Return one bar per part of the memory, each to the scale of the whole."""
    device = plan.product or "replica's container"
    title = f"  memory of one {device}: {gigabytes(ledger.usable_bytes)}"
    tokens = f"{plan.predicted.kv_cache_tokens:,} tokens" if plan.predicted else ""
    rows = []
    for key, num_bytes in ledger.as_dict().items():
        if key == "usableBytes" or num_bytes == 0:
            continue
        share = num_bytes / ledger.usable_bytes
        note = f"{share:>4.0%}" + (f"  {tokens}" if key == "kvCacheBytes" and tokens else "")
        name = "draft head" if key == DRAFT_KEY and plan.speculation.method in HEAD_METHODS else LEDGER_NAMES[key]
        rows.append([name, bar(share, style), f"{gigabytes(num_bytes):>9}", note])
    return [style.bold(title), *columns(rows, indent=4)]


def _facts(plan: Plan, style: Style, calibration: str | None) -> list[str]:
    dot, engine, predicted, cost = style.dot, plan.engine, plan.predicted, plan.cost
    gpus = f"{plan.gpus_per_replica} GPU{'s' if plan.gpus_per_replica != 1 else ''} a replica"
    load = f"{dot}the load needs {plan.replicas_for_load}" if plan.replicas_for_load is not None else ""
    replicas = str(plan.replicas) if plan.replicas is not None else "as in spec.replicas"
    rows = [["replicas", f"{replicas}{dot}{gpus}{load}" if plan.gpus_per_replica else replicas]]
    if cost is not None:
        price = f"${cost.monthly_usd:,} a month{dot}{dollars(cost.hourly_milli_usd)} an hour"
        if cost.per_million_tokens_milli_usd is not None:
            price += f"{dot}{dollars(cost.per_million_tokens_milli_usd)} a million output tokens when busy"
        rows.append(["cost", price])
    limits = [f"{key} {value}" for key, value in engine.as_dict().items()]
    rows.append(["engine", dot.join(limit for limit in limits if limit.startswith("max"))])
    rows.append(["", dot.join(limit for limit in limits if not limit.startswith("max"))])
    of_keys = plan.dtype if plan.accelerator is AcceleratorType.GPU else WIDEST
    weights, kv_cache = _format(plan.quantization, plan.dtype), _format(plan.kv_cache, of_keys)
    rows.append(["formats", f"weights {weights}{dot}KV cache {kv_cache}"])
    speculation = plan.speculation
    if speculation.method != "Disabled":
        assumed = f"{speculation.assumed_acceptance_percent} % acceptance assumed"
        if speculation.most_speedup_percent is not None:
            assumed += f": at most {speculation.most_speedup_percent / 100:.2f} times as fast alone"
        rows.append(["speculation", f"{speculation.method}, {speculation.max_draft_tokens} tokens ({assumed})"])
    if predicted is not None:
        rows.append(
            [
                "predicted",
                f"TTFT {predicted.ttft_milliseconds} ms{dot}{predicted.single_stream_tokens_per_second} tokens/s alone",
            ]
        )
        busy = f"{predicted.concurrent_sequences} requests at once: {predicted.tokens_per_second} tokens/s"
        itl = f"ITL {predicted.itl_microseconds / 1000:.1f} ms"
        rows.append(["", f"{busy}{dot}{itl}{dot}{predicted.requests_per_minute} requests/min"])
        if calibration is not None:
            rows.append(["calibration", calibration])
    return columns(rows)


def _format(method: str, dtype: str | None) -> str:
    """What is not quantised has the dtype that the runtime holds it in."""
    return (dtype or "as the checkpoint says") if method == "None" else method


def _fixes(name: str, namespace: str | None, found: Infeasible, style: Style) -> list[str]:
    """Edits with the command that applies each, then nodes to add."""
    if not found.fixes:  # the message says what the runtime lacks where that is why
        return [] if found.requires else ["", "  No change of the spec or the cluster that was tried helps."]
    lines: list[str] = []
    titles = {False: "  edits of the spec that would do", True: "  GPUs to add that would do"}
    for adds_nodes, title in titles.items():
        fixes = [fix for fix in found.fixes if fix.adds_nodes == adds_nodes]
        if fixes:
            lines += ["", style.bold(title)]
            rows = columns([[f"{fix.field}: {fix.value}", fix.summary] for fix in fixes], indent=4)
            for fix, row in zip(fixes, rows, strict=True):
                lines.append(row)
                lines += [f"      {kubectl_patch(name, namespace, fix.patch)}"] if fix.patch is not None else []
    return lines


def _rejected(rejected: tuple[Rejected, ...], style: Style) -> list[str]:
    if not rejected:
        return []
    rows = [[line.summary, line.reason] for line in rejected[:MAX_REJECTED_SHOWN]]
    lines = ["", style.bold("  rejected"), *_columns_wrapped(rows, style)]
    if len(rejected) > MAX_REJECTED_SHOWN:
        lines.append(f"    and {len(rejected) - MAX_REJECTED_SHOWN} more: -o json shows them")
    return lines


def _wrapped(text: str, style: Style) -> list[str]:
    return textwrap.wrap(text, style.width, initial_indent="  ", subsequent_indent="  ")


def _columns_wrapped(rows: list[list[str]], style: Style) -> list[str]:
    """Return two columns, the second of wrapped text, which is never narrower than LEAST_PROSE."""
    first = max(len(row[0]) for row in rows) + 2
    lines = []
    for name, prose in rows:
        wrapped = textwrap.wrap(prose, max(LEAST_PROSE, style.width - first - 4)) or [""]
        lines.append(f"    {name:<{first}}{wrapped[0]}")
        lines += [f"    {'':<{first}}{rest}" for rest in wrapped[1:]]
    return lines
