"""One schedule on one engine: every output is compared with the request alone, every block is counted."""

from __future__ import annotations

import gc
import itertools
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace

import torch

from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import (
    FinishReason,
    Request,
    RequestError,
    SamplingParams,
    SpeculationStats,
    TokenLogprobs,
    TokenOutput,
)
from millstream_runtime.engine.scheduling.block_manager import Table
from tests.soak.schedules.cached_blocks import Known, wrong_blocks
from tests.soak.schedules.catalogue import Alone, Catalogue
from tests.soak.schedules.draft_kinds import DraftKind
from tests.soak.schedules.engines import CountedSequence, Engines
from tests.soak.schedules.findings import Difference, Findings, Kind
from tests.soak.schedules.schedule import (
    Action,
    Arrive,
    Cancel,
    Drain,
    NoMemory,
    Schedule,
    Settings,
    Spoil,
    Step,
    Target,
)
from tests.support.crowded import Crowded
from tests.support.draft_pool import wrong_draft_blocks
from tests.support.short_of_memory import ShortOfMemory
from tests.support.tolerance import tolerance
from tests.support.tree_drafters import count_moved

STEPS_WITHOUT_OUTPUT = 2000  # an engine that takes so many is stuck


@dataclass
class Client:
    """One arrival: what it has received so far, and what it may receive."""

    arrival: Arrive
    request: Request
    alone: Alone
    most_tokens: int
    tokens: list[int] = field(default_factory=list)
    num_compared: int = 0
    is_comparable: bool = True
    is_spoilt: bool = False

    @property
    def label(self) -> str:
        return f"{self.arrival.name} (request {self.arrival.request})"


def run_schedule(schedule: Schedule, engines: Engines, catalogue: Catalogue) -> Findings:
    """Run a schedule to its end, and look at what is left."""
    asked = {one.request for one in schedule.actions if isinstance(one, Arrive)}
    # Before the engine is there, and what is replaced for it.
    answers = {tuple(catalogue.request(one).prompt_token_ids): catalogue.alone(one).token_ids for one in asked}
    longest = longest_tokens(schedule, catalogue)
    with engines.of_schedule(schedule, longest, answers) as engine:
        run = ScheduleRun(schedule, engine, catalogue)
        if any(isinstance(one, NoMemory) for one in schedule.actions):
            run.short = ShortOfMemory(engine, MemoryError)
        try:
            for action in schedule.actions:
                run.act(action)
            run.look_at_what_is_left()
        except Exception as error:  # whatever ends an engine is a finding
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{where.filename.rpartition('/')[2]}:{where.lineno}"
            run.findings.add(Kind.CRASH, f"{type(error).__name__} at {place}: {error}")
        finally:
            if run.short is not None:
                run.short.give_back()
    return run.findings


def fits(arrival: Arrive, settings: Settings, catalogue: Catalogue) -> bool:
    """Whether the engine takes the request at all."""
    return len(catalogue.request(arrival.request).prompt_token_ids) < settings.max_model_len


def longest_tokens(schedule: Schedule, catalogue: Catalogue) -> int:
    """Of the longest request of a schedule, prompt and answer."""
    arrivals = [one for one in schedule.actions if isinstance(one, Arrive)]
    lengths = [
        min(schedule.settings.max_model_len, len(catalogue.request(one.request).prompt_token_ids) + one.max_tokens)
        for one in arrivals
        if fits(one, schedule.settings, catalogue)
    ]
    return max(lengths, default=1)


