"""A test run that gets SIGTERM ends as by Ctrl-C: fixtures stop the servers and engines that they started."""

from __future__ import annotations

import signal
import threading


def pytest_configure() -> None:
    """Also in each process of ``-n``, where tests run in the main thread."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
