"""What there is to see of a training at a moment, in words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.devices.activity import Activity
from meshwright.devices.occupation import Sample
from meshwright.devices.sizes import format_bytes
from meshwright.train.timeline import Spent

_NAMES = {
    "devices": "devices",
    "input": "data",
    "host": "Python",
    "compile": "compiling",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Glance:
    """One moment of a `fit`.

    >>> spent = Spent(steps=10, samples=320, devices=0.09, input=0.01)
    >>> now = Glance(epoch=1, epochs=5, step=10, steps=40, numbers={"loss": 0.25},
    ...              spent=spent, seconds_left=90.0)
    >>> print(now)
    epoch 1/5, step 10/40: loss 0.25 | 3,200 samples/s, 10.0 ms a step (devices 90 %, data 10 %) | 1:30 left
    """  # noqa: E501

    epoch: int
    """From 1."""
    epochs: int
    step: int
    """Of the epoch."""
    steps: int | None
    """None as long as nobody knows how many there are."""
    numbers: Mapping[str, float]
    """Loss and metrics."""
    spent: Spent
    """What the time since the last glance went into."""
    activities: Sequence[Activity] = ()
    sample: Sample | None = None
    """What each device did, once that was looked at."""
    goodput: float | None = None
    """The share of all time so far in which the devices took steps."""
    seconds_left: float | None = None
    is_end: bool = False
    """Whether it is the last one of its epoch."""

    def __str__(self) -> str:
        head = f"{self.place}: {self.results}"
        words = [head, self.pace, *map(describe, self.activities), self.rest]
        return " | ".join(word for word in words if word)

    @property
    def lines(self) -> list[str]:
        """All that is known, where there is room for it."""
        lines = [self.place, *self.details, self.rest]
        return [line for line in lines if line]

    @property
    def details(self) -> list[str]:
        """How well and how fast it does, and what devices do."""
        sampled = [] if self.sample is None else describe_sample(self.sample)
        lines = [self.results, self.pace, *map(describe, self.activities), *sampled]
        return [line for line in lines if line]

    @property
    def place(self) -> str:
        """How far it is."""
        of = "" if self.steps is None else f"/{self.steps}"
        return f"epoch {self.epoch}/{self.epochs}, step {self.step}{of}"

    @property
    def results(self) -> str:
        """How well it does."""
        return ", ".join(f"{name} {v:.4g}" for name, v in self.numbers.items())

    @property
    def pace(self) -> str:
        """How fast it is, and where the time goes; empty if nothing was done."""
        rate, each = self.spent.samples_per_second, self.spent.step_seconds
        if rate is None or each is None:
            return ""
        return f"{rate:,.0f} samples/s, {_duration(each)} a step ({self.shares})"

    @property
    def shares(self) -> str:
        """Where the time goes."""
        found = {name: self.spent.share(part) for part, name in _NAMES.items()}
        if self.sample is not None:
            at_work = found.pop(_NAMES["devices"])
            found = self.sample.split(at_work, found[_NAMES["compile"]]) | found
        shown = {name: round(100 * share) for name, share in found.items()}
        return ", ".join(f"{name} {share} %" for name, share in shown.items() if share)

    @property
    def rest(self) -> str:
        """How much of the time was useful, and how long it will take, where known."""
        words = []
        if self.goodput is not None:
            words.append(f"goodput {_percent(self.goodput)}")
        is_over = self.is_end and self.epoch == self.epochs
        if self.seconds_left is not None and not is_over:
            words.append(f"{clock(self.seconds_left)} left")
        return ", ".join(words)


def describe(activity: Activity) -> str:
    """What a device does and holds.

    >>> describe(Activity(name="GPU:0", memory=3 * 2**30, limit=2**34, busy=0.5))
    'GPU:0 50 %, 3.0 GiB of 16.0 GiB'
    """
    busy = "" if activity.busy is None else f" {round(100 * activity.busy)} %"
    if activity.memory is None:
        return f"{activity.name}{busy}"
    limit = "" if activity.limit is None else f" of {format_bytes(activity.limit)}"
    return f"{activity.name}{busy}, {format_bytes(activity.memory)}{limit}"


MOST_DEVICES = 4
"""More of them are told of together."""
_IDLE, _MUCH_LESS, _MUCH = 0.5, 0.4, 0.4


def describe_sample(sample: Sample) -> list[str]:
    """What each device did, or between what and what if there are many.

    >>> from meshwright.devices.occupation import Occupation
    >>> each = Occupation(0.5, 0.2)
    >>> describe_sample(Sample(0.2, {"/device:GPU:0": each}))
    ['GPU:0: computing 50 %, communicating 20 %, idle 30 %']
    >>> describe_sample(Sample(0.2, {f"GPU:{i}": each for i in range(8)}))
    ['8 devices: computing 50 %, communicating 20 %, idle 30 %']
    """
    parts = ("computing", "communicating", "idle")
    if len(sample.devices) > MOST_DEVICES:
        groups = [list(sample.devices.values())]
        names = [f"{len(groups[0])} devices"]
    else:
        groups = [[each] for each in sample.devices.values()]
        names = [_short(name) for name in sample.devices]
    found = []
    for name, group in zip(names, groups, strict=True):
        shares = {
            part: _range([getattr(each, part) for each in group]) for part in parts
        }
        words = ", ".join(f"{part} {share}" for part, share in shares.items())
        found.append(f"{name}: {words}")
    return found


def complaints_of(sample: Sample) -> list[str]:
    """Devices that stand idle much more than others, or mostly exchange, in words.

    >>> from meshwright.devices.occupation import Occupation
    >>> complaints_of(Sample(0.2, {"GPU:0": Occupation(0.9, 0), "GPU:1": Occupation(0.1, 0)}))
    ['GPU:1 stood idle 90 % of the time, GPU:0 10 %']
    >>> complaints_of(Sample(0.2, {"GPU:0": Occupation(0.2, 0.7)}))
    ['the devices exchanged values, or waited for each other, 70 % of the time']
    """  # noqa: E501
    name, busiest = min(sample.devices.items(), key=lambda pair: pair[1].idle)
    idle = [
        f"{_short(other)} stood idle {_percent(each.idle)} of the time"
        for other, each in sample.devices.items()
        if each.idle > _IDLE and each.idle - busiest.idle > _MUCH_LESS
    ]
    if idle:
        return [f"{', '.join(idle)}, {_short(name)} {_percent(busiest.idle)}"]
    exchanged = [each.communicating for each in sample.devices.values()]
    share = sum(exchanged) / len(exchanged)
    what = "the devices exchanged values, or waited for each other,"
    return [f"{what} {_percent(share)} of the time"] if share > _MUCH else []


def _range(shares: Sequence[float]) -> str:
    low, high = (round(100 * share) for share in (min(shares), max(shares)))
    return f"{low} %" if low == high else f"{low}-{high} %"


def _percent(share: float) -> str:
    return f"{round(100 * share)} %"


def _short(device: str) -> str:
    return device.removeprefix("/device:")


def clock(seconds: float) -> str:
    """As on a clock.

    >>> clock(59.7), clock(3725)
    ('1:00', '1:02:05')
    """
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1000 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} us"
