"""`python -m hack.demo`: install the chart, apply examples/demo.yaml, wait for Ready, print one streamed answer."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hack.demo.chat import Timing, stream_answer
from hack.demo.pending_release import forget_pending
from hack.demo.progress import progress
from hack.demo.tools import Cluster, DemoError
from hack.demo.view import LiveOutput
from millstream_operator.api.load import ManifestError, load_manifest
from millstream_operator.rendering.service import service_port

CHECKOUT = Path(__file__).resolve().parents[2]
TOOLS = CHECKOUT / ".tools"
RELEASE, SYSTEM_NAMESPACE, NAMESPACE = "millstream", "millstream-system", "default"
QUESTION = "What is a KV cache?"
_POLL_SECONDS = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 when the model answered, 1 with one sentence on stderr when not."""
    options = _parser().parse_args(argv)
    steps = DemoSteps()
    failure, status = "", 0
    try:
        _run(options, steps)
    except DemoError as error:
        failure, status = str(error), 1
    except KeyboardInterrupt:
        failure, status = "interrupted; run it again to continue.", 130
    steps.print_times()
    if failure:
        print(f"\ndemo: {failure}", file=sys.stderr)
    return status


class DemoSteps:
    """Prints and times the steps of the demo."""

    def __init__(self) -> None:
        self._seconds: list[tuple[str, float]] = []

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """One stage; its time counts even when it fails."""
        print(f"\n▸ {title}", flush=True)
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds.append((title, time.monotonic() - began))

    def print_times(self) -> None:
        """Where the time went, stage by stage."""
        if self._seconds:
            print("\nWhere the time went:")
            for title, seconds in self._seconds:
                print(f"  {seconds:6.1f} s  {title}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hack.demo", description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, default=TOOLS / "kubeconfig", help="cluster (default: %(default)s)")
    parser.add_argument(
        "--images",
        type=Path,
        default=TOOLS / "images.json",
        help='{"operator": …, "runtime": …} (default: %(default)s)',
    )
    parser.add_argument("--manifest", type=Path, default=CHECKOUT / "examples" / "demo.yaml", help="what to apply")
    parser.add_argument("--question", default=QUESTION, help="what to ask (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="longest wait for Ready")
    return parser


def _run(options: argparse.Namespace, steps: DemoSteps) -> None:
    cluster = Cluster(options.kubeconfig, TOOLS / "bin")
    name, model, port = _identity(options.manifest)
    with steps.step("helm upgrade --install millstream charts/millstream"):
        install_chart(cluster, _images(options.images))
    with steps.step(f"kubectl apply -f {_shown(options.manifest)}"):
        output = cluster.run(
            "kubectl", "apply", "-n", NAMESPACE, "-f", str(options.manifest), what="apply the manifest"
        )
        print(f"  {output.strip()}")
    with steps.step(f"wait until {name} is Ready"):
        wait_ready(cluster, name, options.timeout)
    forward = cluster.port_forward(NAMESPACE, f"service/{name}", port)
    with steps.step(f"ask {model}, through the Service"), forward as local_port:
        ask(local_port, model, options.question)
    print_next(name, port)


def install_chart(cluster: Cluster, images: dict[str, str]) -> None:
    """Install or upgrade the release and wait until the operator runs; no effect if unchanged."""
    cluster.run(*forget_pending(RELEASE, SYSTEM_NAMESPACE), what="look at earlier installations")
    cluster.run(
        *("helm", "upgrade", "--install", RELEASE, str(CHECKOUT / "charts" / "millstream")),
        *("--namespace", SYSTEM_NAMESPACE, "--create-namespace", "--wait", "--timeout", "3m"),
        *("--set", f"operator.image={images['operator']}", "--set", f"runtime.image={images['runtime']}"),
        what="install the chart",
    )
    print(f"  operator {images['operator']}\n  runtime  {images['runtime']}")


def wait_ready(cluster: Cluster, name: str, timeout_seconds: float) -> None:
    """Show what the deployment waits for until it is Ready.

    Raises:
        DemoError: with its reason and message when it cannot become Ready, or did not in time.
    """
    deadline = time.monotonic() + timeout_seconds
    selector = f"millstream.dev/deployment={name},millstream.dev/role=leader"
    with LiveOutput() as view:
        while True:
            deployment = cluster.get("llmd", name, "-n", NAMESPACE)
            pods = cluster.get("pods", "-n", NAMESPACE, "-l", selector)["items"]
            events = cluster.get("events", "-n", NAMESPACE)["items"]
            now = progress(deployment, pods, events)
            view.show(now.lines)
            if now.ready:
                return
            if now.failure:
                raise DemoError(f"{name} cannot become Ready. {now.failure}")
            if time.monotonic() > deadline:
                raise DemoError(
                    f"{name} is not Ready after {timeout_seconds:.0f} s: {' / '.join(now.lines)}. "
                    f"`kubectl describe llmd {name}` and `kubectl get pods` show more."
                )
            time.sleep(_POLL_SECONDS)


def ask(port: int, model: str, question: str) -> None:
    """Print a question and its answer, token by token."""
    print(f"\n  You:   {question}\n  Model: ", end="", flush=True)
    timing = Timing()
    answer = ""
    for text in stream_answer(port, model, question, timing):
        answer += text
        print(text, end="", flush=True)
    print()
    if not answer.strip():
        raise DemoError("The model returned an empty answer.")
    print(
        f"\n  {timing.tokens} tokens in {timing.total_seconds:.2f} s, "
        f"the first after {timing.first_token_seconds * 1000:.0f} ms"
    )


def print_next(name: str, port: int) -> None:
    """Five things to try."""
    print(
        f"""
Try next:
  export KUBECONFIG=$PWD/.tools/kubeconfig PATH=$PWD/.tools/bin:$PATH
  kubectl get llmd {name} -o wide                        what runs, and the plan in one line
  kubectl describe llmd {name}                           conditions, and the plan with its reasons
  kubectl scale llmd/{name} --replicas=2                 the operator follows; so can an autoscaler
  kubectl port-forward service/{name} 8000:{port:<13} then any OpenAI client at http://localhost:8000/v1
  kubectl explain llmd.spec --recursive                every field, with what it means"""
    )


def _identity(manifest: Path) -> tuple[str, str, int]:
    """Name of the object, name of its model in requests, port of its Service."""
    try:
        deployment = load_manifest(manifest)
    except ManifestError as error:
        raise DemoError(str(error)) from None
    return deployment.name, deployment.served_name, service_port(deployment)


def _images(path: Path) -> dict[str, str]:
    try:
        images: dict[str, str] = json.loads(path.read_text())
    except (OSError, ValueError):
        raise DemoError(f"{path} does not name the images: run `make images`.") from None
    return images


def _shown(path: Path) -> str:
    return str(path.relative_to(CHECKOUT)) if path.is_relative_to(CHECKOUT) else str(path)


if __name__ == "__main__":
    sys.exit(main())
