"""Contender: ten Dense layers called one by one, stock or under a placement scope."""

import argparse
from contextlib import nullcontext
from typing import Any

from contender import serve

CALLS = 300


def main() -> None:
    """Calls the layers in turn, as notebooks do."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--placed", action="store_true")
    scope: Any = nullcontext()
    if parser.parse_args().placed:
        import meshwright as mw

        scope = mw.device("CPU:0")
    import keras
    import numpy as np

    x = np.ones((8, 16), "float32")
    with scope:
        layers = [keras.layers.Dense(16) for _ in range(10)]

    def repeat() -> dict[str, Any]:
        for _ in range(CALLS):
            h: Any = x
            for layer in layers:
                h = layer(h)
            h.block_until_ready()
        return {}

    serve(repeat, steps=CALLS * len(layers), device="cpu")


if __name__ == "__main__":
    main()
