"""The reference job next to TensorFlow and PyTorch: `make bench-peers`, 12 minutes.

Each peer gets an environment of its own beside ours, made once with `pip install`.
"""

import subprocess
import sys
from pathlib import Path

from run import options_of, run_suite
from suites import peers

ROOT = Path(__file__).parents[1]
PACKAGES = {
    ".venv-tf": ["tensorflow-cpu", "keras>=3.15.1"],
    ".venv-torch": ["torch==2.13.0", "numpy"],
}


def python_of(environment: str) -> str:
    """The interpreter of a peer's environment, which is made if it is not there."""
    folder = ROOT / environment
    python, stamp = folder / "bin" / "python", folder / ".installed"
    if not stamp.exists():
        print(f"{environment}: installing {', '.join(PACKAGES[environment])}")
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, *PACKAGES[environment]], check=True)
        stamp.touch()
    return str(python)


def main() -> None:
    """Runs all peers in turns with us."""
    options = options_of(__doc__).parse_args()
    tensorflow, torch = (python_of(name) for name in PACKAGES)
    command = f"python benchmarks/peers.py --repeats {options.repeats}"
    run_suite("peers", peers(options.short, tensorflow, torch), options, command)


if __name__ == "__main__":
    main()
