"""`meshwright.Ensemble`: several models, trained side by side, that answer together."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from meshwright.cluster.gloo import let_gloo_give_way
from meshwright.cluster.identity import process_count, process_index
from meshwright.cluster.randomness import share_random_state
from meshwright.data.sources import are_arrays
from meshwright.devices.apart import Chance
from meshwright.devices.device import Device
from meshwright.devices.keras_hooks import install_keras_hooks
from meshwright.devices.runtime import jax_devices
from meshwright.errors import CheckpointError, EnsembleError, NumericError
from meshwright.trials.ensemble_combining import (
    Combine,
    check_combine,
    combine_answers,
)
from meshwright.trials.ensemble_exchange import (
    agree_on_members,
    share_arrays,
    share_failures,
    share_words,
)
from meshwright.trials.ensemble_folder import load_members, save_members
from meshwright.trials.ensemble_members import (
    check_compiled,
    check_members,
    describe_member,
)
from meshwright.trials.ensemble_progress import make_progress
from meshwright.trials.ensemble_seat import Seat, run_side_by_side
from meshwright.trials.ensemble_seating import seat_members

import numpy as np

Data = Any
"""Arrays, or a function that takes the number of a member and returns its data."""


class FitOptions(TypedDict, total=False):
    """Further arguments of Keras' `fit`, which mean what they mean there."""

    batch_size: int | None
    validation_split: float
    shuffle: bool | str
    class_weight: Mapping[int, float] | None
    initial_epoch: int
    steps_per_epoch: int | None
    validation_steps: int | None
    validation_batch_size: int | None
    validation_freq: int | Sequence[int]


