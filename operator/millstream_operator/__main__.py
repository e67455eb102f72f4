"""`python -m millstream_operator`: the operator's process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
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
        asyncio.run(run_until_terminated(Operator(settings)))
    except asyncio.CancelledError:
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        logging.getLogger(__name__).exception("the operator ends because of an error: %s", error)
        return 1
    return 0


async def run_until_terminated(operator: Operator) -> None:
    """Run until SIGTERM, which is handled from the start, so that a Lease that was just acquired is released.

    kopf replaces the handler with its own, but it starts only after the first listing.
    """
    running = asyncio.current_task()
    if running is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    await operator.run()


if __name__ == "__main__":
    sys.exit(main())
