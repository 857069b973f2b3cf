"""Pieces of code, each in a process of its own that has imported the façade already.

Importing takes seconds, and many settings can be made only before JAX's runtime starts.
So one process imports, and forks for every piece.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright.devices import environment_to_inherit

from conftest import OF_TESTS

_FORKING = """
import contextlib, io, json, os, sys, tempfile, traceback, warnings
warnings.filterwarnings("ignore", message=".*os.fork.*")
from meshwright import tf
import keras, numpy as np
pieces = json.load(sys.stdin)
said = {}
for name, code in pieces.items():
    files = [tempfile.TemporaryFile("w+") for _ in range(2)]
    pid = os.fork()
    if pid == 0:
        for number, file in enumerate(files, 1):
            os.dup2(file.fileno(), number)
        status = 0
        try:
            exec(compile(code, name, "exec"), {"__name__": "__main__", "tf": tf})
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush(); sys.stderr.flush()
        os._exit(status)
    _, status = os.waitpid(pid, 0)
    texts = []
    for file in files:
        file.seek(0)
        texts.append(file.read())
    said[name] = [os.waitstatus_to_exitcode(status), *texts]
json.dump(said, open(sys.argv[1], "w"))
"""


@dataclass(frozen=True)
class Said:
    """What a piece of code did."""

    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def log(self) -> list[tuple[str, str]]:
        """The lines of the placement log: the operation, the device."""
        start, middle = "Executing op ", " in device /job:localhost/replica:0/task:0"
        parts = [
            line.removeprefix(start).partition(middle)
            for line in self.err.splitlines()
            if line.startswith(start)
        ]
        return [(op, device.removeprefix("/device:")) for op, _, device in parts]


def environment_of_scripts() -> dict[str, str]:
    """What scripts of their own inherit."""
    return {k: v for k, v in environment_to_inherit().items() if k not in OF_TESTS}


def run_pieces(
    pieces: Mapping[str, str], folder: Path, **environment: str
) -> dict[str, Said]:
    """Runs pieces of code; each begins as if it was the first after the import."""
    answer = folder / "said.json"
    done = subprocess.run(
        [sys.executable, "-c", _FORKING, str(answer)],
        input=json.dumps(dict(pieces)),
        capture_output=True,
        text=True,
        env={**environment_of_scripts(), **environment},
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = {
        name: Said(*parts) for name, parts in json.loads(answer.read_text()).items()
    }
    for name, one in said.items():
        assert one.status == 0, f"{name}:\n{one.out}\n{one.err}"
    return said
