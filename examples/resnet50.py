"""ResNet50, for the planner; a small one that trains.

    meshwright plan examples/resnet50.py:make_model --devices 8xH200 --batch 1024

plans for the large one. This script trains a few narrow blocks of the same kind over
four devices made of the CPU, in ten seconds on two cores.
"""

import meshwright as mw

import keras
import numpy as np
from keras import layers


def make_model() -> keras.Model:
    """ResNet50 for ImageNet, compiled."""
    return compiled(keras.applications.ResNet50(weights=None, name="resnet50"))


def make_small_model() -> keras.Model:
    """Two residual blocks for small pictures, compiled."""
    pictures = keras.Input((16, 16, 3))
    x = layers.Conv2D(8, 3, padding="same")(pictures)
    for width in (8, 16):
        short = layers.Conv2D(width, 1, strides=2)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.Conv2D(width, 3, strides=2, padding="same")(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
        x = short + layers.Conv2D(width, 3, padding="same")(x)
    x = layers.GlobalAveragePooling2D()(x)
    scores = layers.Dense(4, activation="softmax")(x)
    return compiled(keras.Model(pictures, scores, name="small"))


def compiled(model: keras.Model) -> keras.Model:
    """The model with its optimizer and loss."""
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def main() -> None:
    """Trains a small one to tell in which corner a picture is bright."""
    mw.configure(visible=[], virtual=4)
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    y = rng.integers(0, 4, 512)
    x = rng.normal(0, 0.3, (512, 16, 16, 3)).astype("float32")
    for picture, corner in zip(x, y, strict=True):
        down, right = divmod(int(corner), 2)
        picture[8 * down : 8 * down + 8, 8 * right : 8 * right + 8] += 1
    with mw.Mirrored().scope():
        model = make_small_model()
    history = model.fit(x, y, batch_size=64, epochs=4, verbose=0).history
    print("accuracy by epoch:", *(f"{value:.0%}" for value in history["accuracy"]))


if __name__ == "__main__":
    main()
