"""Random schedules of the engine: whatever else goes on, a request's tokens depend on the request alone.

    draw(seed, number) ──▶ Schedule: a model, an engine's settings, actions (arrive, cancel, step, NaN, no memory, ...)
          │
    ScheduleRun ── every token against the same request alone ─┐
          │                                                    ├──▶ findings: differing tokens, leaks, crashes
          └────── when all is over: blocks, rows, objects, ────┘
                  the contents of every cached block

`python -m tests.soak schedules` runs thousands of them, in processes; `--only N` runs one and says what it was.
A token that differs is a near-tie where rounding alone could have chosen either (`rounding`); all others are defects.
"""
