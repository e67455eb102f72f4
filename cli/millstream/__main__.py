"""`python3 -m millstream`: the image's entry point."""

from __future__ import annotations

import sys

from millstream.cli import main
from millstream.termination import unwind_on_sigterm

unwind_on_sigterm()  # before a command's imports take seconds: a container's first process would ignore the signal
sys.exit(main())
