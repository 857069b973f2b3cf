"""Several models side by side: what they answer together, and what is refused."""

import _thread
import subprocess
import sys
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.errors import (
    CheckpointError,
    DataError,
    EnsembleError,
    MeshwrightError,
    NumericError,
    UnknownDeviceError,
)
from meshwright.strategies import attach

import keras
import numpy as np
import pytest

L = keras.layers
X = np.random.default_rng(0).normal(size=(20, 8)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 20)


def classifier(seed: int, units: int = 4, outputs: int = 3) -> keras.Model:
    keras.utils.set_random_seed(seed)
    hidden = L.Dense(units, activation="relu")
    name = f"member_{seed}"
    layers = [keras.Input((8,)), hidden, L.Dense(outputs, "softmax")]
    model = keras.Sequential(layers, name=name)
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def says(*values: float, activation: str = "softmax") -> keras.Model:
    """A model that gives the same answer to everything."""
    start = keras.initializers.Constant(list(values))
    layer = L.Dense(
        len(values), activation, kernel_initializer="zeros", bias_initializer=start
    )
    return keras.Sequential([keras.Input((8,)), layer])


def refusal(error: type[MeshwrightError], *lines: str) -> Any:
    """Expects an error of these three lines."""

    class Expected:
        def __enter__(self) -> None:
            self._raises = pytest.raises(error)
            self._caught = self._raises.__enter__()

        def __exit__(self, *details: Any) -> bool:
            is_caught = bool(self._raises.__exit__(*details))
            assert str(self._caught.value).split("\n") == list(lines)
            return is_caught

    return Expected()


@pytest.fixture(scope="module")
def trained() -> tuple[mw.Ensemble, list[keras.Model]]:
    """An ensemble after two epochs, and the same models, trained one by one."""
    alone = [classifier(1), classifier(2, units=9)]
    for model in alone:
        np.random.seed(5)
        model.fit(X, Y, epochs=2, batch_size=8, verbose=0)
    ensemble = mw.Ensemble([classifier(1), classifier(2, units=9)])
    np.random.seed(5)
    ensemble.fit(X, Y, epochs=2, batch_size=8, verbose=0)
    return ensemble, alone


def same_weights(ours: keras.Model, theirs: keras.Model) -> None:
    for weight, reference in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(weight, reference, atol=1e-6)


def test_members_answer_as_they_would_alone_and_together_as_their_mean(
    trained: tuple[mw.Ensemble, list[keras.Model]],
) -> None:
    ensemble, alone = trained
    expected = [model.predict(X, verbose=0) for model in alone]
    together, answers = ensemble.predict(X, members=True)
    for answer, reference in zip(answers, expected, strict=True):
        np.testing.assert_allclose(answer, reference, atol=1e-6)
    np.testing.assert_allclose(together, np.mean(expected, axis=0), atol=1e-6)
    weighted = ensemble.predict(X, combine="weighted", weights=[3, 1])
    np.testing.assert_allclose(
        weighted, 0.75 * expected[0] + 0.25 * expected[1], atol=1e-6
    )
    assert weighted.dtype == np.float32
    raw = ensemble.predict(X, combine=None, batch_size=7)
    np.testing.assert_allclose(raw, expected, atol=1e-6)


def test_members_are_evaluated_as_they_would_be_alone(
    trained: tuple[mw.Ensemble, list[keras.Model]],
) -> None:
    ensemble, alone = trained
    for found, model in zip(ensemble.evaluate(X, Y), alone, strict=True):
        expected = model.evaluate(X, Y, verbose=0, return_dict=True)
        assert found == pytest.approx(expected, rel=1e-5)


def test_members_are_dealt_out_to_the_devices_and_live_there() -> None:
    ensemble = mw.Ensemble([classifier(n) for n in range(3)], ["CPU:2", "CPU:5"])
    names = tuple(f"/device:CPU:{n}" for n in (2, 5, 2))
    assert ensemble.devices == names
    assert len(ensemble) == 3
    assert repr(ensemble).startswith("Ensemble(member_0 on /device:CPU:2, ")
    ensemble.fit(X, Y, verbose=0)
    for member, name in zip(ensemble.members, names, strict=True):
        assert {d for row in mw.placement(member) for d in row.devices} == {name}


