"""Start the servers, let them take turns on each case, and keep what was found."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.servers.goals import judge
from benchmarks.servers.load import Case, Target, answers_one_token, greedy_answers, run_case
from benchmarks.servers.models import CONCURRENT, ROOT, Model
from benchmarks.servers.peers import OURS, SERVERS
from benchmarks.servers.process import ServerProcess, free_port

IDLE_CPU_SHARE = 0.02  # cores; a server that uses more while idle is stopped during the turns of others
FIGURES = ("tokens_per_second", "ttft_p50_ms", "ttft_p95_ms", "itl_p99_ms")
FAR_BEHIND = 6.0
WARM_UP_SEED, ROUNDS_SEED = 1_000_000, 1_000


@dataclass
class Running:
    """A server that is ready."""

    target: Target
    process: ServerProcess
    pauses: bool = False


@dataclass
class Comparison:
    """One model on all servers; `report` is what is saved."""

    model: Model
    scratch: Path
    output: Path
    threads: int
    rounds: int
    report: dict[str, Any] = field(default_factory=dict)

    def run(self, names: Sequence[str], cases: Sequence[Case], minutes: float) -> None:
        """All of it. The servers are ended also when this is interrupted."""
        self.report = self._head()
        with ExitStack() as stack:
            running = self._start_all(names, stack)
            self._compare_answers(running)
            self._find_idle_use(running)
            self._save()
            began = time.monotonic()
            for number, case in enumerate(cases):
                if (time.monotonic() - began) / 60 >= minutes:
                    self.report["not_run"] = [one.name for one in cases[number:]]
                    break
                self.report["cases"][case.name] = self._run_case(running, case)
                self._note_memory(running)
                self._judge()
                self._save()
                print(self._row(case), flush=True)
        self._save()

    def _head(self) -> dict[str, Any]:
        lengths = {name: f"{one.input_tokens} in, {one.output_tokens} out" for name, one in self.model.lengths.items()}
        return {
            "model": self.model.name,
            "description": self.model.description,
            "rounds": self.rounds,
            "threads": self.threads,
            "dtype": self.model.dtype,
            "tokens": lengths,
            "max_model_len": self.model.max_model_len,
            "max_num_seqs": CONCURRENT,
            "kv_cache_tokens": self.model.kv_cache_tokens,
            "kv_cache_bytes": self.model.kv_cache_bytes,
            "machine": machine.describe(),
            "servers": {},
            "absent": {},
            "cases": {},
            "goals": [],
            "not_run": [],
        }

    def _start_all(self, names: Sequence[str], stack: ExitStack) -> list[Running]:
        """One after another, so that none boots while another does."""
        running: list[Running] = []
        for name in names:
            try:
                server = SERVERS[name](self.model, port := free_port(), self.threads, self.scratch)
                environment = {"OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1", **server.environment}
                process = ServerProcess(server.command, environment, self.scratch / f"{name}.log")
                stack.callback(process.end)
                target = Target(server, f"http://127.0.0.1:{port}")
                seconds = process.wait_until_ready(lambda target=target: answers_one_token(target, self.model))  # type: ignore[misc]
            except Exception as error:  # also a conversion: whatever it is, the others run
                self.report["absent"][name] = self._plain(error)
                print(f"  {name}: {self.report['absent'][name]}", flush=True)
                continue
            self.report["servers"][name] = {
                "version": server.version,
                "boot_seconds": round(seconds, 1),
                "about": server.about,
            }
            print(f"  {name} {server.version}: ready in {seconds:.1f} s", flush=True)
            running.append(Running(target, process))
        return running

    def _compare_answers(self, running: Sequence[Running]) -> None:
        """Whether each server answers greedily as ours does, prompt by prompt."""
        answers = {one.target.server.name: greedy_answers(one.target, self.model) for one in running}
        ours = answers.get(OURS, [])
        for name, theirs in answers.items():
            same = [a.strip() == b.strip() for a, b in zip(theirs, ours, strict=False)]
            self.report["servers"][name]["same_greedy_answers"] = same
            failed = sorted({answer for answer in theirs if answer.startswith("failed: ")})
            if failed:
                self.report["servers"][name]["greedy_failures"] = [self._plain(one) for one in failed]
            if not all(same):
                print(f"  {name}: {sum(same)} of {len(same)} greedy answers equal to ours", flush=True)

    def _find_idle_use(self, running: Sequence[Running]) -> None:
        for one in running:
            share = one.process.idle_cpu_share()
            one.pauses = share > IDLE_CPU_SHARE
            about = self.report["servers"][one.target.server.name]
            about |= {"idle_cores": round(share, 3), "stopped_between_turns": one.pauses}

    def _run_case(self, running: Sequence[Running], case: Case) -> dict[str, Any]:
        """Warm up, then the rounds. A server that fails, or is far behind when warmed up, is left out of the rest."""
        able = [one for one in running if not case.ours_alone or one.target.server.name == OURS]
        dropped: dict[str, str] = {}
        found: dict[str, list[dict[str, Any]]] = {one.target.server.name: [] for one in able}
        warm_up: dict[str, float] = {}
        for round_ in range(-1, self.rounds):
            turn = max(0, round_) % max(1, len(able))
            for one in able[turn:] + able[:turn]:
                name = one.target.server.name
                try:
                    result = self._turn(running, one, case, round_)
                except Exception as error:
                    result = {"failed": 1, "errors": {self._plain(error): 1}}
                if result["failed"]:
                    dropped[name] = f"failed: {self._plain('; '.join(result['errors']))}"
                    found.pop(name)
                elif round_ >= 0:
                    found[name].append(result)
                else:
                    warm_up[name] = result["tokens_per_second"]
            if round_ < 0:
                dropped |= far_behind(warm_up)
            able = [one for one in able if one.target.server.name not in dropped]
        medians = {
            name: {key: statistics.median(one[key] for one in results) for key in FIGURES}
            for name, results in found.items()
            if results
        }
        rounds = {name: results for name, results in found.items() if results}
        ratios = _ratios(medians)
        return {"medians": medians, "ratios": ratios, "rounds": rounds, "dropped": dropped, "warm_up": warm_up}

    def _turn(self, running: Sequence[Running], one: Running, case: Case, round_: int) -> dict[str, Any]:
        """One round of one server, with the others at rest."""
        for other in running:
            if other.pauses and other is not one:
                other.process.pause()
        one.process.resume()
        seed = WARM_UP_SEED if round_ < 0 else ROUNDS_SEED * case.clients + round_
        try:
            return run_case(one.target, case, self.model, seed, warm_up=round_ < 0)
        finally:
            for other in running:
                other.process.resume()

    def _note_memory(self, running: Sequence[Running]) -> None:
        """What each server holds after the case: pages of its cache that requests have filled stay."""
        for one in running:
            self.report["servers"][one.target.server.name]["memory_bytes"] = one.process.memory_bytes()

    def _judge(self) -> None:
        medians = {name: case["medians"] for name, case in self.report["cases"].items()}
        memory = {name: about["memory_bytes"] for name, about in self.report["servers"].items()}
        self.report["goals"] = judge(self.model.name, self.model.dtype, medians, memory)

    def _save(self) -> None:
        scratch = self.output.with_name(f".{self.output.name}.tmp")
        scratch.write_text(json.dumps(self.report, indent=1) + "\n", encoding="utf-8")
        scratch.replace(self.output)

    def _row(self, case: Case) -> str:
        found = self.report["cases"][case.name]
        lines = [f"\n  {case.name:12}{'tokens/s':>12}{'TTFT p50':>12}{'p95':>10}{'ITL p99':>10}   ours / it"]
        for name, figures in found["medians"].items():
            ratio = found["ratios"].get(name, {}).get("tokens_per_second")
            cells = "".join(f"{figures[key]:>{width}.1f}" for key, width in zip(FIGURES, (12, 12, 10, 10), strict=True))
            lines.append(f"    {name:10}{cells}   {f'{ratio:.2f}' if ratio is not None else ''}")
        lines += [f"    {name:10}left out, {why}" for name, why in found["dropped"].items()]
        return "\n".join(lines)

    def _plain(self, problem: object) -> str:
        """One line without this machine's folders."""
        text = " ".join(str(problem).split()) or type(problem).__name__
        for folder in (self.scratch, ROOT.resolve(), ROOT, (ROOT / ".tools").resolve(), Path.home()):
            text = text.replace(str(folder), "…")
        return text[:400]


def far_behind(rates: dict[str, float]) -> dict[str, str]:
    """Peers that are not worth the time of the rounds, and why. Ours always is."""
    fastest = max(rates.values(), default=0.0)
    return {
        name: f"{fastest / max(rate, 1e-9):.0f} × slower than the fastest in the warm-up"
        for name, rate in rates.items()
        if name != OURS and rate * FAR_BEHIND < fastest
    }


def _ratios(medians: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Our figure over each peer's."""
    ours = medians.get(OURS)
    if ours is None:
        return {}
    return {
        name: {key: round(ours[key] / theirs[key], 3) for key in FIGURES if theirs[key] > 0}
        for name, theirs in medians.items()
        if name != OURS
    }
