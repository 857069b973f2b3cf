"""Where the time of a training goes: arithmetic on when steps began and ended."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatch:
    """Steps that were dispatched together; moments are seconds of one clock."""

    steps: int
    samples: int
    entered: float
    """When their epoch was begun."""
    began: float
    """When their data was there, and they were given to the devices."""
    ended: float
    """When the devices were done."""
    waited: float
    """Seconds before they began in which the host waited for their data."""
    compiled: bool = False
    """Whether they had to be compiled first."""


PARTS = ("devices", "input", "host", "compile")
"""What the time of steps goes into."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """What the time of steps went into, in seconds."""

    steps: int = 0
    samples: int = 0
    devices: float = 0.0
    """The devices were at work, or exchanged what they have."""
    input: float = 0.0
    """They had nothing to do, because the next batch was not there."""
    host: float = 0.0
    """They had nothing to do, because Python did something else: callbacks, saves."""
    compile: float = 0.0
    """A program was compiled, and ran for the first time."""

    def __add__(self, other: "Spent") -> "Spent":
        """What both went into."""
        sums = {f: getattr(self, f) + getattr(other, f) for f in self.__slots__}
        return Spent(**sums)

    @property
    def seconds(self) -> float:
        """All together."""
        return self.devices + self.input + self.host + self.compile

    @property
    def samples_per_second(self) -> float | None:
        """None if no time was spent."""
        return self.samples / self.seconds if self.seconds > 0 else None

    @property
    def step_seconds(self) -> float | None:
        """Of an average step, with all that was waited for; None without steps."""
        return self.seconds / self.steps if self.steps else None

    def share(self, part: str) -> float:
        """How much of the time one of `PARTS` took, from 0 to 1."""
        taken: float = getattr(self, part)
        return taken / self.seconds if self.seconds > 0 else 0.0

    def to_json(self) -> dict[str, float | None]:
        """As in a line of metrics."""
        rate, each = self.samples_per_second, self.step_seconds
        shares = {f"{part}_share": round(self.share(part), 4) for part in PARTS}
        return {
            "samples_per_second": None if rate is None else round(rate, 3),
            "step_seconds": None if each is None else round(each, 7),
            "timed_seconds": round(self.seconds, 6),
            **shares,
        }


def spent_on(dispatches: Iterable[Dispatch], since: float) -> Spent:
    """Divides the time since a moment among what it went into.

    The devices take what they are given one after the other. What was given to them
    before they were done with what came before did not let them be idle. What lies
    between epochs (validation, callbacks) is left out.

    Arguments:
        dispatches: What they were given, in order.
        since: When they were done with what came before.

    >>> every = {"steps": 4, "samples": 128, "entered": 0.0}
    >>> first = Dispatch(**every, began=1.0, ended=3.0, waited=0.75)
    >>> second = Dispatch(**every, began=1.5, ended=5.0, waited=0.5)
    >>> found = spent_on([first, second], since=0.0)
    >>> found.devices, found.input, found.host, found.samples_per_second
    (4.0, 0.75, 0.25, 51.2)
    """
    sums = dict.fromkeys(PARTS, 0.0)
    steps = samples = 0
    for each in dispatches:
        since = max(since, each.entered)
        idle = max(each.began - since, 0.0)
        starved = min(idle, each.waited)
        busy = max(each.ended - max(each.began, since), 0.0)
        sums["input"] += starved
        sums["host"] += idle - starved
        sums["compile" if each.compiled else "devices"] += busy
        since = max(since, each.ended)
        steps += each.steps
        samples += each.samples
    return Spent(steps=steps, samples=samples, **sums)


class Ledger:
    """The steps that are done since somebody asked last; threads may write and ask."""

    def __init__(self) -> None:
        self._writing = threading.Lock()
        self._done: list[Dispatch] = []
        self._since = 0.0

    def add(self, dispatch: Dispatch) -> None:
        """Enters steps that are done."""
        with self._writing:
            self._done.append(dispatch)

    def take(self) -> Spent:
        """What the time since the last call went into."""
        with self._writing:
            done, self._done = self._done, []
        spent = spent_on(done, self._since)
        if done:
            self._since = max(self._since, done[-1].ended)
        return spent


ENOUGH_SECONDS = 5.0
"""Shorter whiles are no reason to complain."""
TOO_MUCH = 0.2
"""Nor are smaller shares of the time."""


def is_enough(spent: Spent) -> bool:
    """Whether a while was long enough to be judged."""
    return spent.seconds >= ENOUGH_SECONDS


def complaints(spent: Spent, is_first: bool) -> list[str]:
    """What slows a training down beside the devices, in words.

    It takes a while that `is_enough` to say so.

    Arguments:
        spent: What a while went into.
        is_first: Whether it was the first one, in which programs are compiled anyway.

    >>> slow = Spent(steps=10, samples=80, devices=4.0, input=4.0)
    >>> complaints(slow, is_first=False)
    ['the devices waited for data 50 % of the time']
    """
    words = {
        "input": "the devices waited for data {} % of the time",
        "host": "the devices waited for Python {} % of the time",
    }
    if not is_first:
        words["compile"] = "steps were compiled anew for {} % of the time"
    return [
        text.format(round(100 * spent.share(part)))
        for part, text in words.items()
        if spent.share(part) > TOO_MUCH
    ]
