"""What every run of pytest in this repository has: tiers and times."""

pytest_plugins = ["tests.tiers.plugin", "tests.times.record"]
