"""Look a launch's variant up instead of compiling it: takes the place of `triton.compiler.compile`.

    first launch of a variant in a process --> key --> entry, intact --> loaded
                                                  \\-> none            --> missing: refused, or compiled
                                                  \\-> damaged          --> compiled where ptxas is, else refused

Later launches find it in Triton's own table in memory, as ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import triton
from triton.compiler import ASTSource, CompiledKernel

from millstream_kernels.prebuilt.folder import Entry, PrebuiltError, PrebuiltFolder
from millstream_kernels.prebuilt.key import entry_key


class Result(StrEnum):
    """What a lookup found."""

    FOUND = "found"
    MISSING = "missing"
    DAMAGED = "damaged"


class MissingKernelError(PrebuiltError):
    """A launch for which nothing was compiled ahead. `key`: of the entry that there is none of."""

    def __init__(self, problem: str, key: str) -> None:
        super().__init__(problem)
        self.key = key


class Lookup:
    """The compile function of a process. `counts`: lookups by result; `compiled`: what it had to compile."""

    def __init__(self, folder: PrebuiltFolder, compile_kernel: Callable[..., Any], on_problem: Callable[[str], None]):
        """`compile_kernel`: Triton's. `on_problem`: gets a sentence for each entry that is missing or damaged."""
        self.folder = folder
        self.counts: Counter[Result] = Counter()
        self.found: list[Entry] = []
        self.compiled: list[str] = []
        self.compiles_missing = False
        self._compile = compile_kernel
        self._on_problem = on_problem

    def __call__(self, src: Any, target: Any = None, options: Any = None, _env_vars: Any = None) -> Any:
        """As `triton.compile`.

        Raises:
            MissingKernelError: there is no entry, and `compiles_missing` is not set. Names kernel, GPU and difference.
            PrebuiltError: the entry is damaged, and there is no ptxas to compile it anew.
        """
        target = triton.runtime.driver.active.get_current_target() if target is None else target
        if not isinstance(src, ASTSource):
            return self._compile(src, target=target, options=options, _env_vars=_env_vars)
        key = entry_key(src, target, dict(options or {}))
        entry = self.folder.entries.get(key)
        if entry is None:
            problem = f"{src.name} for sm_{target.arch}: no variant was compiled ahead; {self._nearest(src, target)}"
            self.counts[Result.MISSING] += 1
            if not self.compiles_missing:
                raise MissingKernelError(problem, key)
            return self._compiled(problem, src, target, options)
        try:
            files = self.folder.files(entry)
        except PrebuiltError as error:
            self.counts[Result.DAMAGED] += 1
            return self._compiled(str(error), src, target, options)
        self.counts[Result.FOUND] += 1
        self.found.append(entry)
        return CompiledKernel(src, {files.cubin.name: str(files.cubin), files.metadata.name: str(files.metadata)}, key)

    def _compiled(self, problem: str, src: Any, target: Any, options: Any) -> Any:
        if not ptxas_is_there():
            raise PrebuiltError(f"{problem}; it cannot be compiled, since there is no ptxas")
        self._on_problem(f"{problem}; it is compiled now")
        self.compiled.append(src.name)
        return self._compile(src, target=target, options=options)

    def _nearest(self, src: Any, target: Any) -> str:
        """The variant of the same kernel that differs least, and how."""
        alike = [one for one in self.folder.entries.values() if (one.kernel, one.capability) == (src.name, target.arch)]
        if not alike:
            return "the kernel is not among them"
        entry, differences = min(((one, _differences(src, one)) for one in alike), key=lambda pair: len(pair[1]))
        return f"{entry.variant} differs in {', '.join(differences) or 'its warps, stages or source'}"


def _differences(src: Any, entry: Entry) -> list[str]:
    names = src.fn.arg_names
    kinds = {name: kind for name, kind in src.signature.items() if kind != "constexpr"}
    constants = {names[place[0]]: str(value) for place, value in src.constants.items() if place[0] < len(names)}
    aligned = {names[place[0]] for place, attributes in src.attrs.items() if attributes}
    found = [
        f"{name} ({asked}, not {had})"
        for given, listed in ((kinds, entry.arguments), (constants, entry.constants))
        for name in dict.fromkeys((*given, *listed))
        if (asked := given.get(name)) != (had := listed.get(name))
    ]
    found += [f"{name} (no multiple of 16)" for name in sorted({*entry.aligned} - aligned)]
    return found + [f"{name} (a multiple of 16)" for name in sorted(aligned - {*entry.aligned})]


def ptxas_is_there() -> bool:
    """Whether kernels can be compiled here: Triton's wheel brings ptxas, an image may leave it out."""
    try:
        return bool(triton.knobs.nvidia.ptxas.version)
    except (RuntimeError, OSError):
        return False