def test_a_member_that_was_put_on_a_device_by_hand_stays_there() -> None:
    with mw.device("CPU:6"):
        placed = classifier(1)
    alone = classifier(1)
    np.random.seed(1)
    alone.fit(X, Y, verbose=0)
    ensemble = mw.Ensemble([placed, classifier(2)])
    assert ensemble.devices == ("/device:CPU:6", "/device:CPU:1")
    np.random.seed(1)
    ensemble.fit(X, Y, verbose=0)
    same_weights(placed, alone)
    assert mw.placement(placed)[0].devices == ("/device:CPU:6",)
    with refusal(
        EnsembleError,
        "Ensemble received devices=['/device:CPU:0'] and member 0 ('member_1'), "
        "which was built on /device:CPU:6.",
        "What was made on a device by hand stays there.",
        "Name /device:CPU:6 as well, or build the member outside of mw.device.",
    ):
        mw.Ensemble([placed], ["CPU:0"])


def test_between_calls_members_are_models_like_any_other() -> None:
    member, reference = classifier(1), classifier(1)
    ensemble = mw.Ensemble([member, classifier(2)], ["CPU:3", "CPU:4"])
    for model in (member, reference):
        np.random.seed(1)
        if model is member:
            ensemble.fit(X, Y, verbose=0)
        else:
            model.fit(X, Y, verbose=0)
        model.fit(X, Y, verbose=0, shuffle=False)
        model.compile("sgd", "mse", metrics=["mse"])  # another program
    for model in (member, reference):
        target = np.ones((20, 3))
        if model is member:
            other = ensemble.members[1]
            other.compile("sgd", "mse", metrics=["mse"])
            ensemble.fit(X, target, verbose=0, shuffle=False)
        else:
            model.fit(X, target, verbose=0, shuffle=False)
    same_weights(member, reference)
    again = ensemble.predict(X, combine=None)[0]
    np.testing.assert_allclose(again, reference.predict(X, verbose=0), atol=1e-6)


def test_shuffles_are_those_of_a_fit_alone_also_if_batches_come_from_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = classifier(1)
    np.random.seed(3)
    alone.fit(X, Y, batch_size=4, epochs=2, verbose=0)
    after = np.random.random()
    monkeypatch.setattr(mw.Single, "resident", False)
    ensemble = mw.Ensemble([classifier(1), classifier(2), classifier(1)])
    np.random.seed(3)
    ensemble.fit(X, Y, batch_size=4, epochs=2, verbose=0)
    assert np.random.random() == after
    same_weights(ensemble.members[0], alone)
    same_weights(ensemble.members[2], alone)


