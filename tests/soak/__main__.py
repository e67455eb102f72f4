"""`python -m tests.soak [NAME…]`: run the proofs in full. Writes `results/NAME.json`. Exit status 1: goal missed."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from hack.cluster.errors import ClusterError
from hack.cluster.steps import Steps
from tests.soak import results, tools
from tests.soak.api import TooSlow
from tests.soak.deletions import deletions
from tests.soak.leaders import leaders
from tests.soak.matrices import faults, kills, starts
from tests.soak.outages import outage
from tests.soak.processes import DidNotStart
from tests.soak.scale import scale
from tests.soak.simulated_nodes import NODES
from tests.soak.transitions import transitions
from tests.soak.two_releases import two_releases
from tests.soak.world import World, world

Run = Callable[[World, argparse.Namespace], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Proof:
    """One thing that can be run. `nodes`: simulated GPU nodes. `collects_garbage`: with Kubernetes' collector."""

    text: str
    run: Run
    nodes: int = NODES
    collects_garbage: bool = True


PROOFS: dict[str, Proof] = {
    "kills": Proof(
        "SIGKILL before and after every write of each scenario",
        lambda w, o: kills(w, places=o.places, offset=o.seed, say=_say),
    ),
    "faults": Proof(
        "429, 500, timeout, lost answer at every request of each scenario, 409 at every write",
        lambda w, o: faults(w, places=o.places, offset=o.seed, say=_say),
    ),
    "starts": Proof(
        "the same, and kills, at every request of an operator's start, listings, watches and Lease included",
        lambda w, o: starts(w, places=o.places, offset=o.seed, say=_say),
    ),
    "outage": Proof("no API server for minutes", lambda w, o: outage(w, seconds=o.outage)),
    "leaders": Proof("the leader is killed, frozen, cut off", lambda w, o: leaders(w, rounds=o.rounds)),
    "transitions": Proof(
        "random A → B → A and A → bad → A",
        lambda w, o: transitions(w, count=o.transitions, seed=o.seed, first=o.first, say=_say),
    ),
    "deletions": Proof(
        "many LLMDeployments deleted at once while no garbage collector runs",
        lambda w, o: deletions(w, objects=o.deletions, say=_say),
        collects_garbage=False,
    ),
    "releases": Proof(
        "two releases over the same LLMDeployments, of which the second may write to none",
        lambda w, o: two_releases(w, objects=10, seconds=o.together, say=_say),
    ),
    "scale": Proof(
        "many LLMDeployments over many GPU nodes",
        lambda w, o: scale(w, objects=o.objects, samples=o.samples, idle_seconds=o.idle, say=_say),
        nodes=500,
    ),
}

SCHEDULES, SPECULATION = "schedules", "speculation"
OF_ENGINE = {  # they need no cluster
    SCHEDULES: "random schedules of the engine in all its execution modes, each request against itself alone",
    SPECULATION: "the same with every kind of drafter, and drafters that mean harm, against answers without drafts",
}


def main() -> int:
    options = _parser().parse_args()
    names = options.names or [*PROOFS, *OF_ENGINE]
    if options.only is not None:
        from tests.soak.schedules import plan, proof  # torch, which the other proofs do not need

        chosen = plan.SPECULATION if options.names == [SPECULATION] else plan.SCHEDULES
        return 0 if proof.run_one(options.only, options.seed, print, chosen) else 1
    bad = 0
    for name in [one for one in OF_ENGINE if one in names]:
        missed = _prove_of_engine(name, options)
        bad += bool(missed)
        if any(line.startswith("interrupted") for line in missed):
            return 130
    of_cluster = [name for name in names if name not in OF_ENGINE]
    return _main_of_cluster(of_cluster, options, bad) if of_cluster else min(bad, 1)


