"""`python3 -m millstream`: the image's entry point."""

from __future__ import annotations

import sys

from millstream.cli import main

sys.exit(main())
