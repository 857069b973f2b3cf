"""Ends what a launcher that was killed leaves behind. Run as a script, on its own.

It is told the process groups of the workers (`+GROUP`, `-GROUP`, a line each), and
kills those that are left when the launcher's end of the pipe is closed, however that
happens. So nothing that a worker has started outlives the launcher, even if the worker
itself is stuck in native code, unless it has left the worker's process group.
"""

import os
import signal
import sys


def main() -> None:
    """Listens until the launcher is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except OSError:
            continue


if __name__ == "__main__":
    main()
