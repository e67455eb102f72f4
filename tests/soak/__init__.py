"""The operator under faults and at scale, on a real API server without a node.

    harness ── control plane: etcd, kube-apiserver, controller-manager, scheduler, kwok's nodes (local processes)
       │            ▲
       └─ operator ─┴─ fault proxy: counts, delays, refuses, cuts, kills

The operator runs as its own process, as in a pod, and knows nothing of all this: the harness uses the CRD, the API
server and the process's signals, so it holds for any version of the operator. `python -m tests.soak --help` lists what
can be run; `make soak` runs all of it and writes `tests/soak/results/`. `schedules/` does the same for the engine.
"""
