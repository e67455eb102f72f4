"""litellm, as an OpenAI and as a vLLM server; and the client of OpenAI for Node."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.clients.conftest import NODE_MODULES, Program, run
from tests.support.server_thread import ServerThread

HERE = Path(__file__).parent


def check(server: ServerThread, found: dict[str, Any]) -> None:
    """The client saw what the server sent."""
    chat = {"model": "demo-chat", "messages": [{"role": "user", "content": "What is a Kubernetes pod?"}]}
    settings = {"max_tokens": 8, "temperature": 0}
    whole = server.post("/v1/chat/completions", chat | settings).json()["choices"][0]["message"]["content"]
    text = server.post("/v1/completions", {"model": "demo-chat", "prompt": "A pod is", **settings}).json()
    assert found["whole"] == found["streamed"] == whole
    assert found["usage"] == [8]
    assert found["text"] == text["choices"][0]["text"] == "".join(found["tokens"])
    assert "temperature" in found["refused"]


def test_litellm(demo_server: ServerThread, program: Program) -> None:
    printed = program.run(
        "python", str(HERE / "litellm_calls.py"), f"{demo_server.url}/v1", LITELLM_LOCAL_MODEL_COST_MAP="True"
    )
    check(demo_server, json.loads(printed.strip().splitlines()[-1]))


def test_openai_for_node(demo_server: ServerThread, tmp_path: Path) -> None:
    node = shutil.which("node")
    assert node is not None, "Node is missing; `make clients` needs version 20 or later, with npm"
    assert NODE_MODULES.is_dir(), f"{NODE_MODULES} is missing; run `make clients`"
    calls = NODE_MODULES.parent / "calls.mjs"  # beside the modules, where Node looks for them
    shutil.copyfile(HERE / "node" / "calls.mjs", calls)
    printed = run([node, str(calls), f"{demo_server.url}/v1"], tmp_path, {})
    check(demo_server, json.loads(printed.strip().splitlines()[-1]))
