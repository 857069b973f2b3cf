"""Trains a model of keras.applications on one device and over meshes, in float64.

A script, started by `test_applications.py`, because float64 is chosen for a process. It
prints how far each strategy is from one device, as JSON.

Deep networks of random weights amplify rounding, in float32 up to the size of the
updates themselves. In float64 a difference is either tiny or an error.
"""

import json
import resource
import sys
from collections.abc import Callable
from typing import Any

import meshwright as mw

import keras
import numpy as np

CPUS = [f"CPU:{i}" for i in range(4)]
STRATEGIES: dict[str, Callable[[], Any]] = {
    "Mirrored": lambda: mw.Mirrored(CPUS[:3]),
    "FSDP": lambda: mw.FSDP(devices=CPUS),
    "TensorParallel": lambda: mw.TensorParallel(2, devices=CPUS),
}

BATCH, STEPS = 6, 2
"""One size, since each is compiled: it divides by 3 devices and leaves 4 uneven."""

MODELS: dict[str, dict[str, Any]] = {
    "MobileNet": {"alpha": 0.25},
    "MobileNetV2": {"alpha": 0.35},
    "MobileNetV3Small": {},
    "VGG16": {},
    "ResNet50": {},
    "ResNet50V2": {},
    "DenseNet121": {},
    "EfficientNetB0": {},
    "EfficientNetV2B0": {},
    "Xception": {"input_shape": (71, 71, 3)},
    "InceptionV3": {"input_shape": (75, 75, 3)},
    "NASNetMobile": {},
    "ConvNeXtTiny": {},
    "InceptionResNetV2": {"input_shape": (75, 75, 3)},
}


def use_float64() -> None:
    from keras.src.backend.common import dtypes

    keras.config.set_floatx("float64")
    # Keras computes in float32 on JAX wherever types meet, whatever floatx is.
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"


def build(name: str, last: str | None) -> keras.Model:
    keras.utils.set_random_seed(7)
    options: dict[str, Any] = {"input_shape": (32, 32, 3), **MODELS[name]}
    options |= {"weights": None, "classes": 4, "classifier_activation": None}
    model = getattr(keras.applications, name)(**options)
    if last is not None:
        features = keras.layers.GlobalAveragePooling2D()(model.get_layer(last).output)
        model = keras.Model(model.input, keras.layers.Dense(4)(features))
    model.compile(
        optimizer=keras.optimizers.SGD(0.01, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train(model: keras.Model) -> float:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(BATCH * STEPS, *model.input_shape[1:]))
    y = rng.integers(0, 4, BATCH * STEPS)
    keras.utils.set_random_seed(11)
    history = model.fit(x, y, batch_size=BATCH, verbose=0).history
    return float(history["loss"][0])


def values(model: keras.Model) -> list[Any]:
    return [np.asarray(variable.value) for variable in model.variables]


def difference(found: list[Any], wanted: list[Any], start: list[Any]) -> float:
    """The largest difference of a variable, relative to how far training moved it.

    One that hardly moves, such as a bias in front of BatchNorm, consists of rounding
    only, hence the floor. Seeds must be equal.
    """
    updates = [float(np.abs(w - s).max()) for w, s in zip(wanted, start, strict=True)]
    floats = [value.dtype.kind == "f" for value in wanted]
    floor = 1e-6 * max(
        u for u, is_float in zip(updates, floats, strict=True) if is_float
    )
    worst = 0.0
    for ours, theirs, update in zip(found, wanted, updates, strict=True):
        if theirs.dtype.kind != "f":
            np.testing.assert_array_equal(ours, theirs)
            continue
        assert theirs.dtype == np.float64
        worst = max(worst, float(np.abs(ours - theirs).max()) / max(update, floor))
    return worst


def compare(name: str, last: str | None = None) -> dict[str, Any]:
    """Compares all strategies on a model, or on the part that ends with a layer."""
    reference = build(name, last)
    start = values(reference)
    loss = train(reference)
    wanted = values(reference)
    found: dict[str, Any] = {"loss": loss}
    for strategy, make in STRATEGIES.items():
        model = mw.distribute(build(name, last), make())
        error = abs(train(model) - loss) / loss
        weights = difference(values(model), wanted, start)
        found[strategy] = {"weights": weights, "loss": error}
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {**found, "seconds": used.ru_utime + used.ru_stime}


if __name__ == "__main__":
    mw.configure(virtual=len(CPUS))
    use_float64()
    print(json.dumps(compare(*sys.argv[1:])))
