"""The layout that CONTRIBUTING.md promises: small packages, one name for one thing, no production code for tests alone.

Everything is read from the source with `ast`; nothing is imported. Symbols of modules are resolved through imports.
Methods are not: a method counts as used where production code reads any attribute of its name.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# Folder of an import package -> folder that is on the path.
PRODUCTION = {
    "operator/millstream_operator": "operator",
    "gateway/millstream_gateway": "gateway",
    "runtime/millstream_runtime": "runtime",
    "cli/millstream": "cli",
    "kernels/millstream_kernels": "kernels",
    "hack": ".",
}
MAX_MODULES, MAX_ROOT_FOLDERS = 20, 15

# Exceptions, each with its reason. The sets named TODO hold what is still to be changed: they only get shorter.

LARGE_PACKAGES = {"operator/millstream_operator/rendering": "one builder per kind of object"}
LARGE_PACKAGES_TODO: set[str] = set()

# API types and wire messages repeat the names of what they carry.
MAY_SHARE_NAMES = re.compile(r"millstream_operator/api/|/messages\.py$")
SHARED_NAMES_TODO: set[str] = set()

# Names that gave way to the field's terms. A plain word is refused only as the name of a function.
OLD_NAMES = {
    *("told", "bring_about", "brought_about", "Beside", "start_beside", "NewsDesk", "AtOnce", "Beliefs", "Scene"),
    *("Wishes", "obstacle", "in_the_way", "Team", "Solo", "_Draft", "carry_out", "_furnish", "pass_window", "Pin"),
    *("Stopped", "superfluous", "doomed", "Shelf", "PASSING", "is_going", "_PUT_OUT", "LookAgain", "_on_life"),
}
OLD_FUNCTIONS = {"tell", "hear", "offer", "grow", "share", "settle", "happen"}
OLD_FILES = {"input_hash.py"}
FILE_OBJECTS = ("sources/layers.py", "sources/inspection/remote_reader.py")  # `tell` is a method of every file
OLD_NAMES_TODO: set[str] = set()

TEST_FOLDERS_OF_THEIR_OWN = {
    "operator/scenarios": "docs/what-happens-when.md",
    "chart": "charts/millstream",
    "contracts": "what several packages agree on",
    "operator/upgrade": "records that earlier releases stored",
    "plan_cli": "`millstream plan`, over the whole planner",
    "runtime": "the modules at the top of millstream_runtime",
}

# Symbols that something else than production code reaches: `file::symbol`, as a pattern.
USED_FROM_OUTSIDE = {
    r".*/models/families/\w+\.py::(read_config|build)": "models/registry.py imports them",
    r".*/commands/\w+\.py::run": "cli.py imports the command that was asked for",
    r"kernels/.*/reference\.py::\w+": "the mathematics that kernels are tested against",
    r"kernels/millstream_kernels/elementwise/\w+\.py::\w+_quantized": "outputs in 8 bits that no engine asks for yet",
    r"kernels/millstream_kernels/prebuilt/cuda_library\.py::CudaUtils\.load_binary": "Triton calls it",
    r".*::NoProgress\.purge": "kopf calls it",
    r".*::HTTPS?Handler\.https?_open": "urllib calls it",
    r"kernels/millstream_kernels/cpu/bfloat16/row_kernel\.py::module_text": "prebuild_cpu imports it by its name",
    r"hack/wheel_hook\.py::CpuKernels(\.\w+)?": "hatchling loads it by the path in pyproject.toml",
    r".*::CommandLineParser\.parse_known_args": "argparse calls it",
    r".*::FencedBody\.write_with_length": "aiohttp calls it",
    r".*::CappedHttpProtocol\.\w+": "uvicorn and httptools call them",
    r".*::CoalescingTransport\.\w+": "a transport of asyncio",
    r".*::TemplateCompiler\.visit_[A-Z]\w+": "Jinja's compiler calls it for a node",
    r".*::TemplateEnvironment\.(call_binop|call_unop|wrap_str_format|concat)": "compiled templates call it, and Jinja",
    r".*::TemplateEnvironment\.(added|concatenated|made|as_key|is_in|written)": "compiled templates call it",
    r".*::UnblockedFile\.writable": "a text stream calls it",
    r".*::BARE_CONTROL_PLANE": "tests/soak runs it",
}
ONLY_TESTS_TODO: set[str] = set()

PLAIN_DECORATORS = {
    *("property", "cached_property", "setter", "staticmethod", "classmethod", "abstractmethod", "override", "overload"),
    *("cache", "lru_cache", "contextmanager", "asynccontextmanager", "inference_mode", "no_grad"),
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Source:
    path: str  # from the root of the repository
    module: str
    tree: ast.Module


@cache
def sources() -> tuple[Source, ...]:
    """Every file of production code and, as a user of it, of benchmarks/."""
    found = []
    for folder, base in {**PRODUCTION, "benchmarks": "."}.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT / base).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            tree = ast.parse(file.read_text(encoding="utf-8"))
            found.append(Source(file.relative_to(ROOT).as_posix(), module, tree))
    return tuple(found)


def production() -> Iterator[Source]:
    return (source for source in sources() if not source.path.startswith("benchmarks/"))


def test_no_package_has_more_modules_than_a_reader_can_survey() -> None:
    modules = Counter(
        str(Path(source.path).parent) for source in production() if not source.path.endswith("/__init__.py")
    )
    allowed = LARGE_PACKAGES.keys() | LARGE_PACKAGES_TODO
    large = {folder: count for folder, count in modules.items() if count > MAX_MODULES and folder not in allowed}
    assert not large, f"split into packages named for a concern (at most {MAX_MODULES} modules each): {large}"
    assert all(modules[folder] > MAX_MODULES for folder in allowed), f"no longer an exception: {allowed}, {modules}"


def test_the_root_holds_few_folders() -> None:
    """Tracked ones; those whose name begins with a dot belong to tools."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = {path.split("/")[0] for path in listed.splitlines() if "/" in path and not path.startswith(".")}
    assert len(folders) <= MAX_ROOT_FOLDERS, sorted(folders)