class Ensemble:
    """Several models on several devices, trained side by side, that answer together.

    Members may differ in everything but what goes in and comes out. Each is trained as
    if it were alone, to the weights that its own `fit` on one device leads to.

    In a run of several processes all of them make the same ensemble and call the same
    methods. Each has a part of the members; all get all results.

    Arguments:
        members: Built Keras models; compiled, to be trained and evaluated.
        devices: The devices that members are dealt out to, in their order; all of the
            best kind if left out. Members that were built on a device by hand
            (`mw.device`) stay there.

    Attributes:
        members: The models. Between calls they are Keras models like any other.
        devices: The names of their devices.
        histories: Those of the newest `fit`, also if it ended with an error.

    Raises:
        EnsembleError: The members cannot work together, or not on these devices.
        UnknownDeviceError: A device is not there.

    >>> import keras
    >>> import numpy as np
    >>> import meshwright as mw
    >>> def make_member(units):
    ...     hidden = keras.layers.Dense(units, activation="relu")
    ...     layers = [keras.Input((8,)), hidden, keras.layers.Dense(1)]
    ...     model = keras.Sequential(layers)
    ...     model.compile("adam", "mse")
    ...     return model
    >>> ensemble = mw.Ensemble([make_member(4), make_member(16)])
    >>> ensemble.devices
    ('/device:CPU:0', '/device:CPU:1')
    >>> x = np.ones((32, 8), "float32")
    >>> histories = ensemble.fit(x, x[:, :1], epochs=2, verbose=0)
    >>> ensemble.predict(x).shape
    (32, 1)
    """

    def __init__(
        self,
        members: Sequence[Any],
        devices: Sequence[str | Device] | None = None,
    ) -> None:
        install_keras_hooks()
        self.members = check_members(members)
        self._seats = seat_members(self.members, devices)
        self.histories: list[Any] = []
        is_on_cpu = next(iter(jax_devices().values())).platform == "cpu"
        if process_count() > 1:
            if is_on_cpu:
                let_gloo_give_way()
            agree_on_members(self.members)
            self._share_values()

    def __len__(self) -> int:
        return len(self.members)

    def __repr__(self) -> str:
        places = [f"{seat.model.name} on {seat.name}" for seat in self._seats]
        return f"Ensemble({', '.join(places)})"

    @property
    def devices(self) -> tuple[str, ...]:
        """The name of the device of each member."""
        return tuple(seat.name for seat in self._seats)

    def fit(
        self,
        x: Data,
        y: Any = None,
        *,
        epochs: int = 1,
        verbose: int | str = "auto",
        callbacks: Callable[[int], Sequence[Any]] | None = None,
        validation_data: Data = None,
        sample_weight: Any = None,
        **options: Unpack[FitOptions],
    ) -> list[Any]:
        """Trains all members side by side, each as if it were alone.

        All of them go through the data in the same order, which is that of a `fit` of
        one of them at this point of the script. A member whose loss is no number any
        more stops, the others go on.

        Arguments:
            x: Inputs, as arrays; or a function that takes the number of a member and
                returns what its `fit` shall have as `x`, of any kind that Keras takes.
            y: Targets; None if `x` gives them.
            epochs: How often to go through the data.
            verbose: 0 for silence, or else a line for every epoch of each member.
            callbacks: A function that takes the number of a member and returns the
                callbacks of its training.
            validation_data: As in Keras' `fit`, or a function as for `x`.
            sample_weight: As in Keras' `fit`.
            options: Further arguments of Keras' `fit`.

        Returns:
            Keras' `History` of each member.

        Raises:
            EnsembleError: A member is not compiled, or the data cannot be shared.
            NumericError: A member's loss became NaN or infinite; all members are
                trained, as far as they came.
        """
        check_compiled(self.members, "fit")
        _check_data("fit", "x", x, y)
        _check_data("fit", "validation_data", validation_data)
        _check_callbacks(callbacks)
        share_random_state()
        chances = [Chance(np.random.get_state()) for _ in self.members]

        def train(seat: Seat) -> list[Any]:
            number, title = seat.number, describe_member(seat.number, seat.model)
            own = list(callbacks(number)) if callbacks else []
            own.append(make_progress(title, epochs, verbose not in (0, "0")))
            with seat.taken(chances[number]) as model:
                history = model.fit(
                    _of_member(x, number),
                    y,
                    epochs=epochs,
                    verbose=0,
                    callbacks=own,
                    validation_data=_of_member(validation_data, number),
                    sample_weight=sample_weight,
                    **options,
                )
            return [history.epoch, history.history]

        told = share_words(self._side_by_side(train))
        self.histories = [
            _history(model, *told[number]) for number, model in enumerate(self.members)
        ]
        if process_count() > 1:
            self._share_values()
        np.random.set_state(chances[0].state)
        share_random_state()
        self._check_losses()
        return self.histories

    def predict(
        self,
        x: Data,
        *,
        combine: Combine | None = "mean",
        weights: Sequence[float] | None = None,
        batch_size: int | None = None,
        members: bool = False,
    ) -> Any:
        """Asks all members at the same time, and combines their answers.

        Arguments:
            x: Inputs, as for `fit`.
            combine: `'mean'`; `'weighted'`, a mean with weights; `'vote'`, the class
                that most members find most likely, and of several that with the
                highest mean; or None for the answers of the members.
            weights: One for each member, for `'weighted'`; only their ratios count.
            batch_size: Samples that each member takes at a time; 32 if left out.
            members: Whether the answers of the members are returned as well.

        Returns:
            The combined answer; a list of those of the members if `combine` is None;
            or both, as a pair, with `members=True`.

        Raises:
            EnsembleError: The answers cannot be combined in this way.
            NumericError: An answer that is to be combined is not finite.

        >>> import keras
        >>> import numpy as np
        >>> import meshwright as mw
        >>> def classifier(bias):
        ...     start = keras.initializers.Constant(bias)
        ...     layer = keras.layers.Dense(2, "softmax", bias_initializer=start)
        ...     return keras.Sequential([keras.Input((3,)), layer])
        >>> ensemble = mw.Ensemble([classifier([b, 0.0]) for b in (1.0, 2.0, -9.0)])
        >>> ensemble.predict(np.zeros((2, 3)), combine="vote")
        array([0, 0])
        >>> ensemble.predict(np.zeros((2, 3))).round(2)
        array([[0.54, 0.46],
               [0.54, 0.46]], dtype=float32)
        """
        shares = check_combine(combine, weights, len(self))
        _check_data("predict", "x", x)

        def ask(seat: Seat) -> Any:
            inputs = _of_member(x, seat.number)
            with seat.taken(Chance(np.random.get_state())) as model:
                return model.predict(inputs, batch_size=batch_size, verbose=0)

        answered = share_arrays(self._side_by_side(ask))
        answers = [answered[number] for number in range(len(self))]
        if combine is None:
            return answers
        combined = combine_answers(answers, combine, shares, self._names())
        return (combined, answers) if members else combined

    def evaluate(
        self,
        x: Data,
        y: Any = None,
        *,
        batch_size: int | None = None,
        sample_weight: Any = None,
    ) -> list[dict[str, float]]:
        """Evaluates all members at the same time.

        Arguments:
            x: Inputs, as for `fit`.
            y: Targets; None if `x` gives them.
            batch_size: Samples that each member takes at a time; 32 if left out.
            sample_weight: As in Keras' `evaluate`.

        Returns:
            The loss and the metrics of each member.

        Raises:
            EnsembleError: A member is not compiled, or the data cannot be shared.
        """
        check_compiled(self.members, "evaluate")
        _check_data("evaluate", "x", x, y)

        def judge(seat: Seat) -> dict[str, float]:
            inputs = _of_member(x, seat.number)
            with seat.taken(Chance(np.random.get_state())) as model:
                found: dict[str, float] = model.evaluate(
                    inputs,
                    y,
                    batch_size=batch_size,
                    sample_weight=sample_weight,
                    verbose=0,
                    return_dict=True,
                )
            return found

        told = share_words(self._side_by_side(judge))
        return [told[number] for number in range(len(self))]

    def save(self, folder: str | Path) -> None:
        """Writes all members into a folder, whole or not at all.

        There is a `.keras` file for each, with its optimizer, and a manifest. An
        ensemble that was saved there before is replaced.

        Arguments:
            folder: The folder; it is made if it is not there.

        Raises:
            CheckpointError: It cannot be written; what was there before still is.
        """
        failures: dict[int, Exception] = {}
        if process_index() == 0:
            try:
                save_members(Path(folder), self.members)
            except Exception as error:
                failures[0] = error
        share_failures(failures, {0: "process 0"})

    @classmethod
    def load(
        cls,
        folder: str | Path,
        devices: Sequence[str | Device] | None = None,
        *,
        custom_objects: Mapping[str, Any] | None = None,
        safe_mode: bool = True,
    ) -> "Ensemble":
        """An ensemble that was saved in a folder.

        Arguments:
            folder: The folder.
            devices: Those to work on now; they need not be those of before.
            custom_objects: Classes and functions of the members that are not Keras'.
            safe_mode: Whether code in the files is refused, as in Keras' `load_model`.

        Raises:
            CheckpointError: There is no ensemble, or it is damaged.
        """
        here, members = process_index(), []
        failures: dict[int, Exception] = {}
        try:
            members = load_members(Path(folder), custom_objects, safe_mode)
        except CheckpointError as error:
            failures[here] = error
        share_failures(failures, {p: f"process {p}" for p in range(process_count())})
        return cls(members, devices)

    def _side_by_side(self, work: Callable[[Seat], Any]) -> dict[int, Any]:
        """What came of the members of this process; raises if one failed anywhere."""
        done = run_side_by_side([seat for seat in self._seats if seat.is_here], work)
        failures = {n: found for n, found in done.items() if _has_failed(found)}
        share_failures(failures, dict(enumerate(self._names())))
        return done

    def _share_values(self) -> None:
        """Gives every process the values of all members; those of their own count."""
        own = {seat.number: seat.values() for seat in self._seats if seat.is_here}
        for number, values in share_arrays(own).items():
            if number not in own:
                self._seats[number].take_values(values)

    def _names(self) -> list[str]:
        return [
            f"{describe_member(seat.number, seat.model)} on {seat.name}"
            for seat in self._seats
        ]

    def _check_losses(self) -> None:
        lasts = [history.history.get("loss", [0.0])[-1] for history in self.histories]
        bad = [n for n, loss in enumerate(lasts) if not math.isfinite(loss)]
        if bad:
            first, names = bad[0], self._names()
            others = [n for n in range(len(self)) if n not in bad]
            raise NumericError(
                f"fit ended with loss {lasts[first]} in epoch "
                f"{self.histories[first].epoch[-1] + 1} of {names[first]}"
                + (f", and likewise with {len(bad) - 1} more" if bad[1:] else "")
                + ".",
                "A member whose loss is no finite number stops; the others are trained "
                f"to their end (members {others or 'none'}).",
                "Lower its learning rate or look at its data; make an ensemble of the "
                "others if they are enough.",
            )


