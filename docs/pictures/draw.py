"""Draws the pictures of the pages: `python docs/pictures/draw.py` writes them anew.

A device is a box. Its weights are four squares in cool colours, the batch four squares
in warm ones; a grey square is a part that it does not have. Timetables of pipelines
are the schedules that run. Pictures have a white ground, so that they can be read on
light and on dark pages.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from meshwright.parallel.schedules import make_schedule

WEIGHTS = ("#2563eb", "#0891b2", "#7c3aed", "#db2777")
BATCH = ("#f59e0b", "#65a30d", "#dc2626", "#0d9488")
NONE = "#e5e7eb"
BLUE, YELLOW = "#bfdbfe", "#fde68a"
INK = "#1f2937"
ALL = range(4)

Parts = Sequence[str]


def text(
    x: float, y: float, words: str, size: int = 11, anchor: str = "start", bold: int = 0
) -> Parts:
    weight = "600" if bold else "normal"
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" '
        f'fill="{INK}" font-weight="{weight}">{words}</text>',
    )


def middle(x: float, y: float, words: str, size: int = 11, bold: int = 0) -> Parts:
    return text(x, y, words, size, "middle", bold)


def rect(
    x: float, y: float, width: float, height: float, fill: str, radius: int = 3
) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
        f'rx="{radius}" fill="{fill}"/>'
    )


def arrow(x1: float, y1: float, x2: float, y2: float, both: bool = False) -> Parts:
    start = ' marker-start="url(#a)"' if both else ""
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{INK}" '
        f'stroke-width="1.4"{start} marker-end="url(#a)"/>',
    )


def squares(x: float, y: float, colours: Sequence[str], has: Sequence[int]) -> Parts:
    return [
        rect(x + 19 * i, y, 16, 16, colours[i] if i in has else NONE)
        for i in range(len(colours))
    ]


def box(x: float, y: float, width: float, height: float, name: str) -> Parts:
    frame = rect(x, y, width, height, "#f9fafb", 8).replace("/>", ' stroke="#9ca3af"/>')
    return (frame, *middle(x + width / 2, y + 18, name, 12, bold=1))


def device(
    x: float,
    y: float,
    name: str,
    weights: Sequence[int],
    batch: Sequence[int],
    note: str = "",
    height: float = 118,
) -> Parts:
    """A device with what it has of the weights and of the batch."""
    parts = [*box(x, y, 150, height, name)]
    for row, (word, colours, has) in enumerate(
        [("weights", WEIGHTS, weights), ("batch", BATCH, batch)]
    ):
        parts += text(x + 10, y + 42 + 28 * row, word)
        parts += squares(x + 66, y + 30 + 28 * row, colours, has)
    return [*parts, *middle(x + 75, y + 100, note, 10)] if note else parts


def picture(height: int, title: str, caption: str, *parts: Parts) -> str:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 {height}" '
        'width="700" font-family="system-ui, sans-serif" role="img">',
        f"  <title>{title}</title>",
        '  <defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto-start-reverse">'
        f'<path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>',
        f'  <rect width="700" height="{height}" rx="8" fill="#ffffff"/>',
    ]
    drawn = [
        *text(20, 24, title, 14, bold=1),
        *text(20, height - 14, caption, 12),
        *(line for part in parts for line in part),
    ]
    return "\n".join([*lines, *(f"  {line}" for line in drawn), "</svg>\n"])


def four(make: Callable[[int], Parts], travels: str) -> Sequence[Parts]:
    """Four devices in a row, and what travels between all of them."""
    line = (*arrow(60, 190, 640, 190, both=True), *middle(350, 184, travels))
    return [*(make(i) for i in ALL), line]


def single() -> str:
    return picture(
        235,
        "Single: one device does everything",
        "Nothing travels.",
        device(275, 50, "device 0", ALL, ALL),
    )


def mirrored() -> str:
    return picture(
        235,
        "Mirrored: all weights on every device, a part of the batch each",
        "Gradients are added once a step (all-reduce); every device makes the same "
        "update.",
        *four(
            lambda i: device(20 + 168 * i, 50, f"device {i}", ALL, [i], "gradients"),
            "all-reduce of gradients",
        ),
    )


def fsdp() -> str:
    return picture(
        235,
        "FSDP: a part of every weight and slot, a part of the batch each",
        "Weights are gathered before use (all-gather); gradients are added and kept in "
        "parts (reduce-scatter).",
        *four(
            lambda i: device(
                20 + 168 * i, 50, f"device {i}", [i], [i], "gathers the rest for use"
            ),
            "all-gather of weights, reduce-scatter of gradients",
        ),
    )


def tensor() -> str:
    return picture(
        235,
        "TensorParallel: a part of every large weight, all samples everywhere",
        "Activations are added or exchanged between layers, in every layer pair, "
        "forward and backward.",
        *four(
            lambda i: device(
                20 + 168 * i, 50, f"device {i}", [i], ALL, "some of the features"
            ),
            "activations, in every pair of layers",
        ),
    )


def hybrid() -> str:
    parts: list[Parts] = []
    for number in range(8):
        replica, place = divmod(number, 4)
        x, y = 40 + 160 * place, 60 + 165 * replica
        has = [2 * replica + place // 2]
        parts.append(device(x, y, f"device {number}", [place], has, height=90))
        if place % 2 == 0:
            parts += [
                arrow(x + 152, y + 45, x + 158, y + 45, both=True),
                middle(x + 155, y - 10, f"fsdp {place // 2}"),
            ]
    return picture(
        365,
        "Hybrid(data=2, fsdp=2, tensor=2): eight devices, three axes",
        "tensor: neighbours, every layer. fsdp: weights before use. data: gradients "
        "once a step.",
        *parts,
        (*arrow(325, 166, 375, 166, both=True), *middle(350, 184, "fsdp")),
        (*arrow(110, 158, 110, 214, both=True), *middle(132, 190, "data")),
    )


def timetable(y: float, microbatches: int, kind: str) -> Parts:
    """The cells of a schedule of four stages, each with its microbatch."""
    schedule = make_schedule(kind, num_stages=4, num_microbatches=microbatches)
    width, left = 560 / schedule.num_ticks, 90
    parts = [
        rect(left + width * tick, y + 24 * stage, width - 3, 20, NONE)
        for stage in ALL
        for tick in range(schedule.num_ticks)
    ]
    for stage in ALL:
        parts += text(20, y + 24 * stage + 14, f"device {stage}")
    for action in schedule.actions:
        x, top = left + width * action.tick, y + 24 * action.stage
        is_forward = action.kind == "forward"
        letter, colour = ("F", BLUE) if is_forward else ("B", YELLOW)
        parts.append(rect(x, top, width - 3, 20, colour))
        parts += middle(x + width / 2 - 1, top + 14, f"{letter}{action.microbatch}", 10)
    return [*parts, *text(left, y + 112, _idle(schedule.bubble))]


def _idle(bubble: float) -> str:
    return (
        "time runs to the right; F forward, B backward, with the microbatch; grey: "
        f"idle, {100 * bubble:.0f} %"
    )


def stages(y: float, note: str) -> Sequence[Parts]:
    """Four devices, each with its layers, and what passes between them."""
    boxes = [device(20 + 168 * i, y, f"device {i}", [i], ALL, note) for i in ALL]
    arrows = [
        arrow(171 + 168 * i, y + 59, 187 + 168 * i, y + 59, both=True) for i in range(3)
    ]
    return [*boxes, *arrows]


def pipeline() -> str:
    return picture(
        345,
        "Pipeline(4, microbatches=4): some of the layers each, at the same time",
        "Activations travel to the next stage, their gradients back, once for every "
        "microbatch.",
        *stages(45, "in four microbatches"),
        timetable(190, 4, "1f1b"),
    )


def layerwise() -> str:
    return picture(
        345,
        "Layerwise(4): some of the layers each, one device after the other",
        "Activations travel to the next stage, their gradients back, once a step.",
        *stages(45, "while the others wait"),
        timetable(190, 1, "gpipe"),
    )


def central_storage() -> str:
    parts: list[Parts] = [
        box(210, 42, 280, 76, "CPU:0 keeps all variables"),
        text(225, 84, "weights"),
        squares(285, 72, WEIGHTS, ALL),
        text(225, 108, "optimizer"),
        squares(285, 96, WEIGHTS, ALL),
        text(376, 96, "updates"),
    ]
    for i in ALL:
        x = 20 + 168 * i
        parts += [
            device(x, 180, f"GPU:{i}", ALL, [i], "while a step runs"),
            arrow(250 + 60 * i, 119, x + 65, 178),
            arrow(x + 85, 178, 270 + 60 * i, 120),
        ]
    return picture(
        340,
        "CentralStorage: one device keeps and updates, all others compute",
        "Weights travel to every device before a step, gradients back after it.",
        *parts,
        text(560, 150, "weights, gradients"),
    )


def asynchronous() -> str:
    """Three workers, of which the last is slow; each update makes a new version."""
    durations, scale, left, end = (3.0, 3.4, 8.2), 42.0, 90.0, 13.5
    parts: list[Parts] = [text(20, 64, "server")]
    parts += [text(20, 114 + 44 * i, f"worker {i}") for i in range(3)]
    running = [(duration, i, 0.0, 0) for i, duration in enumerate(durations)]
    version = 0
    parts.append([rect(left, 50, scale * end, 20, NONE)])
    while running:
        time, worker, start, taken = min(running)
        running.remove(min(running))
        x, y = left + scale * start, 100 + 44 * worker
        width = scale * (min(time, end) - start) - 3
        parts.append([rect(x, y, width, 20, BLUE)])
        if time > end:
            parts.append(text(x + 8, y + 14, f"version {taken}"))
            continue
        stale = version - taken
        parts += [
            middle(x + width / 2, y + 14, f"version {taken}, stale by {stale}"),
            arrow(left + scale * time, y - 2, left + scale * time, 72),
        ]
        version += 1
        parts.append(text(left + scale * time + 3, 64, f"{version}"))
        running.append((time + durations[worker], worker, time, version))
    return picture(
        260,
        "AsyncServer: whoever is ready takes the newest weights",
        "An arrow is an update, which makes a new version. A slow worker holds up "
        "nobody; its gradients are stale.",
        *parts,
    )


def local_sgd() -> str:
    """Four workers that train four steps alone, and agree, twice."""
    parts: list[Parts] = []
    for i in ALL:
        y = 46 + 32 * i
        parts.append(text(20, y + 15, f"device {i}"))
        for at in range(8):
            x = 90 + 60 * at + 45 * (at // 4)
            parts += [
                [rect(x, y, 56, 22, BATCH[i])],
                (
                    f'<text x="{x + 28}" y="{y + 15}" font-size="11" '
                    f'text-anchor="middle" fill="#ffffff">step {at + 1}</text>',
                ),
            ]
    for at in range(2):
        x = 333 + 285 * at
        parts += [[rect(x, 42, 34, 126, "#2563eb")], middle(x + 17, 188, "agree")]
    return picture(
        235,
        "LocalSGD(4): every device trains a model of its own, and all agree now and "
        "then",
        "Weights travel in every fourth step: the average, or what an outer optimizer "
        "makes of it.",
        *parts,
    )


def by_hand() -> str:
    """Two towers on two devices, joined on the first."""
    layers = [
        (40, 60, "GPU:0", "left tower", BLUE),
        (40, 150, "GPU:1", "right tower", YELLOW),
        (300, 105, "GPU:0", "joined", BLUE),
        (500, 105, "GPU:0", "scores", BLUE),
    ]
    parts: list[Parts] = []
    for x, y, place, name, fill in layers:
        parts += [
            [rect(x, y, 130, 50, fill, 8)],
            middle(x + 65, y + 22, name, 12, bold=1),
            middle(x + 65, y + 40, f'mw.device("{place}")', 10),
        ]
    arrows = [(171, 85, 299, 120), (171, 175, 299, 140), (431, 130, 499, 130)]
    parts += [arrow(*ends, both=True) for ends in arrows]
    return picture(
        250,
        "By hand: layers live and compute where they were made",
        "Activations travel where an arrow leaves its device, gradients back. The "
        "towers compute at the same time.",
        *parts,
        middle(250, 182, "travels"),
    )


def planner() -> str:
    steps = [
        ("profile", "what a step does,", "from shapes"),
        ("cost", "seconds of kernels", "and collectives"),
        ("memory", "bytes by kind on", "the fullest device"),
        ("search", "every split,", "the fastest first"),
        ("argument", "the best, and why", "each other lost"),
    ]
    parts: list[Parts] = []
    for i, (name, *words) in enumerate(steps):
        x = 20 + 135 * i
        parts += [box(x, 50, 120, 80, name)]
        parts += [middle(x + 60, 94 + 16 * n, line) for n, line in enumerate(words)]
        if i:
            parts.append(arrow(x - 14, 90, x - 1, 90))
    return picture(
        180,
        "How the planner thinks",
        "Pure data in, data out: nothing is allocated or run, for devices that are "
        "here or not.",
        *parts,
    )


PICTURES = (
    *(single, mirrored, fsdp, tensor, hybrid, pipeline, layerwise),
    *(central_storage, asynchronous, local_sgd, by_hand, planner),
)


def main() -> None:
    for draw in PICTURES:
        Path(__file__).with_name(f"{draw.__name__}.svg").write_text(draw())


if __name__ == "__main__":
    main()