class ScheduleRun:
    """The clients of one engine."""

    def __init__(self, schedule: Schedule, engine: Engine, catalogue: Catalogue) -> None:
        self.findings = Findings()
        self.short: ShortOfMemory | None = None
        CountedSequence.alive.clear()
        self._settings, self._engine, self._catalogue = schedule.settings, engine, catalogue
        self._running: dict[str, Client] = {}
        self._all: list[Client] = []
        self._num_given_up = 0
        self._left_in_this_step: dict[str, Client] = {}  # who went after one of its outputs
        self._moved = count_moved(engine) if schedule.settings.draft_tree is not None else []

    # Actions

    def act(self, action: Action) -> None:
        match action:
            case Arrive():
                self._arrive(action)
            case Cancel(name):
                self._cancel(name)
            case Step(count):
                for _ in range(count):
                    if self._engine.has_work():
                        self._step()
            case Drain():
                self._drain()
            case Spoil(name):
                self._spoil(name)
            case NoMemory(passes):
                if self.short is not None:
                    self.short.passes_left = passes
            case Target(milliseconds):
                if self._engine._pace is not None:
                    self._engine.set_target_itl(milliseconds)

    def _arrive(self, arrival: Arrive) -> None:
        if arrival.name in self._running or not fits(arrival, self._settings, self._catalogue):
            return
        drawn, alone = self._catalogue.request(arrival.request), self._catalogue.alone(arrival.request)
        seed = drawn.sampling.seed if arrival.is_seeded else None
        request = replace(
            drawn,
            request_id=arrival.name,
            sampling=replace(drawn.sampling, max_tokens=arrival.max_tokens, seed=seed),
            priority=arrival.priority,
            cache_salt=arrival.cache_salt,
            is_heartbeat=arrival.is_heartbeat,
        )
        most = min(arrival.max_tokens, self._settings.max_model_len - len(request.prompt_token_ids))
        client = Client(arrival, request, alone, most)
        client.is_comparable = arrival.is_seeded or drawn.sampling.temperature == 0
        self._running[arrival.name] = client
        self._all.append(client)
        self.findings.counts["requests"] += 1
        self._engine.add_request(request)

    def _cancel(self, name: str) -> None:
        self.findings.counts["cancelled"] += name in self._running
        self._running.pop(name, None)
        self._engine.abort(name)
        self._engine.check_integrity()

    def _drain(self) -> None:
        silent = 0
        while self._engine.has_work():
            silent = 0 if self._step() else silent + 1
            if silent > STEPS_WITHOUT_OUTPUT:
                raise RuntimeError(f"{silent} steps without an output, and {sorted(self._running)} wait")

    def _step(self) -> int:
        """Take a step; return how many outputs it had."""
        outputs = self._engine.step()
        self._left_in_this_step.clear()
        self._engine.check_integrity()
        self.findings.counts["steps"] += 1
        for output in outputs:
            self._receive(output)
        return len(outputs)

    @torch.inference_mode()
    def _spoil(self, name: str) -> None:
        """As if the last tokens of a running request had given NaN: in blocks that nobody else can find."""
        sequence = self._engine._sequences.get(name)
        if name not in self._running or sequence is None or not sequence.num_computed_tokens:
            return
        cache, pool = self._engine._runner._forward._cache, self._engine._blocks._pool
        place = (sequence.num_computed_tokens - 1) // self._settings.block_size_tokens
        tables: list[Table] = [sequence, *sequence.other_tables]
        for group, table in enumerate(tables):
            block = table.block_table[place]
            if pool.num_holders[block] == 1 and not any(block in one for one in pool.caches):
                for layer in (index for index, own in enumerate(cache.layout.group_of) if own == group):
                    cache.layers[layer][block] = float("nan")
                self._running[name].is_spoilt = True
                self.findings.counts["spoilt"] += 1

    # Outputs

    def _receive(self, output: TokenOutput) -> None:
        if output.request_id in self._left_in_this_step:
            # The engine had given all of the step's outputs before the client left, and has cached their blocks.
            if output.token_id is not None:
                self._left_in_this_step[output.request_id].tokens.append(output.token_id)
            return
        client = self._running.get(output.request_id)
        if client is None:
            self.findings.add(Kind.ANSWER, f"{output.request_id} has an output after its end")
            return
        if output.token_id is None:
            self._given_up(client, output)
        else:
            self._receive_token(client, output, output.token_id)
        if output.finish_reason is not None:
            del self._running[output.request_id]
        elif client.arrival.leaves_after == len(client.tokens):
            self._left_in_this_step[output.request_id] = client
            self._cancel(output.request_id)

    def _given_up(self, client: Client, output: TokenOutput) -> None:
        no_memory = output.error is RequestError.OUT_OF_MEMORY
        self._num_given_up += no_memory
        failed = self.short.num_failed if self.short is not None else 0
        is_right = self._num_given_up <= failed if no_memory else client.is_spoilt
        if output.finish_reason is not FinishReason.ERROR or not is_right:
            self.findings.add(Kind.ANSWER, f"{client.label} was given up: {output.error}")
        self.findings.counts["given up"] += 1

    def _receive_token(self, client: Client, output: TokenOutput, token_id: int) -> None:
        position = len(client.tokens)
        client.tokens.append(token_id)
        self.findings.counts["tokens"] += 1
        if position >= client.most_tokens:
            self.findings.add(Kind.ANSWER, f"{client.label} has more than {client.most_tokens} tokens")
            client.is_comparable = False
        if (output.prefill is not None) != (position == 0):
            self.findings.add(Kind.ANSWER, f"{client.label}: what is known of the prompt came with token {position}")
        if not client.is_comparable:
            return
        client.num_compared += 1
        expected = client.alone.token_ids[position : position + 1]
        self.findings.counts["compared tokens"] += 1
        if expected != [token_id]:
            client.is_comparable = False
            before = expected[0] if expected else -1
            self.findings.differences.append(Difference(client.arrival.request, position, token_id, before))
            return
        self._compare_details(client, output, position)

    def _compare_details(self, client: Client, output: TokenOutput, position: int) -> None:
        """What comes with a token that is right."""
        alone, reason = client.alone, None
        if alone.finish_reason is FinishReason.STOP and position + 1 == len(alone.token_ids):
            reason = FinishReason.STOP
        elif position + 1 == client.most_tokens:
            reason = FinishReason.LENGTH
        if output.finish_reason is not reason:
            self.findings.add(Kind.ANSWER, f"{client.label} at token {position}: it ends by {output.finish_reason}")
        most = tolerance(self._engine.model_config)
        if not _same_logprobs([output.logprobs], [alone.logprobs[position]], most):
            self.findings.add(
                Kind.ANSWER, f"{client.label} at token {position}: {output.logprobs}, not {alone.logprobs[position]}"
            )
        if output.prefill is not None and not _same_logprobs(
            output.prefill.prompt_logprobs or (), alone.prompt_logprobs or (), most
        ):
            self.findings.add(Kind.ANSWER, f"{client.label}: other log-probabilities of the prompt")

    # The end

    def look_at_what_is_left(self) -> None:
        """All clients are gone: nothing is held for them, and what is cached is right."""
        engine, findings = self._engine, self.findings
        if self._running:
            findings.add(Kind.ANSWER, f"{sorted(self._running)} have no end")
        engine.check_integrity()
        stats = engine.stats()
        left = {
            "requests": len(engine._sequences),
            "running": stats.num_requests_running,
            "waiting": stats.num_requests_waiting,
            "blocks": stats.kv_blocks_used,
            "rows": self._settings.max_num_seqs - len(engine._scheduler._free_rows),
            "steps in flight": int(engine._in_flight is not None),
            "sequences": _num_alive(),
        }
        if any(left.values()):
            findings.add(Kind.LEAK, f"left behind: { {name: count for name, count in left.items() if count} }")
        if self._settings.execution != "on two ranks":
            for text in wrong_blocks(engine, self._known()):
                findings.add(Kind.CONTENTS, text)
            if self._drafts_itself:
                for block in wrong_draft_blocks(engine)[0]:
                    findings.add(Kind.CONTENTS, f"block {block} of the draft model has other keys than the target's")
        self._count_drafts(stats.speculation)
        findings.counts["paths of trees that moved"] += len(self._moved)
        self._count_compared_requests()
        findings.counts["preemptions"] += stats.num_preemptions_total
        findings.counts["prefix hit tokens"] += stats.prefix_cache_hit_tokens_total
        findings.counts["replayed steps"] += engine.graphs.replayed_steps if engine.graphs is not None else 0
        findings.counts["cut prompts"] += engine._pace.num_cut if isinstance(engine._pace, Crowded) else 0
        findings.counts["steps without memory"] += self.short.num_failed if self.short is not None else 0

    @property
    def _drafts_itself(self) -> bool:
        return self._settings.max_draft_tokens is not None and self._settings.drafts is DraftKind.ITSELF

    def _count_drafts(self, found: SpeculationStats | None) -> None:
        if found is None:
            return
        counts = self.findings.counts
        counts["drafts that stood"] += found.num_accepted_tokens
        counts["drafts that fell"] += found.num_draft_tokens - found.num_accepted_tokens
        counts.update(
            {f"decodes without drafts: {reason}": number for reason, number in found.skipped.items() if number}
        )
        if self._drafts_itself:
            counts["drafts of a model"] += found.num_draft_tokens

    def _count_compared_requests(self) -> None:
        """Those of which at least one token was compared, and what they asked for."""
        for client in self._all:
            if client.num_compared:
                self.findings.counts["compared requests"] += 1
                self.findings.parameters.update(parameters_of(client.request))
                if self._engine.processors_for(client.request):
                    self.findings.parameters["logits processor"] += 1
                if client.arrival.leaves_after is not None:
                    self.findings.parameters["stop after so many tokens"] += 1

    def _known(self) -> Iterable[Known]:
        """What may be cached; nobody else finds the blocks of a request that was spoilt."""
        for client in self._all:
            prompt = client.request.prompt_token_ids
            pairs = zip(client.tokens, client.alone.token_ids, strict=False)
            num_same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            num_comparable = 0 if client.is_spoilt else len(prompt) + num_same
            yield Known(client.request, [*prompt, *client.tokens], client.alone, num_comparable)


