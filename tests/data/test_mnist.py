"""The digits that ship with the package."""

from meshwright.data.mnist import load_digits

import numpy as np


def test_the_digits_are_real_images_with_all_ten_labels() -> None:
    digits = load_digits()
    assert digits.x_train.shape == (2000, 28, 28, 1)
    assert digits.x_test.shape == (500, 28, 28, 1)
    assert digits.x_train.dtype == np.float32
    assert (digits.x_train.min(), digits.x_train.max()) == (0.0, 1.0)
    assert set(digits.y_train) == set(digits.y_test) == set(range(10))
    # The mean of all of MNIST is 0.1307.
    assert abs(digits.x_train.mean() - 0.1307) < 0.005
