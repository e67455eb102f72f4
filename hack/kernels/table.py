"""The committed table of what every production variant compiles to, one file per kernel in `compiled/`.

    python -m hack.kernels.table           # compiles all, compares; a test does the same
    python -m hack.kernels.table --write   # writes the table anew; refuses variants that may not be shipped

A commit that changes a kernel shows in the table what became of its registers and its shared memory.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from hack.kernels.compile import problems, record
from hack.kernels.store import compile_all as compile_in_store
from millstream_kernels.variants import VARIANTS

FOLDER = Path(__file__).with_name("compiled")
Table = dict[str, dict[str, Any]]  # variant -> "sm_90" -> what it compiled to


def compile_all(kernel: str | None = None) -> tuple[dict[str, Table], list[str]]:
    """Kernel -> its table, and what is wrong with any of it; of one kernel, or of all."""
    tables: dict[str, Table] = defaultdict(dict)
    wrong = []
    wanted = [
        (variant, capability)
        for variant in VARIANTS
        if kernel in (None, variant.kernel_name)
        for capability in variant.capabilities
    ]
    for (variant, capability), compiled in zip(wanted, compile_in_store(wanted)[0], strict=True):
        row = tables[variant.kernel_name].setdefault(variant.name, {})
        if f"sm_{capability}" in row:
            wrong.append(f"{variant.kernel_name}: two variants for sm_{capability} are named {variant.name}")
        row[f"sm_{capability}"] = record(compiled.resources)
        wrong += problems(variant, capability, compiled.resources)
    return dict(tables), wrong


def read_all() -> dict[str, Table]:
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(FOLDER.glob("*.json"))}


def write_all(tables: dict[str, Table]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for stale in FOLDER.glob("*.json"):
        if stale.stem not in tables:
            stale.unlink()
    for kernel, table in tables.items():
        rows = ",\n".join(f" {json.dumps(name)}: {json.dumps(row)}" for name, row in table.items())
        (FOLDER / f"{kernel}.json").write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")


def differences(before: dict[str, Table], now: dict[str, Table]) -> list[str]:
    """One line per variant that the table says otherwise."""
    found = []
    for kernel in sorted({*before, *now}):
        old, new = before.get(kernel, {}), now.get(kernel, {})
        found += [
            f"{kernel}, {name}: {old.get(name, 'not in the table')} -> {new.get(name, 'no such variant')}"
            for name in sorted({*old, *new})
            if old.get(name) != new.get(name)
        ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hack.kernels.table", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the table anew")
    options = parser.parse_args()
    tables, wrong = compile_all()
    changed = differences(read_all(), tables)
    if options.write and not wrong:
        write_all(tables)
    print(*wrong, *changed, sep="\n")
    return 1 if wrong or (changed and not options.write) else 0


if __name__ == "__main__":
    sys.exit(main())
