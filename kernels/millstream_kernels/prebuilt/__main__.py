"""Compare a folder of compiled kernels with the table of variants: `python -m millstream_kernels.prebuilt [DIR]`.

It needs no GPU and no compiler. In the runtime image the folder is /opt/kernels.
"""

from __future__ import annotations

import sys
from pathlib import Path

from millstream_kernels.prebuilt.folder import PrebuiltError, PrebuiltFolder
from millstream_kernels.prebuilt.key import variant_key
from millstream_kernels.variants import VARIANTS


def problems(folder: PrebuiltFolder) -> list[str]:
    """One sentence for each variant that a launch would not find there."""
    found = []
    for variant in VARIANTS:
        for capability in variant.capabilities:
            key = variant_key(variant, capability)
            if key not in folder.entries:
                found.append(f"{variant.kernel_name} {variant.name} for sm_{capability} is not in {folder.path}")
                continue
            try:
                folder.files(folder.entries[key])
            except PrebuiltError as error:
                found.append(str(error))
    return found


def main(arguments: list[str]) -> int:
    """0: a launch of every variant finds it."""
    try:
        folder = PrebuiltFolder.open(Path(arguments[0] if arguments else "/opt/kernels"))
    except PrebuiltError as error:
        print(error, file=sys.stderr)
        return 1
    wrong = problems(folder)
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    print(f"{len(folder.entries)} compiled kernels, {len(wrong)} wrong or missing")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
