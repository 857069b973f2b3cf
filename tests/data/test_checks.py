"""Bad data is refused with its index; what stock Keras takes is taken."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.errors import DataError

import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np
import pytest

L = keras.layers
CPUS = ["CPU:0", "CPU:1"]
X = np.random.default_rng(0).normal(size=(12, 8)).astype(np.float32)
LABELS = (np.arange(12) % 4).astype(np.int32)
SPARSE = keras.losses.SparseCategoricalCrossentropy


def classifier(loss: Any = None, **options: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((8,)), L.Dense(4)], name="net")
    model.compile(optimizer="sgd", loss=loss or SPARSE(from_logits=True), **options)
    return model


def distributed(model: keras.Model | None = None) -> keras.Model:
    return mw.distribute(model or classifier(), mw.Mirrored(CPUS))


def refusal(run: Callable[[], Any]) -> tuple[list[str], DataError]:
    with pytest.raises(DataError) as caught:
        run()
    return str(caught.value).split("\n"), caught.value


def with_entry(array: Any, index: Any, value: Any) -> Any:
    changed = array.copy()
    changed[index] = value
    return changed


def stream(*batches: Any) -> Iterator[Any]:
    yield from batches


def batches_with(bad: Any, number: int) -> list[Any]:
    good = (X[:4], LABELS[:4])
    return [bad if n == number else good for n in range(4)]


def test_a_data_error_is_a_value_error_with_exit_code_four() -> None:
    assert issubclass(DataError, ValueError)
    assert DataError.exit_code == 4


def test_lengths_that_differ_are_named() -> None:
    model = distributed()
    lines, error = refusal(
        lambda: model.fit(X, LABELS[:9], sample_weight=np.ones(11), verbose=0)
    )
    assert lines == [
        "fit received x of 12 samples, y of 9 samples and sample_weight of 11 samples.",
        "All of them have one entry per sample, so their lengths are equal.",
        "y is the shortest: complete it, or cut the others to 9.",
    ]
    assert error.index == 9
    lines, _ = refusal(lambda: model.evaluate(X[:3], LABELS, verbose=0))
    assert lines[0] == "evaluate received x of 3 samples and y of 12 samples."
    lines, _ = refusal(lambda: model.predict([X, X[:5]], verbose=0))
    assert lines[0] == "predict received x[0] of 12 samples and x[1] of 5 samples."


def test_validation_data_is_checked_before_training_starts() -> None:
    model = distributed()
    before = model.get_weights()
    bad = with_entry(LABELS, 7, 4)
    lines, error = refusal(
        lambda: model.fit(X, LABELS, validation_data=(X, bad), verbose=0)
    )
    assert lines[0] == "fit received validation_data with y[7] = 4."
    assert error.index == 7
    np.testing.assert_array_equal(model.get_weights()[0], before[0])


@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict"])
def test_an_empty_dataset_is_refused(verb: str) -> None:
    model = distributed()
    data = (X[:0],) if verb == "predict" else (X[:0], LABELS[:0])
    lines, _ = refusal(lambda: getattr(model, verb)(*data, verbose=0))
    assert lines == [
        f"{verb} received x of 0 samples.",
        "There is at least one sample to compute with.",
        "Look at where the data comes from; a filter may have removed all.",
    ]


def test_what_is_no_number_is_refused_with_its_place() -> None:
    model = distributed()
    mixed = with_entry(X.astype(object), (3, 2), "n/a")
    lines, error = refusal(lambda: model.predict(mixed, verbose=0))
    assert lines == [
        "predict received x[3, 2] = 'n/a' in an array of dtype object.",
        "Models compute with integers, floats and booleans.",
        "Turn x into numbers first, for example with np.asarray(..., "
        "dtype='float32') or by numbering the categories.",
    ]
    assert error.index == 3
    names = np.array(["cat", "dog"] * 6)
    lines, _ = refusal(lambda: model.fit(X, names, verbose=0))
    assert lines[0].startswith("fit received y[0] = np.str_('cat') in an array")
    lines, _ = refusal(lambda: model.predict(np.zeros((4, 8), "M8[s]"), verbose=0))
    assert "dtype datetime64[s]" in lines[0]


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: x.astype(np.float64),
        lambda x: x.astype(np.float16),
        lambda x: x.astype(ml_dtypes.bfloat16),
        lambda x: (10 * x).astype(np.int64),
        lambda x: x > 0,
        jnp.asarray,
    ],
)
def test_numbers_of_every_kind_are_taken(convert: Any) -> None:
    reference = classifier()
    expected = reference.predict(convert(X), verbose=0)
    found = distributed(reference).predict(convert(X), verbose=0)
    np.testing.assert_allclose(found, expected, atol=1e-5)


WANTED = [(), (1,), (3,), (3, 1), (None, 2)]
GIVEN = [(), (1,), (3,), (4,), (3, 1), (3, 2), (4, 2), (3, 2, 1), (2, 2, 3)]


@pytest.mark.parametrize("first", ["permissive", "strict"])
def test_shapes_are_refused_exactly_where_stock_keras_fails(first: str) -> None:
    def make(wanted: Any) -> keras.Model:
        inputs = keras.Input(wanted)
        is_strict = first == "strict" and wanted and wanted[-1] is not None
        layer = L.Dense(2) if is_strict else L.Rescaling(2.0)
        return keras.Model(inputs, layer(inputs))

    verdicts = set()
    for wanted in WANTED:
        model = make(wanted)
        weights = model.get_weights()
        mw.distribute(model, mw.Single())
        for given in GIVEN:
            data = np.ones((4, *given), np.float32)
            stock = make(wanted)
            try:
                stock.predict(data, verbose=0)
                is_taken = True
            except Exception:
                is_taken = False
            verdicts.add(is_taken)
            if is_taken:
                model.predict(data, verbose=0)
            else:
                lines, _ = refusal(lambda: model.predict(data, verbose=0))  # noqa: B023
                assert lines[0] == f"predict received x of shape {data.shape}."
            # A refusal leaves the weights alone; stock Keras loses them.
            for old, new in zip(weights, model.get_weights(), strict=True):
                np.testing.assert_array_equal(old, new)
    assert verdicts == {True, False}


def test_a_wrong_shape_names_the_input() -> None:
    image = keras.Input((6, 6, 3), name="image")
    model = keras.Model(image, L.Conv2D(2, 3)(image))
    distributed(model)
    lines, _ = refusal(lambda: model.predict(np.ones((5, 6, 6)), verbose=0))
    assert lines == [
        "predict received x of shape (5, 6, 6).",
        "The input 'image' of the model has the shape (None, 6, 6, 3); None is any "
        "size.",
        "Reshape the data, or build the model for its shape.",
    ]


def two_inputs() -> keras.Model:
    left, right = keras.Input((2,), name="left"), keras.Input((3,), name="right")
    joined = L.Concatenate()([L.Dense(2)(left), L.Dense(2)(right)])
    return keras.Model([left, right], joined)


def test_the_number_and_names_of_inputs_are_checked() -> None:
    model = distributed(two_inputs())
    left, right = np.ones((4, 2)), np.ones((4, 3))
    lines, _ = refusal(lambda: model.predict([left], verbose=0))
    assert lines == [
        "predict received 1 array as x.",
        "The model has 2 inputs: 'left', 'right'.",
        "Pass one array per input, as a list in this order or as a dict by name.",
    ]
    lines, _ = refusal(lambda: model.predict([left, right, right], verbose=0))
    assert lines[0] == "predict received 3 arrays as x."
    lines, _ = refusal(lambda: model.predict({"left": left, "wright": right}))
    assert lines == [
        "predict received x with the names 'left', 'wright'.",
        "The inputs of the model are 'left', 'right'.",
        "Add 'right', or rename the inputs.",
    ]
    lines, _ = refusal(lambda: model.predict([right, left], verbose=0))
    assert lines[0] == "predict received x[0] of shape (4, 3)."
    named = {"extra": right, "right": right, "left": left}
    assert model.predict(named, verbose=0).shape == (4, 4)
    assert model.predict((left, right), verbose=0).shape == (4, 4)


@pytest.mark.parametrize(
    "loss",
    [
        "sparse_categorical_crossentropy",
        keras.losses.sparse_categorical_crossentropy,
        SPARSE(from_logits=True),
    ],
)
@pytest.mark.parametrize("label", [4, -1])
def test_labels_out_of_range_are_refused(loss: Any, label: int) -> None:
    model = distributed(classifier(loss))
    bad = with_entry(with_entry(LABELS, 5, label), 9, 77)
    lines, error = refusal(lambda: model.fit(X, bad, verbose=0))
    assert lines == [
        f"fit received y[5] = {label}.",
        "Labels of a sparse categorical loss are 0 to 3: the output has 4 classes.",
        "Number the classes from 0, or give the model more of them; a label that "
        "shall not count is named by the loss: "
        "SparseCategoricalCrossentropy(ignore_class=...).",
    ]
    assert error.index == 5


def test_labels_that_do_not_count_may_be_anything() -> None:
    bad = with_entry(LABELS, 5, 255)
    distributed(classifier(SPARSE(ignore_class=255))).fit(X, bad, verbose=0)
    weights = with_entry(np.ones(12), 5, 0)
    distributed().fit(X, bad, sample_weight=weights, verbose=0)
    with pytest.raises(DataError, match=r"y\[6\] = -1"):
        distributed(classifier(SPARSE(ignore_class=255))).fit(
            X, with_entry(bad, 6, -1), verbose=0
        )


def test_labels_as_floats_and_columns_are_taken_as_keras_takes_them() -> None:
    model = distributed()
    model.fit(X, LABELS[:, None].astype(np.float32), verbose=0)
    bad = with_entry(LABELS[:, None].astype(np.float32), 2, np.nan)
    with pytest.raises(DataError, match=r"y\[2, 0\] = nan"):
        model.fit(X, bad, verbose=0)


def test_other_losses_take_any_target() -> None:
    y = np.full((12, 4), -3.0)
    distributed(classifier("mse")).fit(X, y, verbose=0)


def test_labels_of_several_outputs_are_found_by_place_and_name() -> None:
    inputs = keras.Input((8,))
    outputs = [L.Dense(4, name="kind")(inputs), L.Dense(2, name="side")(inputs)]
    side = LABELS % 2
    bad = with_entry(side, 4, 2)

    def make(loss: Any) -> keras.Model:
        model = keras.Model(inputs, outputs)
        model.compile(optimizer="sgd", loss=loss)
        return distributed(model)

    loss = SPARSE(from_logits=True)
    for losses in (loss, [loss, loss], {"kind": loss, "side": loss}):
        make(losses).fit(X, [LABELS, side], verbose=0)
        lines, _ = refusal(
            lambda: make(losses).fit(X, [LABELS, bad], verbose=0)  # noqa: B023
        )
        assert lines[0] == "fit received y[1][4] = 2."
        assert lines[1].endswith("are 0 to 1: the output 'side' has 2 classes.")
    lines, _ = refusal(lambda: make(loss).fit(X, {"kind": LABELS, "side": bad}))
    assert lines[0] == "fit received y['side'][4] = 2."
    make({"kind": loss, "side": "mse"}).fit(X, [LABELS, bad[:, None]], verbose=0)


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = L.Dense(4)

    def call(self, x: Any) -> Any:
        return self.dense(x)


def test_without_a_graph_only_negative_labels_are_known_to_be_wrong() -> None:
    model = Subclassed()
    model.compile(optimizer="sgd", loss=SPARSE(from_logits=True))
    distributed(model).fit(X, LABELS, verbose=0)
    lines, _ = refusal(lambda: model.fit(X, with_entry(LABELS, 3, -2), verbose=0))
    assert lines == [
        "fit received y[3] = -2.",
        "Labels of a sparse categorical loss count from 0.",
        "Number the classes from 0; a label that shall not count is named by the "
        "loss: SparseCategoricalCrossentropy(ignore_class=...).",
    ]


def test_a_model_that_fit_builds_has_its_labels_checked_too() -> None:
    model = keras.Sequential([L.Dense(4)])
    model.compile(optimizer="sgd", loss=SPARSE(from_logits=True))
    distributed(model)
    lines, _ = refusal(lambda: model.fit(X, with_entry(LABELS, 8, 4), verbose=0))
    assert lines[0] == "fit received y[8] = 4."
    model.fit(X, LABELS, verbose=0)


def test_a_model_with_a_step_of_its_own_may_do_what_it_likes() -> None:
    class Shifted(keras.Sequential):
        def train_step(self, state: Any, data: Any) -> Any:
            x, y = data
            return super().train_step(state, (x, y - 1))

    model = Shifted([keras.Input((8,)), L.Dense(4)])
    model.compile(optimizer="sgd", loss=SPARSE(from_logits=True))
    distributed(model).fit(X, LABELS + 1, verbose=0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_inputs_that_are_not_finite_are_refused(value: float, dtype: Any) -> None:
    bad = with_entry(with_entry(X, (7, 3), value), (9, 0), np.nan).astype(dtype)
    model = distributed()
    lines, error = refusal(lambda: model.fit(bad, LABELS, verbose=0))
    assert lines == [
        f"fit received x[7, 3] = {value}.",
        "Inputs are finite numbers: one that is not spoils every weight in one step.",
        "Remove or repair sample 7, or set strategy.check_nan = False if the model "
        "can deal with it.",
    ]
    assert error.index == 7


def test_a_sum_that_overflows_is_no_reason_to_refuse() -> None:
    large = np.full((12, 8), 3e38, np.float32)
    distributed().predict(large, verbose=0)


def test_a_bad_entry_is_found_in_a_large_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.data.checks.CHUNK", 16)
    lines, _ = refusal(
        lambda: distributed().predict(with_entry(X, (11, 1), np.nan), verbose=0)
    )
    assert lines[0] == "predict received x[11, 1] = nan."


def test_the_check_for_nan_can_be_switched_off() -> None:
    strategy = mw.Mirrored(CPUS)
    assert strategy.check_nan is True
    strategy.check_nan = False
    model = mw.distribute(classifier(), strategy)
    bad = with_entry(X, (7, 3), np.nan)
    found = model.predict(bad, verbose=0)
    assert np.isnan(found[7]).all()
    assert np.isfinite(np.delete(found, 7, axis=0)).all()
    model.predict(stream((bad,)), verbose=0, steps=1)


@pytest.mark.parametrize(
    ("bad", "line", "index"),
    [
        ((with_entry(X[:4], (2, 5), np.nan), LABELS[:4]), "x[2, 5] = nan", 2),
        ((X[:4], with_entry(LABELS[:4], 3, 9)), "y[3] = 9", 3),
        ((X[:4].astype("U4"), LABELS[:4]), "x[0, 0] = ", 0),
        ((X[:4, :7], LABELS[:4]), "x of shape (4, 7)", None),
        (([X[:4], X[:4]], LABELS[:4]), "2 arrays as x", None),
        ((X[:0], LABELS[:0]), "x of 0 samples", None),
        ((X[:4], LABELS[:3]), "x of 4 samples and y of 3 samples", 3),
        ((X[:4], LABELS[:4], np.ones(3)), "and sample_weight of 3 samples", 3),
    ],
)
@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_streams_are_checked_batch_by_batch(
    bad: Any, line: str, index: int | None, number: int, prefetch: int
) -> None:
    strategy = mw.Mirrored(CPUS)
    strategy.prefetch = prefetch
    model = mw.distribute(classifier(), strategy)
    steps: list[int] = []
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: steps.append(batch)
    )
    data = stream(*batches_with(bad, number))
    lines, error = refusal(
        lambda: model.fit(data, shuffle=False, callbacks=[callback], verbose=0)
    )
    assert lines[0].startswith(f"fit received batch {number} with ")
    assert line in lines[0]
    assert error.batch == number
    assert error.index == index
    assert steps == list(range(number))
    # The weights are those after the last good step.
    reference = classifier()
    reference.set_weights(model.get_weights())
    assert np.isfinite(reference.predict(X, verbose=0)).all()


def test_what_keras_broadcasts_in_a_batch_is_taken() -> None:
    model = distributed(classifier("mse"))
    targets = np.zeros((4, 4), np.float32)
    data = stream((X[:4], targets[:1], np.float32(0.5)), (X[:4], targets, np.ones(1)))
    model.fit(data, shuffle=False, steps_per_epoch=2, verbose=0)


def test_predict_looks_at_inputs_only() -> None:
    bad = np.full(4, -7)
    found = distributed().predict(stream((X[:4], bad)), steps=1, verbose=0)
    assert found.shape == (4, 4)


def test_arrays_on_disk_are_not_read_before_they_are_used(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", with_entry(X, (6, 1), np.nan))
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    model = distributed()
    lines, error = refusal(
        lambda: model.fit(x, LABELS, batch_size=4, shuffle=False, verbose=0)
    )
    assert lines[0] == "fit received batch 1 with x[2, 1] = nan."
    assert (error.batch, error.index) == (1, 2)


def test_a_stock_model_is_left_to_keras() -> None:
    distributed()  # Keras is extended from here on
    model = classifier()
    model.fit(X, with_entry(LABELS, 5, 4), verbose=0)
    with pytest.raises(ValueError, match="Data cardinality is ambiguous"):
        model.fit(X, LABELS[:9], verbose=0)
