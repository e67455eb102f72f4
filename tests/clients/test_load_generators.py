"""guidellm and aiperf: every request succeeds, and the tokens they count are those that they asked for."""

from __future__ import annotations

import json
import shutil

from tests.clients.conftest import DEMO_MODEL, Program
from tests.support.server_thread import ServerThread

REQUESTS, OUTPUT_TOKENS = 6, 16


def test_guidellm(demo_server: ServerThread, program: Program) -> None:
    report = program.folder / "report.json"
    program.run(
        "guidellm",
        "run",
        *("--backend", f"kind=openai_http,target={demo_server.url}"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={DEMO_MODEL}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={OUTPUT_TOKENS}"),
        *("--output", f"kind=json,path={report}"),
        "--disable-progress",
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["errored"], totals["incomplete"]) == (0, 0)
    answered = benchmark["requests"]["successful"]
    assert len(answered) == totals["successful"] >= REQUESTS
    assert {one["output_tokens"] for one in answered} == {OUTPUT_TOKENS}
    assert all(one["time_to_first_token_ms"] > 0 for one in answered)


def test_aiperf(demo_server: ServerThread, program: Program) -> None:
    """It takes no folder for its tokenizer while it may not ask the hub, so the folder stands in the hub's cache."""
    cached = program.folder / "hub" / "hub" / "models--local--demo-chat"
    revision = "0" * 40
    shutil.copytree(DEMO_MODEL, cached / "snapshots" / revision, ignore=shutil.ignore_patterns("*.safetensors"))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(revision)
    artifacts = program.folder / "artifacts"
    program.run(
        "aiperf",
        "profile",
        *("--model", "demo-chat", "--url", demo_server.url, "--tokenizer", "local/demo-chat"),
        *("--endpoint-type", "chat", "--streaming", "--ui", "none", "--use-server-token-count"),
        *("--request-count", str(REQUESTS), "--concurrency", "2", "--isl", "24", "--osl", str(OUTPUT_TOKENS)),
        *("--extra-inputs", "ignore_eos:true", "--output-artifact-dir", str(artifacts)),
    )
    (report,) = artifacts.rglob("profile_export_aiperf.json")
    found = json.loads(report.read_text())
    assert found["request_count"]["avg"] == REQUESTS
    assert not found.get("error_summary")
    assert (found["output_sequence_length"]["min"], found["output_sequence_length"]["max"]) == (
        OUTPUT_TOKENS,
        OUTPUT_TOKENS,
    )
    assert found["time_to_first_token"]["min"] > 0
