"""One schedule, drawn from a seed and a number: plain data, the same on every machine."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tests.soak.schedules.draft_kinds import DraftKind
from tests.soak.schedules.tiny_models import MODELS, TinyModel

NUM_REQUESTS = 60  # of a model, from which schedules draw
REPEATING = range(NUM_REQUESTS, NUM_REQUESTS + 16)  # those whose prompts repeat themselves, for n-grams
MOST_NEW_TOKENS = 20
CONTEXT_TOKENS = 128
EXECUTIONS = {
    "plain": 4,
    "overlapped": 4,
    "replayed": 2,
    "replayed and overlapped": 3,
    "replayed from a tape": 1,  # slow, and nothing but what the tape holds
    "replayed from a tape and overlapped": 1,
    "on two ranks": 0,  # two processes: see TWO_RANKS_SHARE
}  # how often each is drawn
TWO_RANKS_SHARE = 0.01
DRAFTING = ("plain", "on two ranks")  # what drafts by the first stream of random numbers
DRAFTING_SHARE = 0.6
# What came later has a stream of its own: the rest of an older schedule stays what it was.
LATER_DRAFTING_SHARE = 0.35  # of the schedules with another execution
LATER_TWO_RANKS_SHARE = 0.02  # of the schedules that may have two ranks and have one
DRAFT_TOKENS = (1, 2, 3, 4, 8, 16)
DRAFT_MODEL_SHARE, FLIPS_SHARE = 0.5, 0.4  # of the schedules with drafts


@dataclass(frozen=True, slots=True)
class Settings:
    """The engine of a schedule.

    Attributes:
        spare_blocks: of the pool, beyond those of the longest request.
        crowded_tokens: of prompts that a step computes beside others; None: as the pace says.
        is_paced: whether the time of steps bounds the prompts in them, as on a CPU.
        reads_in_place: whether attention takes the path of FlashAttention.
        max_draft_tokens: that a decode checks; None: no drafts.
        draft_tree: that heads propose, instead of one token after another; see `millstream_runtime.draft_tree`.
        drafts: what proposes them.
        governor_flips: whether any number of what may be proposed is checked, at random.
        governor_decides: whether the runtime's governor chooses that number; otherwise all of it is checked.
        corrects_drafts: whether drafts of random weights are replaced by right ones at times.
        accepts_by_distribution: whether drafts of unseeded requests stand by rejection sampling.
    """

    model: str
    execution: str = "plain"
    block_size_tokens: int = 16
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 2048
    max_model_len: int = CONTEXT_TOKENS
    spare_blocks: int = 100
    enable_prefix_caching: bool = False
    enable_hybrid_kv_cache_manager: bool = False
    crowded_tokens: int | None = None
    is_paced: bool = False
    reads_in_place: bool = False
    max_draft_tokens: int | None = None
    drafts: DraftKind = DraftKind.OFTEN_RIGHT
    governor_flips: bool = False
    governor_decides: bool = False
    corrects_drafts: bool = False
    accepts_by_distribution: bool = False
    draft_tree: str | None = None

    @property
    def drafter_name(self) -> str:
        """What drafts, and whether in a tree."""
        return str(self.drafts) if self.draft_tree is None else f"{self.drafts}, a tree"


@dataclass(frozen=True, slots=True)
class Arrive:
    """A request of the catalogue comes, under a name that no running request has."""

    name: str
    request: int
    max_tokens: int
    priority: int = 0
    cache_salt: str = ""
    leaves_after: int | None = None  # tokens, after which its client cancels, as the server does at a stop string
    is_seeded: bool = True  # otherwise its tokens are any
    is_heartbeat: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """Whoever has the name is cancelled, if it runs."""

    name: str


@dataclass(frozen=True, slots=True)
class Step:
    """So many steps, as long as there is work."""

    count: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Steps until there is no work: a pause of all clients."""


