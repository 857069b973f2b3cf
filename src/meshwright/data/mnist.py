"""A small real data set that ships with the package: 2,500 digits of MNIST."""

from importlib import resources
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Digits(NamedTuple):
    """Images as float32 in [0, 1] of shape (n, 28, 28, 1), and labels as int32."""

    x_train: NDArray[np.float32]
    y_train: NDArray[np.int32]
    x_test: NDArray[np.float32]
    y_test: NDArray[np.int32]


def load_digits() -> Digits:
    """The first 2,000 training and 500 test images of MNIST; nothing is downloaded.

    >>> digits = load_digits()
    >>> digits.x_train.shape, digits.y_test.shape
    ((2000, 28, 28, 1), (500,))
    """
    file = resources.files("meshwright.data") / "mnist_subset.npz"
    with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
        return Digits(
            x_train=_images(arrays["x_train"]),
            y_train=arrays["y_train"].astype(np.int32),
            x_test=_images(arrays["x_test"]),
            y_test=arrays["y_test"].astype(np.int32),
        )


def _images(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    return (pixels[..., None] / np.float32(255)).astype(np.float32)
