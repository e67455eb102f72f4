"""The classes of vulnerabilities that inference servers have had, and where each is proved impossible here.

What can be read off the source is asserted here. What needs a running server is tested with it; the table says where,
and that test must exist.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SHIPPED = [path for folder in ("runtime", "operator", "kernels") for path in sorted((ROOT / folder).rglob("*.py"))]
TESTS = ROOT / "tests" / "unit"

# class of vulnerability -> tests that hold it off: "file::function", below tests/unit
PROOFS: dict[str, tuple[str, ...]] = {
    "pickle over a socket (CVE-2025-32444)": (
        "contracts/test_security_classes.py::test_no_shipped_code_can_run_what_it_was_sent",
        "contracts/test_security_classes.py::test_only_http_listens",
        "engine_process/test_framing.py::test_anything_else_is_refused",
    ),
    "template injection (CVE-2026-5760)": (
        "tokenizing/test_tokenizer.py::test_a_template_cannot_leave_the_sandbox_and_the_error_tells_nothing_of_the_inside",
        "server/http/test_bad_requests.py::test_a_bad_parameter_is_named",  # chat_template in a request is refused
    ),
    "remote code by config (CVE-2026-22807)": (
        "contracts/test_security_classes.py::test_no_shipped_code_can_run_what_it_was_sent",
    ),
    "eval in a tool parser (CVE-2025-9141)": (
        "contracts/test_security_classes.py::test_no_shipped_code_can_run_what_it_was_sent",
    ),
    "unbounded parameter (CVE-2026-34756)": (
        "server/http/test_bad_requests.py::test_a_bad_parameter_is_named",
        "server/http/test_untrusted_input.py::test_every_parameter_has_a_bound",
    ),
    "event-loop blocking (CVE-2025-62426)": (
        "server/http/test_untrusted_input.py::test_a_prompt_that_is_slow_to_tokenise_delays_no_other_request_and_ends",
        "server/http/test_large_bodies.py::test_a_small_request_is_answered_while_the_largest_body_is_parsed",
        "server/http/test_large_bodies.py::test_a_million_wrong_items_are_one_error",
        "server/http/test_large_bodies.py::test_wrong_messages_have_the_errors_of_one",
        "server/http/test_protocol.py::test_a_read_is_small_so_that_what_is_costly_to_parse_takes_short_turns",
    ),
    "memory kept per request": ("server/http/test_large_bodies.py::test_names_that_clients_make_up_are_not_kept",),
    "schema or regex crash (CVE-2025-48944)": (
        "server/http/test_bad_requests.py::test_a_bad_parameter_is_named",  # schemas are refused before the engine
        "server/openai/test_fuzz.py::test_no_request_is_answered_with_a_5xx",
    ),
    "NaN and infinite parameters (GHSA-7h4p-rffg-7823)": (
        "server/http/test_bad_requests.py::test_a_bad_parameter_is_named",
    ),
    "out-of-range token (GHSA-8wr5-jm2h-8r4f)": (
        "server/http/test_untrusted_input.py::test_a_token_past_the_tokenizer_is_no_crash",
    ),
    "error text leak (CVE-2026-22778)": (
        "server/test_lifecycle.py::test_a_dying_engine_tells_every_client_at_once_and_ends_the_process",
        "server/http/test_untrusted_input.py::test_a_bug_tells_nothing_of_the_inside",
    ),
    "key timing (CVE-2025-59425)": (
        "contracts/test_security_classes.py::test_keys_are_compared_in_constant_time",
        "server/http/test_api_keys.py::test_only_holders_of_a_key_get_in_probes_excepted",
    ),
    "unauthenticated side routes": (
        "server/http/test_untrusted_input.py::test_every_route_but_the_probes_needs_a_key",
    ),
    "server-side request forgery (GHSA-v359-jj2v-j536)": (
        "server/http/test_bad_requests.py::test_a_bad_parameter_is_named",  # image_url is refused
        "contracts/test_security_classes.py::test_the_server_has_no_http_client",
    ),
    "prefix-cache timing (CVE-2025-46570)": (
        "server/http/test_api_keys.py::test_only_holders_of_a_key_get_in_probes_excepted",
        "server/test_lifecycle.py::test_prefix_hits_are_told_in_usage_and_metrics",
    ),
    "predictable hashes of prefixes (CVE-2025-25183)": (
        "contracts/test_security_classes.py::test_prefixes_are_found_by_a_hash_that_no_client_can_make_collide",
    ),
    "headers without end (CVE-2025-48956)": (
        "server/http/test_protocol.py::test_what_never_ends_is_cut_off",
        "server/http/test_protocol.py::test_a_head_above_the_cap_is_refused_although_it_ends_in_its_last_read",
    ),
    "template in a request, or without end (CVE-2025-61620)": (
        "server/http/test_untrusted_input.py::"
        "test_a_template_that_computes_without_end_is_a_400_and_others_are_served_meanwhile",
        "server/http/test_bad_requests.py::test_a_bad_parameter_is_named",  # chat_template in a request is refused
    ),
    "structured output that ends the engine": (
        "server/http/test_error_words.py::test_what_vllm_and_sglang_have_and_this_server_has_not_is_refused_as_such",
    ),
    "regex of a tool parser (CVE-2025-48887)": (
        "server/http/test_bad_requests.py::test_a_bad_parameter_is_named",  # tools are refused
    ),
    "ranks that meet at an open port (CVE-2025-47277)": (
        "contracts/test_security_classes.py::test_ranks_meet_in_a_file_and_at_no_port",
    ),
    "revision that is pinned in part": (
        "sources/test_fetch_hub.py::test_a_branch_that_moves_during_the_download_gives_one_commit",
    ),
    "untrusted tensors (CVE-2025-62164)": (
        "models/loading/test_checkpoint.py::test_pickled_weights_are_refused_unread",
        "contracts/test_security_classes.py::test_no_shipped_code_can_run_what_it_was_sent",
    ),
    "supply chain (litellm 1.82.7)": (
        "contracts/test_security_classes.py::test_every_dependency_is_pinned_with_a_hash",
    ),
}

UNSAFE_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
UNSAFE_METHODS = {("torch", "load"), ("yaml", "load"), ("yaml", "unsafe_load"), ("os", "system"), ("numpy", "load")}


@pytest.mark.parametrize("proof", sorted({proof for proofs in PROOFS.values() for proof in proofs}))
def test_every_proof_exists(proof: str) -> None:
    file, _, function = proof.partition("::")
    assert f"def {function}(" in (TESTS / file).read_text(encoding="utf-8")


def calls_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of whatever a file imports or calls that could run data as code."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").partition(".")[0]}
        else:
            names = set()
        for name in names & UNSAFE_MODULES:
            yield getattr(node, "lineno", 0), name
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id in UNSAFE_CALLS:
                yield node.lineno, function.id
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
                named = function.value.id, function.attr
                if named in UNSAFE_METHODS and "Safe" not in ast.unparse(node):  # yaml.load(…, Loader=CSafeLoader)
                    yield node.lineno, ".".join(named)
            for keyword in node.keywords:
                value = keyword.value
                allowed = isinstance(value, ast.Constant) and value.value is False
                if keyword.arg in ("trust_remote_code", "shell", "allow_pickle") and not allowed:
                    yield node.lineno, f"{keyword.arg}="


def test_no_shipped_code_can_run_what_it_was_sent() -> None:
    found = [f"{path.relative_to(ROOT)}:{line}: {name}" for path in SHIPPED for line, name in calls_of(path)]
    assert found == []


def test_the_scan_would_find_them(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(
        "import pickle\nfrom dill import loads\neval('1')\ntorch.load(x)\nyaml.load(x)\nf(trust_remote_code=True)\n"
    )
    assert [name for _, name in calls_of(file)] == [
        "pickle",
        "dill",
        "eval",
        "torch.load",
        "yaml.load",
        "trust_remote_code=",
    ]


def test_only_http_listens() -> None:
    """The engine's socket is a pair without a name: nothing can connect to it."""
    server = ROOT / "runtime" / "millstream_runtime"
    listening = re.compile(r"\.listen\(|create_server\(|start_server\(|start_unix_server\(|AF_UNIX.*bind")
    files = [*(server / "server").rglob("*.py"), *(server / "engine_process").rglob("*.py")]
    assert [path.name for path in files if listening.search(path.read_text())] == ["sockets.py"]


