"""Stops a stack's processes if the process that runs the stack is killed. A script of the standard library alone.

The script reads ``+<process group>`` and ``-<process group>`` lines from its standard input. The stack alone holds the
other end of that pipe, so end of file means that the stack is gone. The groups still listed then get SIGTERM and, after
GRACE_SECONDS, SIGKILL; the stack's private folder is removed.
"""

import os
import shutil
import signal
import sys
import time

GRACE_SECONDS = 5.0
POLL_SECONDS = 0.05  # time between two looks at the groups, polled because waitpid takes child processes only


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; return False if the group is gone."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def stop_groups(groups: set[int]) -> None:
    """Send SIGTERM to every group, and SIGKILL to those still there after GRACE_SECONDS."""
    left = {group for group in groups if signal_group(group, signal.SIGTERM)}
    deadline = time.monotonic() + GRACE_SECONDS
    while left and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        left = {group for group in left if signal_group(group, 0)}
    for group in left:
        signal_group(group, signal.SIGKILL)


def main(folder: str) -> None:
    """Read the stack's process groups until its pipe closes, then stop the groups and remove ``folder``."""
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
