"""Stops what a stack started when the stack itself is killed. Run as a script, with nothing but the standard library.

It reads ``+<process group>`` and ``-<process group>`` lines from its standard input. The other end of that pipe is held
by the stack alone, so end of file means that the stack is gone, whatever ended it: the groups still listed get SIGTERM,
after GRACE_SECONDS SIGKILL, and the stack's private folder is removed.
"""

import os
import shutil
import signal
import sys
import time

GRACE_SECONDS = 5.0
POLL_SECONDS = 0.05  # a group has no handle to wait for, only its own processes have


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; False if there is no such group any more."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def stop_groups(groups: set[int], grace_seconds: float = GRACE_SECONDS) -> None:
    """SIGTERM to every group, SIGKILL to those that are still there after ``grace_seconds``."""
    left = {group for group in groups if signal_group(group, signal.SIGTERM)}
    deadline = time.monotonic() + grace_seconds
    while left and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        left = {group for group in left if signal_group(group, 0)}
    for group in left:
        signal_group(group, signal.SIGKILL)


def main(folder: str) -> None:
    """Follow the stack until its pipe closes, then clean up behind it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    stop_groups(groups)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
