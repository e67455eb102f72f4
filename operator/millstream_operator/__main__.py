"""`python -m millstream_operator`: the operator's process."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from millstream_operator.app import Operator
from millstream_operator.settings import SettingsError, read_settings


def main() -> int:
    try:
        settings = read_settings(os.environ)
    except SettingsError as error:
        print(f"millstream-operator: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("kopf").setLevel(max(settings.log_level, logging.WARNING))
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    try:
        asyncio.run(Operator(settings).run())
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        logging.getLogger(__name__).exception("the operator ends: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
