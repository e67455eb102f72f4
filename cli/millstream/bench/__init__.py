"""`millstream bench`: one workload, an endpoint or an engine, and the numbers a person decides by.

workload ─► load ─► client, openai_api ─► an endpoint ─┐
   │  (pure)  └───► offline ────────────► an engine ───┴─► RequestRecord ─► measure ─► report, plot, compare
   │                                                                         (pure)
   └─ who asks what, when: decided before the first request is sent
"""
