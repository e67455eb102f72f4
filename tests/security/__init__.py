"""The standing suite of attacks: each is tried for real, on this machine alone.

`make test-all` runs it with the unit tests (stage `unit`), and `make test` those of it that are not `deep`. It takes at
most 60 CPU-seconds: `python -m tests.times` shows what a file takes.

    index.py          what was attacked and held, with the tests that try it again; a test checks that all exist
    test_*.py         attacks that have no better place: raw sockets, a local hub or registry, redirects on loopback

An attack belongs to the tests of the part that it is aimed at (`tests/unit/...`) where it has one; then the index names
it. It belongs here where it goes through several parts, or where no part is to blame. Targets, redirects and hubs are
on the loopback interface. What needs a cluster is in `e2e/`. `SECURITY.md` says what each attacker gets, and
`tests/unit/contracts/test_security_classes.py` lists the classes of published vulnerabilities.

A new attack: write the test, let it fail, mend the kind, and add a row to `index.py` or to the page.
"""
