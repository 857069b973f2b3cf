"""Agents on other hosts, started through ssh."""

import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from meshwright.errors import RendezvousError

VARIABLE = "MESHWRIGHT_SSH"
"""The environment variable with another command than `ssh`, as a shell spells it."""

_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
_PASSED_ON = re.compile(
    r"(MESHWRIGHT|JAX|XLA|KERAS|NCCL)_\w+|PYTHONPATH|OMP_NUM_THREADS"
)
_KEPT = re.compile(
    r"MESHWRIGHT_(SSH|INTERFACE|SECRET_FILE|ORDERS|CHANNEL|FAULT)"
    r"|.*(KEY|TOKEN|SECRET|PASSWORD).*"
)
_HOST = re.compile(r"[A-Za-z0-9_][\w.@:%\[\]-]*")

_CAUSES = (
    (r"resolve hostname|Name or service not known", "Check the spelling of {host}."),
    (
        r"Permission denied|Host key verification failed|Too many authentication",
        "Make `ssh -o BatchMode=yes {host} true` work without questions: ssh-copy-id "
        "for the key, ssh-keyscan for the host's own.",
    ),
    (
        r"Connection refused|timed out|No route to host|unreachable|reset by peer",
        "Look whether {host} is up and runs an ssh server: `ssh {host} true`.",
    ),
    (
        r"No module named",
        "Install Meshwright on {host} into the Python that is used here: {python}.",
    ),
    (
        r"not found|No such file or directory|can't cd|cannot execute",
        "Let {host} have the same Python ({python}) and the same folder ({folder}), "
        "for example on a shared disk.",
    ),
)


class SshAgent:
    """An agent on another host, and the ssh that has started it.

    Arguments:
        host: As `ssh` knows it, `user@host` too.
        knows: What the agent has to know; it goes through the standard input.
        log: Takes what it writes to its standard error.
    """

    def __init__(
        self, host: str, knows: Mapping[str, Any], log: Callable[[str], None]
    ) -> None:
        self.host = host
        self._log = log
        self._errors: deque[str] = deque(maxlen=20)
        try:
            self._process = subprocess.Popen(
                ssh_command(host, os.environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is the launcher's
            )
        except OSError as error:
            raise RendezvousError(
                f"ssh cannot be started: {error.strerror} ({error.filename}).",
                "Agents on other hosts are started through ssh.",
                f"Install an ssh client, or set {VARIABLE} to what takes its place.",
            ) from error
        self._threads = [
            threading.Thread(target=read, daemon=True)
            for read in (self._read_errors, self._read_answer)
        ]
        self._answer: dict[str, Any] = {}
        for thread in self._threads:
            thread.start()
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended already, and `check` says why
            self._process.stdin.write(f"{json.dumps(knows)}\n".encode())
            self._process.stdin.flush()

    def check(self) -> None:
        """Raises an error with the cause if there is no agent any more."""
        status = self._process.poll()
        if status is None:
            return
        for thread in self._threads:
            thread.join(1)
        if "error" in self._answer:
            raise RendezvousError(*self._answer["error"])
        raise explain_end(self.host, status, [*self._errors])

    def close(self, seconds: float) -> None:
        """Waits for the end of the agent, and no longer than that."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        deadline = time.monotonic() + 1
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for line in stream:
                words = line.decode(errors="replace").rstrip()
                self._errors.append(words)
                self._log(f"{self.host}: {words}")

    def _read_answer(self) -> None:
        """An agent that cannot join says why, as JSON."""
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                with suppress(ValueError):
                    answer = json.loads(line)
                    if isinstance(answer, dict):
                        self._answer = answer


def ssh_command(host: str, environment: Mapping[str, str]) -> list[str]:
    """The command that starts an agent on a host, in the folder that this is.

    Variables that concern a run go along, unless they look like secrets.
    """
    passed_on = sorted(
        f"{name}={value}"
        for name, value in environment.items()
        if _PASSED_ON.fullmatch(name) and not _KEPT.fullmatch(name)
    )
    python = [sys.executable, "-P", "-m", "meshwright.launch.agent"]
    remote = " && ".join(
        (
            shlex.join(["cd", os.getcwd()]),
            f"exec {shlex.join(['env', *passed_on, *python])}",
        )
    )
    ssh = shlex.split(environment.get(VARIABLE) or "ssh")
    return [*ssh, *_OPTIONS, "--", host, remote]


def check_hosts(hosts: Sequence[str]) -> None:
    """Raises an error if a name is none that ssh could take, or stands twice."""
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise RendezvousError(
                f"--hosts received {','.join(hosts)!r}, with {host!r} in it.",
                "It takes names of hosts with commas between them, as ssh knows them.",
                "Write, for example, --hosts a,b or --hosts user@a,user@b.",
            )
        if hosts.count(host) > 1:
            raise RendezvousError(
                f"--hosts received {','.join(hosts)!r}, with {host!r} twice.",
                "Each host is named once.",
                "Use --processes N for several processes on each host.",
            )


def explain_end(host: str, status: int, errors: Sequence[str]) -> RendezvousError:
    """Why there is no agent on a host, from what ssh said last.

    >>> print(explain_end("b", 255, ["ssh: connect to host b: Connection refused"]))
    No agent could be started on b: ssh: connect to host b: Connection refused (status
    255).
    Agents are started through ssh, without a password or a question.
    Look whether b is up and runs an ssh server: `ssh b true`.
    """
    words = " / ".join(line for line in errors if line)[-400:] or "it said nothing"
    change = "Try `ssh -o BatchMode=yes {host} {python} -m meshwright.launch.agent`."
    for pattern, advice in _CAUSES:
        if re.search(pattern, words):
            change = advice
            break
    return RendezvousError(
        f"No agent could be started on {host}: {words} (status {status}).",
        "Agents are started through ssh, without a password or a question.",
        change.format(host=host, python=sys.executable, folder=os.getcwd()),
    )
