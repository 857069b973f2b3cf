"""Measures Meshwright on this machine's CPU: `make bench BENCH="fit mesh"`.

Without BENCH all suites run, three quarters of an hour. Results go to
`benchmarks/results/`.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from harness import (
    REPEATS,
    Comparison,
    hardware,
    run_comparison,
    table,
    write_results,
)
from suites import SUITES


def options_of(description: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument(
        "--short", action="store_true", help="tiny jobs, to see that all runs; no files"
    )
    return parser


def run_suite(
    name: str, comparisons: Sequence[Comparison], options: Any, command: str
) -> None:
    """Runs a suite, prints its tables, and writes its results."""
    settings = {
        "command": f"{command} {'--short' * options.short}".strip(),
        "repeats": options.repeats,
        "hardware": hardware(),
    }
    outcomes = []
    for comparison in comparisons:
        print(f"{name}: {comparison.name}", file=sys.stderr, flush=True)
        outcomes.append(run_comparison(comparison, options.repeats))
        print(table(outcomes[-1]) + "\n", flush=True)
    if not options.short:
        print(f"written to {write_results(name, outcomes, settings)}")


def main() -> None:
    """Runs the suites that were named, or all."""
    parser = options_of(__doc__)
    about = "; ".join(f"{name}: {make.__doc__}" for name, make in SUITES.items())
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=about)
    options = parser.parse_args()
    unknown = set(options.suites) - set(SUITES)
    if unknown:
        parser.error(f"no suite {sorted(unknown)}; there are {', '.join(SUITES)}")
    for name in options.suites or SUITES:
        command = f"python benchmarks/run.py {name} --repeats {options.repeats}"
        run_suite(name, SUITES[name](options.short), options, command)


if __name__ == "__main__":
    main()