def test_no_two_public_classes_of_an_import_package_share_a_name() -> None:
    files: dict[tuple[str, str], list[str]] = defaultdict(list)
    for source in production():
        if not MAY_SHARE_NAMES.search(source.path):
            for node in source.tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    files[source.module.split(".")[0], node.name].append(source.path)
    shared = {name: paths for (_, name), paths in files.items() if len(paths) > 1 and name not in SHARED_NAMES_TODO}
    assert not shared, f"give each its own name: {shared}"
    assert {name for (_, name), paths in files.items() if len(paths) > 1} >= SHARED_NAMES_TODO


def test_no_old_name_comes_back() -> None:
    found, met = [], set[str]()
    for source in production():
        met |= {name for _, name in identifiers(source.tree)}
        if Path(source.path).name in OLD_FILES:
            found.append(f"{source.path}: the file's name")
        found += [
            f"{source.path}:{line}: {name}"
            for line, name in identifiers(source.tree)
            if name in OLD_NAMES - OLD_NAMES_TODO
        ]
        found += [
            f"{source.path}:{node.lineno}: {node.name}()"
            for node in ast.walk(source.tree)
            if isinstance(node, Function)
            and node.name in OLD_FUNCTIONS
            and "property" not in decorators(node)
            and not (node.name == "tell" and source.path.endswith(FILE_OBJECTS))
        ]
    assert not found, "use the field's term (docs/glossary.md):\n" + "\n".join(found)
    assert met >= OLD_NAMES_TODO, f"done, so no longer an exception: {OLD_NAMES_TODO - met}"


def test_no_production_symbol_is_used_by_tests_alone() -> None:
    uses = _Uses()
    for source in sources():
        uses.read(source)
    unused = {
        f"{source.path}::{symbol.name}"
        for source in production()
        for symbol in symbols(source.tree)
        if not uses.holds(source, symbol)
    }
    allowed = {name for name in unused for pattern in USED_FROM_OUTSIDE if re.fullmatch(pattern, name)}
    found = unused - allowed - ONLY_TESTS_TODO
    assert not found, "delete it, or move it into the test that uses it:\n" + "\n".join(sorted(found))
    assert unused >= ONLY_TESTS_TODO, f"done, so no longer an exception: {sorted(ONLY_TESTS_TODO - unused)}"
    stale = [one for one in USED_FROM_OUTSIDE if not any(re.fullmatch(one, name) for name in allowed)]
    assert not stale, f"no longer an exception: {stale}"


def test_the_scan_for_unused_symbols_finds_them() -> None:
    text = "A = 1\ndef f(): return f()\ndef g(): return A\nclass C:\n    def m(self): ...\n    def n(self): ...\n"
    library = Source("library.py", "library", ast.parse(text))
    user = Source("user.py", "user", ast.parse("from library import C\nimport library\nlibrary.g(); C().m()\n"))
    uses = _Uses()
    uses.read(library)
    uses.read(user)
    assert [one.name for one in symbols(library.tree) if not uses.holds(library, one)] == ["f", "C.n"]