def _has_failed(found: Any) -> bool:
    return isinstance(found, Exception)


def _of_member(data: Data, number: int) -> Any:
    return data(number) if _is_function(data) else data


def _is_function(data: Any) -> bool:
    return callable(data) and not hasattr(data, "__array__")


def _history(model: Any, epoch: list[int], logs: dict[str, list[float]]) -> Any:
    import keras

    history = keras.callbacks.History()
    history.set_model(model)
    history.epoch, history.history = epoch, logs
    return history


def _check_data(verb: str, name: str, data: Data, y: Any = None) -> None:
    if _is_function(data):
        if y is not None:
            raise EnsembleError(
                f"{verb} received a function as {name}, and y as well.",
                "What a function gives for a member has inputs and targets.",
                "Let it return batches of (x, y), and leave y out.",
            )
        return
    if not are_arrays(data):
        raise EnsembleError(
            f"{verb} received {name} of type {type(data).__name__}.",
            "Members go through their data at the same time, so each needs a source "
            "of its own unless it is arrays.",
            f"Pass arrays, or a function: {name}=lambda number: make_dataset().",
        )


def _check_callbacks(callbacks: Any) -> None:
    if callbacks is not None and not callable(callbacks):
        raise EnsembleError(
            f"fit received callbacks={callbacks!r} (a {type(callbacks).__name__}).",
            "A callback belongs to one training, so each member has its own.",
            "Pass a function: callbacks=lambda number: [MyCallback()].",
        )