@dataclass(frozen=True, slots=True)
class Spoil:
    """The numbers of a running request that it shares with nobody become NaN."""

    name: str


@dataclass(frozen=True, slots=True)
class NoMemory:
    """A pass of the model finds no memory, after so many that do."""

    passes: int


@dataclass(frozen=True, slots=True)
class Target:
    """The target of the inter-token latency changes while requests run."""

    milliseconds: int


Action = Arrive | Cancel | Step | Drain | Spoil | NoMemory | Target


@dataclass(frozen=True, slots=True)
class Schedule:
    """What happens to one engine, in order. It ends with a drain."""

    number: int
    seed: int  # of what is drawn while it runs
    settings: Settings
    actions: tuple[Action, ...]


def draw(seed: int, number: int) -> Schedule:
    """Return schedule `number` of a run with `seed`."""
    rng = random.Random(f"{seed}/{number}")
    name = rng.choice([*MODELS])
    settings = draw_settings(rng, name, MODELS[name])
    if settings.max_draft_tokens is not None:
        settings = _with_drafter(settings, random.Random(f"{seed}/{number}/drafts"))
    run_seed, actions = rng.getrandbits(32), draw_actions(rng, settings)
    later = random.Random(f"{seed}/{number}/later")
    return Schedule(number, run_seed, _with_later_choices(later, settings, actions), actions)


def _with_drafter(settings: Settings, rng: random.Random) -> Settings:
    kind = DraftKind.ITSELF if rng.random() < DRAFT_MODEL_SHARE else DraftKind.OFTEN_RIGHT
    return replace(settings, drafts=kind, governor_flips=rng.random() < FLIPS_SHARE)


def _with_later_choices(rng: random.Random, settings: Settings, actions: tuple[Action, ...]) -> Settings:
    """More schedules with drafts, and more on two ranks, which a step without memory would end."""
    if settings.execution not in DRAFTING and rng.random() < LATER_DRAFTING_SHARE:
        settings = _with_drafter(replace(settings, max_draft_tokens=rng.choice(DRAFT_TOKENS)), rng)
    may_split = may_have_two_ranks(MODELS[settings.model]) and not any(isinstance(one, NoMemory) for one in actions)
    if may_split and rng.random() < LATER_TWO_RANKS_SHARE:
        settings = replace(settings, execution="on two ranks", reads_in_place=False)
    return settings


def may_have_two_ranks(model: TinyModel) -> bool:
    """Kernels of 4 bits round to bfloat16 in each rank's share: two ranks compute otherwise than the one that answers
    alone, drafts or none."""
    return model.can_split and model.packed is None


