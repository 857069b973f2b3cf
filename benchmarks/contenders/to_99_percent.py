"""Contender: `examples/mnist_99.py`, from the start at every repetition."""

import sys

from contender import serve
from jobs import ROOT, describe_data, find_mnist

sys.path.append(str(ROOT / "examples"))


def main() -> None:
    """Trains as the example does, and tests."""
    import jax
    import mnist_99

    is_small = "--small" in sys.argv
    run = mnist_99.Run(mnist_99.load(None if is_small else str(find_mnist())))

    def train() -> dict[str, float]:
        run.train()
        return {}

    serve(
        train,
        before=run.reset,
        after=lambda: {"test_accuracy": run.test()},
        device=jax.devices()[0].device_kind,
        data=describe_data(),
    )


if __name__ == "__main__":
    main()