def _main_of_cluster(names: list[str], options: argparse.Namespace, bad: int) -> int:
    steps = Steps()
    try:
        found = tools.ensure(steps)
    except (ClusterError, FileNotFoundError) as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    finally:
        steps.close()
    for name in names:
        try:
            missed = asyncio.run(_prove(name, found, options))
            bad += bool(missed)
            if any(line.startswith("interrupted") for line in missed):
                return 130
        except* (TooSlow, DidNotStart) as group:
            bad += 1
            for one in group.exceptions:
                print(f"soak: {name}: {one}", file=sys.stderr)
    return 1 if bad else 0


async def _prove(name: str, found: tools.Tools, options: argparse.Namespace) -> list[str]:
    proof = PROOFS[name]
    _say(f"{name}: {proof.text}")
    began = time.monotonic()
    nodes = options.nodes or proof.nodes
    async with world(found, nodes=nodes, keep=options.keep, collects_garbage=proof.collects_garbage) as where:
        if options.keep:
            _say(f"logs: {where.plane.folder}")
        result = await proof.run(where, options)
    return _write(name, began, result, results.OPERATOR)


def _prove_of_engine(name: str, options: argparse.Namespace) -> list[str]:
    from tests.soak.schedules import plan
    from tests.soak.schedules.proof import prove

    _say(f"{name}: {OF_ENGINE[name]}")
    began, state = time.monotonic(), results.FOLDER / f"{name}.partial.jsonl"
    speculates = name == SPECULATION
    result = prove(
        count=options.requests if speculates else options.schedules,  # each schedule has a request
        seed=options.seed,
        first=options.first,
        processes=options.processes,
        state=state,
        version=results.last_change(results.RUNTIME),
        say=_say,
        plan=plan.SPECULATION if speculates else plan.SCHEDULES,
        requests=options.requests if speculates else None,
    )
    missed = _write(name, began, result, results.RUNTIME)
    if not result["interrupted"] and not result["crashes"]:
        state.unlink(missing_ok=True)
    return missed


def _write(name: str, began: float, result: dict[str, Any], sources: tuple[str, ...]) -> list[str]:
    """Write a result; return the goals that it misses."""
    missed = results.missed(name, result)
    command = "python -m tests.soak " + " ".join(sys.argv[1:] or [*PROOFS, *OF_ENGINE])
    path = results.write(name, command, time.monotonic() - began, result, missed, sources)
    for line in missed or ["every goal reached"]:
        _say(f"  {line}")
    _say(f"  {path}")
    return missed


def _parser() -> argparse.ArgumentParser:
    texts = {name: proof.text for name, proof in PROOFS.items()} | OF_ENGINE
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description="The operator under faults and at scale, the engine under random schedules.",
        epilog="\n".join(f"{name:12} {text}" for name, text in texts.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", choices=[*texts, []], metavar="NAME", help="which; all of them by default")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn by chance")
    parser.add_argument("--places", type=int, help="so many places a fault and scenario, instead of every one")
    parser.add_argument("--outage", type=float, default=300.0, help="seconds without an API server")
    parser.add_argument("--rounds", type=int, default=5, help="of each way to lose a leader")
    parser.add_argument("--transitions", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="number of the first transition or schedule")
    parser.add_argument("--deletions", type=int, default=600, help="LLMDeployments that are deleted at once")
    parser.add_argument("--together", type=float, default=300.0, help="seconds of two releases over the same objects")
    parser.add_argument("--objects", type=int, default=1000, help="LLMDeployments of the scale run")
    parser.add_argument("--nodes", type=int, help="simulated GPU nodes, instead of what the proof wants")
    parser.add_argument("--samples", type=int, default=200, help="timed changes of each kind in the scale run")
    parser.add_argument("--idle", type=float, default=600.0, help="seconds of rest in the scale run")
    parser.add_argument("--schedules", type=int, default=10_000, help="of the engine")
    parser.add_argument("--requests", type=int, default=2000, help="that speculation compares")
    parser.add_argument("--processes", type=int, help="that run schedules; by default one for each core")
    parser.add_argument("--only", type=int, metavar="N", help="run one schedule, and say what it does")
    parser.add_argument("--keep", action="store_true", help="leave the folder with all logs")
    return parser


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