def test_the_server_has_no_http_client() -> None:
    """Nothing that a request names is ever fetched. (Traces go to an address of the environment's.)"""
    client = re.compile(r"^\s*(import|from) (requests|httpx|aiohttp|urllib|http\.client)\b", re.MULTILINE)
    files = (ROOT / "runtime" / "millstream_runtime" / "server").rglob("*.py")
    assert [path.name for path in files if client.search(path.read_text())] == []


def test_prefixes_are_found_by_a_hash_that_no_client_can_make_collide() -> None:
    source = (ROOT / "runtime/millstream_runtime/engine/scheduling/prefix_cache.py").read_text(encoding="utf-8")
    calls = [ast.unparse(node.func) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    assert "hashlib.sha256" in calls
    assert "hash" not in calls


def test_ranks_meet_in_a_file_and_at_no_port() -> None:
    """torch's TCPStore listens on every interface; `tcp://` and `env://` use it."""
    files = sorted((ROOT / "runtime" / "millstream_runtime").rglob("*.py"))
    found = {path.name: path.read_text(encoding="utf-8") for path in files if "init_process_group(" in path.read_text()}
    assert found
    for name, text in found.items():
        assert "FileStore(" in text, name
        assert not re.search(r"TCPStore|init_method|tcp://|env://", text), name


def test_keys_are_compared_in_constant_time() -> None:
    source = (ROOT / "runtime" / "millstream_runtime" / "server" / "http" / "api_keys.py").read_text()
    loop = source[source.index("def _holds") :]
    assert "hmac.compare_digest" in loop
    assert not re.search(r"\b(break|any)\b", loop.partition("\ndef ")[0])  # every key is compared, found or not


@pytest.mark.parametrize("lock", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda path: path.stem)
def test_every_dependency_is_pinned_with_a_hash(lock: Path) -> None:
    text = lock.read_text(encoding="utf-8").replace("\\\n", " ")
    pins = [line for line in text.splitlines() if line and not line.lstrip().startswith(("#", "--"))]
    assert pins
    for pin in pins:
        assert re.match(r"[A-Za-z0-9._-]+(\[[a-z,]+\])?==\S+", pin), pin[:80]
        assert "--hash=sha256:" in pin, pin[:80]
