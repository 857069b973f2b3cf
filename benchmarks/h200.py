"""What is promised for one NVIDIA H200: `python benchmarks/h200.py`, 9 minutes.

Needs JAX with CUDA and Keras. Without names of suites all of them run, each with
results of its own. `--small` goes through the same on a CPU.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from harness import Bar, Comparison, Contender
from run import options_of, run_suite


def reference_job(precision: str, seconds: float, is_small: bool) -> Comparison:
    """5 epochs of 60,000 in batches of 256, each time from the start."""
    samples = "512" if is_small else "60000"
    job = ["--job", "cnn", "--samples", samples, "--epochs", "5", "--test"]
    job += ["--precision", precision]
    contenders = [
        Contender(name="floor", script="jax_floor.py", arguments=job),
        _fit("meshwright", "single", *job),
        _fit("stock", "stock", *job),
    ]
    bars = [
        Bar(ours="meshwright", seconds=seconds),
        Bar(ours="meshwright", test_accuracy=0.99),
        Bar(ours="meshwright", theirs="floor", speedup=0.95),
    ]
    name = f"reference job, 5 epochs, {precision}"
    return Comparison(name=name, contenders=contenders, bars=bars)


def tiny_network(is_small: bool) -> Comparison:
    """784-32-10 in batches of 32, five epochs."""
    job = ["--job", "mlp", "--samples", "3200" if is_small else "60000"]
    job += ["--epochs", "5"]
    contenders = [
        Contender(name="floor", script="jax_floor.py", arguments=job),
        _fit("meshwright", "single", *job),
        _fit("stock", "stock", *job),
    ]
    bars = [
        Bar(ours="meshwright", theirs="stock", speedup=30.0),
        Bar(ours="meshwright", theirs="floor", speedup=0.95),
    ]
    return Comparison(name="tiny MLP", contenders=contenders, bars=bars)


def to_99_percent(is_small: bool) -> Comparison:
    """Any batch and schedule: the settings of the example."""
    arguments = ["--small"] if is_small else []
    run = Contender(
        name="examples/mnist_99.py", script="to_99_percent.py", arguments=arguments
    )
    bars = [
        Bar(ours=run.name, seconds=0.5),
        Bar(ours=run.name, test_accuracy=0.99),
    ]
    return Comparison(name="MNIST to 99 %", contenders=[run], bars=bars)


def starts(is_small: bool) -> Comparison:
    """From the start of a script to the end of its first training step."""
    job = ["--job", "mlp" if is_small else "cnn"]
    kinds = {
        "meshwright, second start": ["meshwright-step", *job],
        "stock, second start": ["stock-step", *job],
        "import jax": ["import-jax"],
        "import jax and keras": ["import-keras"],
        "import jax, one operation": ["jax-operation"],
    }
    contenders = [
        Contender(name=name, script="fresh_start.py", arguments=arguments)
        for name, arguments in kinds.items()
    ]
    name = "start to first step of the reference job; compile: what the first took more"
    bars = [Bar(ours="meshwright, second start", seconds=3.0)]
    return Comparison(name=name, contenders=contenders, bars=bars)


def _fit(name: str, strategy: str, *arguments: str) -> Contender:
    more = ["--strategy", strategy, *arguments]
    return Contender(name=name, script="keras_fit.py", arguments=more)


SUITES: dict[str, Callable[[bool], Comparison]] = {
    "h200-bfloat16": partial(reference_job, "bfloat16", 0.62),
    "h200-float32": partial(reference_job, "float32", 0.9),
    "h200-mlp": tiny_network,
    "h200-99": to_99_percent,
    "h200-start": starts,
}


def main() -> None:
    """Runs the suites that were named, or all."""
    parser = options_of(__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(SUITES))
    parser.add_argument("--small", action="store_true", help="on a CPU, no files")
    options: Any = parser.parse_args()
    if options.small:
        os.environ["JAX_PLATFORMS"] = "cpu"
        options.short = True
    for name in options.suites or SUITES:
        command = f"python benchmarks/h200.py {name} --repeats {options.repeats}"
        run_suite(name, [SUITES[name](options.small)], options, command)


if __name__ == "__main__":
    main()