class Halves(keras.utils.PyDataset):
    """Batches that differ with the number of the member."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._x = X * number

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        half = slice(10 * index, 10 * index + 10)
        return self._x[half], Y[half]


def test_every_member_may_have_data_and_callbacks_of_its_own() -> None:
    epochs: list[tuple[int, int]] = []

    def note(number: int) -> list[Any]:
        seen = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: epochs.append((number, epoch))
        )
        return [seen]

    alone = classifier(2)
    alone.fit(Halves(1), verbose=0, shuffle=False)
    ensemble = mw.Ensemble([classifier(1), classifier(2)])
    histories = ensemble.fit(Halves, callbacks=note, verbose=0, shuffle=False)
    same_weights(ensemble.members[1], alone)
    assert sorted(epochs) == [(0, 0), (1, 0)]
    assert [list(h.history) for h in histories] == [["accuracy", "loss"]] * 2
    assert [h.epoch for h in histories] == [[0], [0]]


def test_a_line_tells_of_every_epoch_of_a_member(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ensemble = mw.Ensemble([classifier(1)])
    ensemble.fit(X, Y, epochs=2)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("member 0 ('member_1'): epoch 1/2 - accuracy: 0.")
    assert second.startswith("member 0 ('member_1'): epoch 2/2 - accuracy: 0.")


def test_a_training_of_members_is_no_part_of_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def current_run() -> None:
        pytest.fail("members take part in a run")

    monkeypatch.setattr(attach, "current_run", current_run)
    mw.Ensemble([classifier(1)]).fit(X, Y, verbose=0)


def test_members_vote_for_classes_and_the_mean_decides_between_equals() -> None:
    x = np.zeros((2, 8))
    voters = [says(3, 2, 0), says(3, 2, 0), says(0, 9, 0)]
    majority = mw.Ensemble(voters).predict(x, combine="vote")
    assert majority.tolist() == [0, 0]
    tie = mw.Ensemble([says(1, 0, 0), says(0, 9, 0)]).predict(x, combine="vote")
    assert tie.tolist() == [1, 1]


def test_a_single_output_is_the_probability_of_class_1_in_a_vote() -> None:
    x = np.zeros((2, 8))
    voters = [says(2, activation="sigmoid") for _ in range(2)]
    ensemble = mw.Ensemble([*voters, says(-9, activation="sigmoid")])
    assert ensemble.predict(x, combine="vote").tolist() == [1, 1]
    linear = mw.Ensemble([says(2, activation="linear")])
    with refusal(
        EnsembleError,
        "predict(combine='vote') got numbers from 2 to 2 from member 0 "
        f"({linear.members[0].name!r}) on /device:CPU:0.",
        "Members vote for classes: their last dim has an entry for each, or a single "
        "one, which is the probability of class 1.",
        "Use combine='mean'.",
    ):
        linear.predict(x, combine="vote")


def test_answers_may_be_trees() -> None:
    def two_headed(bias: float) -> keras.Model:
        inputs = keras.Input((8,))
        outputs = {
            "kind": says(bias, 0.0)(inputs),
            "size": says(bias, activation="linear")(inputs),
        }
        return keras.Model(inputs, outputs)

    ensemble = mw.Ensemble([two_headed(1.0), two_headed(4.0)])
    answer = ensemble.predict(np.zeros((2, 8)))
    assert answer["size"].tolist() == [[2.5], [2.5]]
    assert answer["kind"].shape == (2, 2)


def test_nothing_but_models_with_weights_of_their_own_makes_an_ensemble() -> None:
    a, b = classifier(1), classifier(2)
    with refusal(
        EnsembleError,
        "Ensemble received [] (a list) as members.",
        "It takes a list of at least one Keras model.",
        "Write, for example, mw.Ensemble([make_model(seed) for seed in range(3)]).",
    ):
        mw.Ensemble([])
    with refusal(
        EnsembleError,
        "Ensemble received 'b' (a str) as member 1.",
        "Members are Keras models.",
        "Wrap layers in a model, for example keras.Sequential([...]).",
    ):
        mw.Ensemble([a, "b"])
    with refusal(
        EnsembleError,
        "Ensemble received the same model 'member_1' as members 0 and 2.",
        "Every member has weights of its own.",
        "Build the model again, or keras.models.clone_model(model) and compile it.",
    ):
        mw.Ensemble([a, b, a])
    sharing = keras.Sequential([keras.Input((8,)), *b.layers], name="sharing")
    with refusal(
        EnsembleError,
        "Ensemble received member 0 ('member_2') and member 1 ('sharing'), which "
        f"share {b.variables[0].path}.",
        "Every member has weights of its own, because all are trained at once.",
        "Build the layers of each member anew.",
    ):
        mw.Ensemble([b, sharing])
    adam, other = keras.optimizers.Adam(), classifier(2)
    for model in (a, other):
        model.compile(adam, "mse")
    with refusal(
        EnsembleError,
        "Ensemble received member 0 ('member_1') and member 1 ('member_2'), which were "
        "compiled with the same Adam.",
        "An optimizer remembers things of each weight, so it trains one model.",
        "Compile each member with an optimizer of its own.",
    ):
        mw.Ensemble([a, other])
    with refusal(
        EnsembleError,
        "Ensemble received member 0 ('unbuilt'), which is not built.",
        "Members have their weights before they are brought to their devices.",
        "Give it a keras.Input, or call its build(input_shape).",
    ):
        mw.Ensemble([keras.Sequential([L.Dense(3)], name="unbuilt")])


def test_members_that_do_not_fit_together_are_refused() -> None:
    with refusal(
        EnsembleError,
        "Ensemble received member 0 ('member_1') with outputs float32[None, 3] and "
        "member 1 ('member_2') with float32[None, 4].",
        "All members have the same outputs: they see the same samples, and their "
        "answers are combined.",
        "Change the outputs of one of them, or leave it out.",
    ):
        mw.Ensemble([classifier(1), classifier(2, outputs=4)])
    wide = keras.Sequential([keras.Input((9,)), L.Dense(3)], name="wide")
    with pytest.raises(EnsembleError, match=r"inputs float32\[None, 8\] and member 1"):
        mw.Ensemble([classifier(1), wide])


def test_members_that_do_not_say_what_comes_out_are_refused_when_it_is_known() -> None:
    class Subclassed(keras.Model):
        def __init__(self, units: int) -> None:
            super().__init__(name=f"gives_{units}")
            self.layer = L.Dense(units)

        def call(self, x: Any) -> Any:
            return self.layer(x)

    members = [Subclassed(2), Subclassed(3)]
    for member in members:
        member(X)
    ensemble = mw.Ensemble(members)
    first, second = ensemble.predict(X, combine=None)
    assert (first.shape, second.shape) == ((20, 2), (20, 3))
    with refusal(
        EnsembleError,
        "predict got answers of shape (20, 2) from member 0 ('gives_2') on "
        "/device:CPU:0 and (20, 3) from member 1 ('gives_3') on /device:CPU:1.",
        "Only answers of the same shape can be combined.",
        "Use combine=None for the answers of the members.",
    ):
        ensemble.predict(X)


def test_a_member_has_one_device_and_no_strategy() -> None:
    strategy = mw.Mirrored()
    with refusal(
        EnsembleError,
        "Ensemble received member 0 ('member_1'), which Mirrored(data=8) trains.",
        "An ensemble trains each member on one device.",
        "Make the member outside of the strategy's scope.",
    ):
        mw.Ensemble([mw.distribute(classifier(1), strategy)])
    with mw.device("CPU:1"):
        first = L.Dense(2)
    with mw.device("CPU:2"):
        split = keras.Sequential([keras.Input((8,)), first, L.Dense(3)], name="split")
    with refusal(
        EnsembleError,
        "Ensemble received member 0 ('split') with layers on /device:CPU:1, "
        "/device:CPU:2.",
        "A member works on one device.",
        "Build it in one mw.device(...) scope, or outside of any.",
    ):
        mw.Ensemble([split])


def test_devices_that_are_not_there_or_too_many_are_refused() -> None:
    with pytest.raises(UnknownDeviceError, match="/device:GPU:3 unknown device"):
        mw.Ensemble([classifier(1)], ["GPU:3"])
    with refusal(
        EnsembleError,
        "Ensemble received 2 devices for 1 members: /device:CPU:0, /device:CPU:1.",
        "A member works on one device, and each device that is named gets one.",
        "Name 1 devices at the most, or leave them out.",
    ):
        mw.Ensemble([classifier(1)], ["CPU:0", "CPU:1"])


def test_a_member_without_a_loss_can_only_predict() -> None:
    ensemble = mw.Ensemble([classifier(1), says(1, 2, 3)])
    name = ensemble.members[1].name
    for verb in ("fit", "evaluate"):
        with refusal(
            EnsembleError,
            f"{verb} found member 1 ({name!r}) not compiled.",
            "A member is trained and evaluated with a loss of its own.",
            "Call its compile(optimizer=..., loss=...).",
        ):
            getattr(ensemble, verb)(X, Y)
    assert ensemble.predict(X).shape == (20, 3)


def test_data_and_callbacks_that_members_cannot_share_are_refused() -> None:
    ensemble = mw.Ensemble([classifier(1)])
    with refusal(
        EnsembleError,
        "fit received x of type generator.",
        "Members go through their data at the same time, so each needs a source of "
        "its own unless it is arrays.",
        "Pass arrays, or a function: x=lambda number: make_dataset().",
    ):
        ensemble.fit((X, Y) for _ in range(2))
    with refusal(
        EnsembleError,
        "fit received a function as x, and y as well.",
        "What a function gives for a member has inputs and targets.",
        "Let it return batches of (x, y), and leave y out.",
    ):
        ensemble.fit(lambda number: X, Y)
    with refusal(
        EnsembleError,
        "fit received callbacks=[] (a list).",
        "A callback belongs to one training, so each member has its own.",
        "Pass a function: callbacks=lambda number: [MyCallback()].",
    ):
        ensemble.fit(X, Y, callbacks=[])  # type: ignore[arg-type]


def test_ways_to_combine_that_make_no_sense_are_refused() -> None:
    ensemble = mw.Ensemble([says(1, 2), says(3, 4)])
    with refusal(
        EnsembleError,
        "predict received combine='median'.",
        "It is one of 'mean', 'vote', 'weighted', or None.",
        "Use combine='mean', or None for the answers of the members.",
    ):
        ensemble.predict(X, combine="median")  # type: ignore[arg-type]
    with refusal(
        EnsembleError,
        "predict received weights=[1, 2] with combine='mean'.",
        "Only a weighted mean has weights.",
        "Use combine='weighted', or leave the weights out.",
    ):
        ensemble.predict(X, weights=[1, 2])
    unlike: list[Any] = [[1.0], None, "ab"]
    for wrong in unlike:
        with refusal(
            EnsembleError,
            f"predict received weights={wrong!r} for 2 members.",
            "A weighted mean has one number for each member.",
            "Pass 2 numbers, for example [1.0, 1.0].",
        ):
            ensemble.predict(X, combine="weighted", weights=wrong)
    useless: list[Any] = [[0, 0], [-1, 2], [np.nan, 1]]
    for wrong in useless:
        with refusal(
            EnsembleError,
            f"predict received weights={wrong!r}.",
            "Weights are finite, none is negative, and not all are zero.",
            "Use the share that each member shall have, for example its accuracy.",
        ):
            ensemble.predict(X, combine="weighted", weights=wrong)


def test_a_member_that_leads_to_nan_stops_and_is_named_and_the_others_go_on() -> None:
    def make(seed: int, rate: float) -> keras.Model:
        model = classifier(seed)
        model.compile(keras.optimizers.SGD(rate), "sparse_categorical_crossentropy")
        model.layers[-1].activation = keras.activations.linear
        return model

    alone, tame, wild = make(1, 0.01), make(1, 0.01), make(2, np.inf)
    alone.fit(X, Y, epochs=4, verbose=0, shuffle=False)
    ensemble = mw.Ensemble([tame, wild])
    with refusal(
        NumericError,
        "fit ended with loss nan in epoch 1 of member 1 ('member_2') on /device:CPU:1.",
        "A member whose loss is no finite number stops; the others are trained to "
        "their end (members [0]).",
        "Lower its learning rate or look at its data; make an ensemble of the others "
        "if they are enough.",
    ):
        ensemble.fit(X, Y, epochs=4, batch_size=10, verbose=0, shuffle=False)
    assert [len(h.epoch) for h in ensemble.histories] == [4, 1]


def test_an_answer_that_is_not_finite_is_not_averaged_away() -> None:
    ensemble = mw.Ensemble([says(1, 2, activation="linear"), says(np.nan, 1)])
    name = ensemble.members[1].name
    with refusal(
        NumericError,
        f"predict got [nan nan] from member 1 ({name!r}) on /device:CPU:1 for "
        "sample 0.",
        "One answer that is not finite spoils those of all members together.",
        "Use combine=None to look at the answers, or an ensemble without that member.",
    ):
        ensemble.predict(X)
    assert np.isnan(ensemble.predict(X, combine=None)[1]).all()


def test_an_error_in_one_member_is_named_and_the_others_are_trained() -> None:
    def fail(number: int) -> list[Any]:
        if number == 0:
            raise RuntimeError("no callbacks today")
        return []

    alone = classifier(2)
    alone.fit(X, Y, verbose=0, shuffle=False)
    ensemble = mw.Ensemble([classifier(1), classifier(2)])
    with pytest.raises(RuntimeError, match="no callbacks today") as caught:
        ensemble.fit(X, Y, verbose=0, shuffle=False, callbacks=fail)
    assert caught.value.__notes__ == [
        "This happened to member 0 ('member_1') on /device:CPU:0."
    ]
    same_weights(ensemble.members[1], alone)
    with pytest.raises(DataError):  # data is looked at as in every fit
        ensemble.fit(X[:, :5], Y, verbose=0)


def test_an_interrupted_training_ends_with_the_step_that_it_is_at() -> None:
    def interrupt(number: int) -> list[Any]:
        def end(epoch: int, logs: Any) -> None:
            if (number, epoch) == (1, 3):
                _thread.interrupt_main()

        return [keras.callbacks.LambdaCallback(on_epoch_end=end)]

    ensemble = mw.Ensemble([classifier(1), classifier(2)])
    with pytest.raises(KeyboardInterrupt):
        ensemble.fit(X, Y, epochs=10**6, verbose=0, callbacks=interrupt)
    assert ensemble.predict(X).shape == (20, 3)


def test_an_ensemble_is_saved_and_loaded_with_what_it_has_learnt(
    trained: tuple[mw.Ensemble, list[keras.Model]], tmp_path: Path
) -> None:
    ensemble, _ = trained
    ensemble.save(tmp_path / "deep" / "saved")
    found = mw.Ensemble.load(tmp_path / "deep" / "saved", ["CPU:7", "CPU:6"])
    assert found.devices == ("/device:CPU:7", "/device:CPU:6")
    np.testing.assert_array_equal(found.predict(X), ensemble.predict(X))
    for ours, theirs in zip(found.members, ensemble.members, strict=True):
        values = (ours.optimizer.variables, theirs.optimizer.variables)
        for one, other in zip(*values, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_saving_again_replaces_and_a_save_that_fails_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensemble = mw.Ensemble([says(1, 2), says(3, 4)])
    ensemble.save(tmp_path)
    before = files(tmp_path)
    assert len(before) == 3
    for member in ensemble.members:
        member.set_weights([weight * 2 for weight in member.get_weights()])

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(ensemble.members[1], "save", fail)
        with refusal(
            CheckpointError,
            f"Ensemble.save could not write {tmp_path}: No space left on device.",
            "An ensemble is saved whole or not at all.",
            "Make room or choose another folder; what was saved there before is "
            "unchanged.",
        ):
            ensemble.save(tmp_path)
    assert files(tmp_path) == before
    mw.Ensemble.load(tmp_path)
    ensemble.save(tmp_path)
    after = files(tmp_path)
    assert len(after) == 3
    assert after != before
    np.testing.assert_array_equal(
        mw.Ensemble.load(tmp_path).predict(X), ensemble.predict(X)
    )


RULE = (
    "An ensemble's folder has a manifest, ensemble.json, and the .keras files that it "
    "names, unchanged."
)
BRING_BACK = "Bring the file back from a copy, or save the ensemble again."


def test_a_folder_that_holds_no_whole_ensemble_is_refused(tmp_path: Path) -> None:
    manifest = tmp_path / "ensemble.json"
    with refusal(
        CheckpointError,
        f"Ensemble.load found no manifest at {manifest}: No such file or directory.",
        RULE,
        "Pass the folder that Ensemble.save was given.",
    ):
        mw.Ensemble.load(tmp_path)
    mw.Ensemble([says(1, 2), says(3, 4)]).save(tmp_path)
    (second,) = tmp_path.glob("member-1-*.keras")
    whole = second.read_bytes()
    flipped = bytearray(whole)
    flipped[len(flipped) // 2] ^= 1
    second.write_bytes(flipped)
    with pytest.raises(CheckpointError) as caught:
        mw.Ensemble.load(tmp_path)
    saved_as = second.stem.rpartition("-")[2]
    assert caught.value.received.endswith(f"and was saved as {saved_as}.")
    assert (caught.value.rule, caught.value.change) == (RULE, BRING_BACK)
    second.unlink()
    with refusal(
        CheckpointError,
        f"Ensemble.load found that {second} cannot be read (No such file or "
        "directory).",
        RULE,
        BRING_BACK,
    ):
        mw.Ensemble.load(tmp_path)
    manifest.write_text(manifest.read_text()[:30])
    with pytest.raises(CheckpointError, match="is no manifest"):
        mw.Ensemble.load(tmp_path)
    manifest.write_text('{"format": 2, "members": []}')
    with pytest.raises(CheckpointError, match="that this version cannot read"):
        mw.Ensemble.load(tmp_path)


def test_classes_that_are_not_known_are_asked_for(tmp_path: Path) -> None:
    class Twice(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return 2 * x

    member = keras.Sequential([keras.Input((8,)), Twice()])
    mw.Ensemble([member]).save(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        mw.Ensemble.load(tmp_path)
    assert caught.value.received.startswith("Ensemble.load could not make a model of ")
    assert caught.value.rule == (
        "The classes and functions of a member are known where it is loaded."
    )
    assert caught.value.change == (
        "Pass custom_objects={...}, or safe_mode=False for Lambda layers of files that "
        "you trust."
    )
    found = mw.Ensemble.load(tmp_path, custom_objects={"Twice": Twice})
    np.testing.assert_array_equal(found.predict(X), 2 * X)


@pytest.mark.soak
@pytest.mark.processes
def test_the_example_says_the_same_in_one_process_and_in_two(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples/ensemble.py"
    in_run = ["-Pm", "meshwright.cli.main", "train", "--processes", "2"]
    told = [
        subprocess.run(
            [sys.executable, *arguments, str(example)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
            check=True,
        ).stdout
        for arguments in ([], in_run)
    ]
    ends = [
        [line for line in text.splitlines() if line.startswith(("each ", "their "))]
        for text in told
    ]
    assert ends[0] == ends[1]
    assert len(ends[0]) == 3