def test_a_folder_of_tests_mirrors_a_package() -> None:
    tests = ROOT / "tests" / "unit"
    folders = {file.parent.relative_to(tests).as_posix() for file in tests.rglob("test_*.py")} - {"."}
    strange = sorted(one for one in folders if not _mirrored(one) and one not in TEST_FOLDERS_OF_THEIR_OWN)
    assert not strange, f"no package of production code is called so: {strange}"


def _mirrored(folder: str) -> bool:
    places = [f"runtime/millstream_runtime/{folder}", f"cli/millstream/{folder}", f"hack/{folder}"]
    places += [folder, f"tests/{folder}"]  # benchmarks/ and tests/soak
    if folder.startswith("operator/"):
        places.append(folder.replace("operator/", "operator/millstream_operator/", 1))
    return any((ROOT / place).is_dir() for place in places)


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of every identifier."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield line, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield line, name
            case ast.alias(name=name, asname=other):
                yield from ((line, part) for part in (*name.split("."), other or ""))
            case _:
                pass


def decorators(node: Function) -> set[str]:
    """Last parts of the decorators' names."""
    functions = [one.func if isinstance(one, ast.Call) else one for one in node.decorator_list]
    return {ast.unparse(one).rpartition(".")[2] for one in functions}


@dataclass(frozen=True, slots=True)
class Symbol:
    """`name` is dotted for a method. `attribute`: found as an attribute of anything."""

    name: str
    node: ast.stmt
    attribute: str | None = None


def symbols(tree: ast.Module) -> Iterator[Symbol]:
    """Public functions, classes, constants and methods, but for those that a decorator hands to a framework."""
    for node in tree.body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if not node.name.startswith("_") and decorators(node) <= PLAIN_DECORATORS:
                    yield Symbol(node.name, node)
            case ast.ClassDef(name=name) if not name.startswith("_"):
                yield Symbol(name, node)
                for method in node.body:
                    if (
                        isinstance(method, Function)
                        and not method.name.startswith("_")
                        and decorators(method) <= PLAIN_DECORATORS
                    ):
                        yield Symbol(f"{name}.{method.name}", method, method.name)
            case ast.Assign(targets=targets):
                yield from _constants(node, targets)
            case ast.AnnAssign(target=target):
                yield from _constants(node, [target])
            case _:
                pass


def _constants(node: ast.stmt, targets: list[ast.expr]) -> Iterator[Symbol]:
    for target in targets:
        for name in ast.walk(target):
            if isinstance(name, ast.Name) and not name.id.startswith("_"):
                yield Symbol(name.id, node)


@dataclass(slots=True)
class _Uses:
    """What production code reads, counted."""

    of_modules: Counter[tuple[str, str]] = field(default_factory=Counter)  # (module, symbol), from other modules
    in_modules: dict[str, Counter[str]] = field(default_factory=dict)  # path -> names that the module itself reads
    attributes: Counter[str] = field(default_factory=Counter)

    def read(self, source: Source) -> None:
        """Count what one file uses."""
        imported: dict[str, str] = {}  # names that may stand for a module here
        names = self.in_modules[source.path] = Counter[str]()
        nodes = list(ast.walk(source.tree))
        for node in nodes:
            match node:
                case ast.ImportFrom(module=str(module), names=aliases):
                    for alias in aliases:
                        self.of_modules[module, alias.name] += 1
                        imported[alias.asname or alias.name] = f"{module}.{alias.name}"
                case ast.Import(names=aliases):
                    imported |= {alias.asname or alias.name: alias.name for alias in aliases}
                case ast.Name(id=name, ctx=ast.Load()):
                    names[name] += 1
                case ast.Constant(value=str(text)) if len(text) < 80:
                    self.attributes[text] += 1  # getattr, fields by name
                    names.update(re.findall(r"\w+", text))  # annotations in quotes
                case _:
                    pass
        for node in nodes:
            if isinstance(node, ast.Attribute):
                self.attributes[node.attr] += 1
                if isinstance(node.value, ast.Name) and node.value.id in imported:
                    self.of_modules[imported[node.value.id], node.attr] += 1

    def holds(self, source: Source, symbol: Symbol) -> bool:
        """Whether anything but the symbol's own definition uses it."""
        inner = [node for node in ast.walk(symbol.node) if node is not symbol.node]
        if symbol.attribute is not None:
            itself = sum(isinstance(node, ast.Attribute) and node.attr == symbol.attribute for node in inner)
            return self.attributes[symbol.attribute] > itself
        reads = (node for node in inner if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
        itself = 0 if isinstance(symbol.node, ast.Assign | ast.AnnAssign) else sum(n.id == symbol.name for n in reads)
        return self.in_modules[source.path][symbol.name] > itself or self.of_modules[source.module, symbol.name] > 0