def draw_settings(rng: random.Random, name: str, model: TinyModel) -> Settings:
    """Return an engine of model `name`."""
    max_num_seqs = rng.choice((1, 2, 3, 4, 6, 8))
    execution = rng.choices([*EXECUTIONS], [*EXECUTIONS.values()])[0]
    settings = Settings(
        model=name,
        execution=execution,
        block_size_tokens=rng.choice((8, 8, 8, 16, 16, 32)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.choice((16, 17, 24, 33, 48, 64, 128, 256)),
        max_model_len=rng.choice((CONTEXT_TOKENS, CONTEXT_TOKENS, 96, 72)),
        spare_blocks=rng.randint(0, rng.choice((2, 6, 16, 80))),
        enable_prefix_caching=rng.random() < 0.75,
        enable_hybrid_kv_cache_manager=model.mixes_windows and rng.random() < 0.6,
        crowded_tokens=rng.randint(3, 41) if rng.random() < 0.3 else None,
        is_paced=rng.random() < 0.5,
        reads_in_place=model.has_plain_attention and rng.random() < 0.2,
    )
    if model.can_split and rng.random() < TWO_RANKS_SHARE and model.packed is None:
        settings = replace(settings, execution="on two ranks", reads_in_place=False)
    if settings.execution in DRAFTING and rng.random() < DRAFTING_SHARE:
        settings = replace(settings, max_draft_tokens=rng.choice(DRAFT_TOKENS))
    return settings


def draw_actions(rng: random.Random, settings: Settings) -> tuple[Action, ...]:
    """Return what happens to an engine, up to a last drain."""
    return tuple(_Actions(rng, settings).draw())


class _Actions:
    """Draws what happens to an engine."""

    def __init__(self, rng: random.Random, settings: Settings) -> None:
        self._rng = rng
        self._names: list[str] = []
        self._num_spoilt = 0
        # Few requests, so that they come again and find each other's prefixes.
        requests = REPEATING if settings.drafts is DraftKind.N_GRAMS else range(NUM_REQUESTS)
        self._topics = rng.sample(requests, rng.randint(2, 8))
        is_one_process = settings.execution != "on two ranks"
        self._weights = {
            self._arrive: 30,
            self._step: 40,
            self._cancel: rng.choice((0, 8, 25)),
            self._drain: 2,
            self._spoil: 6 if rng.random() < 0.15 else 0,
            self._no_memory: 6 if is_one_process and rng.random() < 0.12 else 0,
            self._target: 4 if settings.is_paced else 0,
        }

    def draw(self) -> list[Action]:
        actions: list[Action] = [*self._arrive()]
        for _ in range(self._rng.randint(4, 28)):
            (make,) = self._rng.choices([*self._weights], [*self._weights.values()])
            actions += make()
        if self._rng.random() < 0.4:  # and what is cached by then is used
            actions += [Drain(), *self._arrive()]
        return [*actions, Drain()]

    def _arrive(self) -> list[Action]:
        """A request, or the choices of one (n > 1)."""
        rng = self._rng
        request = rng.choice(self._topics)
        num_choices = rng.choice((1, 1, 1, 1, 2, 3))
        arrivals: list[Action] = []
        for choice in range(num_choices):
            name = f"r{len(self._names)}"
            self._names.append(name)
            arrivals.append(
                Arrive(
                    name,
                    request,
                    max_tokens=rng.choice((1, 2, 3, 5, 8, 12, MOST_NEW_TOKENS)),
                    priority=rng.choice((0, 0, 0, 0, -1, 1)),
                    cache_salt=rng.choice(("", "", "", "tenant")),
                    leaves_after=rng.randint(1, 8) if rng.random() < 0.1 else None,
                    is_seeded=choice == 0 or rng.random() < 0.5,
                    is_heartbeat=rng.random() < 0.03,
                )
            )
        return arrivals

    def _step(self) -> list[Action]:
        return [Step(self._rng.choice((1, 1, 2, 3, 5, 9)))]

    def _cancel(self) -> list[Action]:
        """Whoever came lately, perhaps in this very moment, and perhaps the name is used again at once."""
        rng = self._rng
        cancelled = rng.choice(self._names[-6:])
        actions: list[Action] = [Cancel(cancelled)]
        if rng.random() < 0.3:
            again = Arrive(cancelled, rng.choice(self._topics), rng.randint(1, MOST_NEW_TOKENS))
            actions.append(again)
        return actions

    def _drain(self) -> list[Action]:
        return [Drain()]

    def _spoil(self) -> list[Action]:
        """Nobody else begins with the blocks of a request that is to be spoilt."""
        rng = self._rng
        name = f"spoilt-{self._num_spoilt}"
        self._num_spoilt += 1
        arrive = Arrive(name, rng.choice(self._topics), MOST_NEW_TOKENS, cache_salt=name)
        return [arrive, Step(rng.randint(1, 6)), Spoil(name)]

    def _no_memory(self) -> list[Action]:
        return [NoMemory(self._rng.randrange(4)), Step(2)]

    def _target(self) -> list[Action]:
        return [Target(self._rng.choice((1, 20, 50, 1000)))]
