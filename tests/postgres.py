"""A PostgreSQL server of the tests' own, on loopback."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshwright.launch.guarding import Guard
from meshwright.launch.loopback import free_port

import pytest

_USER = "tests"


class Server:
    """A server in a folder, as a user that is not root."""

    def __init__(self, folder: Path, binaries: Path, user: str | None) -> None:
        self._folder = folder
        self._binaries = binaries
        self._user = user
        self._port = free_port("127.0.0.1")
        self._process: subprocess.Popen[bytes] | None = None
        self._guard = Guard()  # it does not outlive tests that are killed
        self._run(
            "initdb", "-D", str(folder / "data"), "-U", _USER, "-N", "-A", "trust"
        )
        self.url = f"postgresql://{_USER}@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        self._process = subprocess.Popen(
            [
                *(self._binaries / "postgres", "-D", self._folder / "data"),
                *("-p", str(self._port), "-k", self._folder, "-F"),
                *("-h", "127.0.0.1"),
            ],
            user=self._user,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self._folder,
            start_new_session=True,
        )
        self._guard.watch(self._process.pid)
        deadline = time.monotonic() + 60
        while not self._answers():
            assert time.monotonic() < deadline, "the server did not start"
            assert self._process.poll() is None, "the server ended"
            time.sleep(0.05)

    def stop(self) -> None:
        """Stops it; clients lose their connections."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        self._process.wait(timeout=60)
        self._guard.forget(self._process.pid)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.stop()
        self._guard.close()

    def _answers(self) -> bool:
        import psycopg

        with suppress(psycopg.OperationalError):
            psycopg.connect(self.url).close()
            return True
        return False

    def _run(self, name: str, *arguments: str) -> None:
        done = subprocess.run(
            [self._binaries / name, *arguments],
            user=self._user,
            cwd=self._folder,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            pytest.skip(f"{name} failed: {done.stderr.strip().splitlines()[-1]}")


@contextmanager
def postgres_server() -> Iterator[Server]:
    """A server that runs; skips the test with a reason where there can be none."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    binaries = _find_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed: no initdb and postgres")
    user = _find_user()
    folder = Path(tempfile.mkdtemp(prefix="meshwright-postgres-"))
    try:
        if user is not None:
            shutil.chown(folder, user)
        server = Server(folder, binaries, user)
        try:
            server.start()
            yield server
        finally:
            server.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _find_binaries() -> Path | None:
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if found := shutil.which("initdb"):
        places.append(Path(found).parent)
    for place in places:
        if (place / "initdb").exists() and (place / "postgres").exists():
            return place
    return None


def _find_user() -> str | None:
    """The user that it runs as, if this is root, as which it refuses to run."""
    if os.getuid() != 0:
        return None
    import pwd

    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    pytest.skip("PostgreSQL does not run as root, and there is no other user")