def parameters_of(request: Request) -> list[str]:
    """The names of all that a request sets to anything but its default, and whether it is greedy."""
    sampling = request.sampling
    asked = [
        one.name
        for one in fields(SamplingParams)
        if one.name not in ("max_tokens", "temperature", "seed")
        and getattr(sampling, one.name) != (frozenset() if one.name == "stop_token_ids" else one.default)
    ]
    asked += [name for name in ("priority", "cache_salt", "is_heartbeat") if getattr(request, name)]
    return [*asked, "seeded, temperature above 0" if sampling.temperature else "greedy"]


def _num_alive() -> int:
    """Requests that some object still holds."""
    if CountedSequence.alive:
        gc.collect()
    return len(CountedSequence.alive)


def _same_logprobs(
    found: Iterable[TokenLogprobs | None], expected: Iterable[TokenLogprobs | None], most: float
) -> bool:
    """Equal up to `most`. Of alternatives the numbers count: two that are as likely may change places."""

    def numbers(one: TokenLogprobs | None) -> list[float]:
        return [] if one is None else [one.token_id, one.logprob, *(logprob for _, logprob in one.top)]

    rows_found, rows_expected = [numbers(one) for one in found], [numbers(one) for one in expected]
    if list(map(len, rows_found)) != list(map(len, rows_expected)):
        return False
    pairs = zip(itertools.chain(*rows_found), itertools.chain(*rows_expected), strict=True)
    return all(abs(one - two) <= most for one, two in pairs)
