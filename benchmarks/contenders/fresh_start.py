"""Contender: how long a fresh process takes, to an import or to a first step.

Every repetition starts a process. The compile cache is where the process finds it by
itself: in a folder that is empty at every repetition (`--cold`), or that the repetition
before has filled. The clock stops at the last line of the program: what a process does
when it ends (a GPU's takes 0.6 s) keeps nobody waiting for a step.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contender import serve

FIRST_STEP = """
import sys
{library}
from jobs import JOBS, keras_model, load
job = JOBS[{job!r}]
x, y = load(job)
{scope}
    model = keras_model(job)
model.fit(x[:job.batch_size], y[:job.batch_size], batch_size=job.batch_size, verbose=0)
"""
STOCK = {"library": "", "scope": "if True:"}
OURS = {"library": "import meshwright as mw", "scope": "with mw.Single().scope():"}


# The clock of `time.monotonic` is the same for all processes of a machine.
CLOCK = "\nimport time; print(time.monotonic())"


def run(program: str, cache: Path, *flags: str) -> tuple[float, str]:
    """Runs a program; returns seconds to its end, and what it wrote to stderr."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, *flags, "-c", program + CLOCK],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
    )
    if done.returncode:
        sys.exit(done.stderr)
    return float(done.stdout.split()[-1]) - began, done.stderr


def own_seconds(trace: str) -> float:
    """The sum of what modules of Meshwright's took by themselves."""
    rows = re.findall(r"^import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)$", trace, re.M)
    return sum(int(own) for own, module in rows if _is_ours(module)) / 1e6


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == "meshwright"


def repetition(what: str, job: str) -> Callable[[Path], dict[str, Any]]:
    """What one start is; the wall clock runs from the start of the process."""
    if what == "own-import":

        def own_import(cache: Path) -> dict[str, Any]:
            _, trace = run("import meshwright", cache, "-X", "importtime")
            return {"seconds": own_seconds(trace)}

        return own_import
    programs = {
        "nothing": "",
        "import-jax": "import jax",
        "import-keras": "import keras",
        "jax-operation": "import jax.numpy as jnp; (jnp.ones(3) + 1).tolist()",
        "import-meshwright": "import meshwright",
        "stock-step": FIRST_STEP.format(job=job, **STOCK),
        "meshwright-step": FIRST_STEP.format(job=job, **OURS),
    }

    def start(cache: Path) -> dict[str, Any]:
        seconds, _ = run(programs[what], cache)
        return {"seconds": seconds}

    return start


def main() -> None:
    """Serves one kind of start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what")
    parser.add_argument("--job", default="cnn")
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    start = repetition(options.what, options.job)
    kept = Path(tempfile.mkdtemp())

    def repeat() -> dict[str, Any]:
        return start(Path(tempfile.mkdtemp()) if options.cold else kept)

    serve(repeat)


if __name__ == "__main__":
    main()
