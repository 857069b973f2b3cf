"""What is compared with what. Every suite answers one question and takes minutes."""

from collections.abc import Callable, Sequence

from harness import Bar, Comparison, Contender

CPU = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
# Small enough to see in seconds that everything runs; no figures are taken from it.
SHORT = {"cnn": "512", "mlp": "3200", "matmul": "8192", "deep": "8192"}


def fit(name: str, strategy: str, *arguments: str) -> Contender:
    """Keras' `fit` under a strategy, on this machine's CPU."""
    return Contender(
        name=name,
        script="keras_fit.py",
        arguments=["--strategy", strategy, *arguments],
        environment=CPU,
    )


def floor(*arguments: str) -> Contender:
    """The hand-written loop, on this machine's CPU."""
    return Contender(
        name="floor", script="jax_floor.py", arguments=arguments, environment=CPU
    )


def start(name: str, *arguments: str) -> Contender:
    """A fresh process at every repetition."""
    return Contender(
        name=name, script="fresh_start.py", arguments=arguments, environment=CPU
    )


def sized(job: str, is_short: bool) -> list[str]:
    """The arguments that choose a job, and fewer samples of it if asked for."""
    return ["--job", job, *(["--samples", SHORT[job]] if is_short else [])]


def devices(is_short: bool) -> list[Comparison]:
    """What placement and memory limits cost: 3 minutes."""
    mlp = [*sized("mlp", is_short), "--silent"]
    fits = [
        fit("stock", "stock", *mlp),
        fit("placed", "placed", *mlp),
        fit("under a limit", "limited", *mlp),
    ]
    calls = [
        Contender(name="stock", script="eager_call.py", environment=CPU),
        Contender(
            name="placed",
            script="eager_call.py",
            arguments=["--placed"],
            environment=CPU,
        ),
    ]
    return [
        Comparison(name="fit of a tiny MLP", contenders=fits),
        Comparison(name="eager call of a Dense layer", contenders=calls),
    ]


def start_up(is_short: bool) -> list[Comparison]:
    """How fast a script starts: 4 minutes."""
    imports = [
        start("import jax", "import-jax"),
        start("nothing", "nothing"),
        start("import meshwright", "import-meshwright"),
        start("its own modules", "own-import"),
    ]
    job = ["--job", "mlp" if is_short else "cnn"]
    steps = [
        start("stock, first start", "stock-step", "--cold", *job),
        start("stock, second start", "stock-step", *job),
        start("meshwright, first start", "meshwright-step", "--cold", *job),
        start("meshwright, second start", "meshwright-step", *job),
    ]
    return [
        Comparison(
            name="import",
            contenders=imports,
            bars=[
                Bar(ours="import meshwright", seconds=1.5),
                Bar(ours="its own modules", seconds=0.1),
            ],
        ),
        Comparison(
            name="start of a script to the end of its first training step",
            contenders=steps,
        ),
    ]


def fits(is_short: bool) -> list[Comparison]:
    """`fit` with bar, CSVLogger and accuracy against stock and floor: 8 minutes."""
    cnn = sized("cnn", is_short)
    mlp = [*sized("mlp", is_short), "--epochs", "5"]
    streamed = fit("meshwright, generator", "single", *cnn, "--generator")
    return [
        Comparison(
            name="reference CNN",
            contenders=[
                floor(*cnn),
                fit("meshwright", "single", *cnn),
                streamed,
                fit("stock", "stock", *cnn),
            ],
            bars=[
                Bar(ours="meshwright", theirs="stock", speedup=3.3),
                Bar(ours="meshwright", theirs="floor", speedup=0.95),
                Bar(ours=streamed.name, theirs="meshwright", speedup=0.97),
            ],
        ),
        Comparison(
            name="tiny MLP",
            contenders=[
                floor(*mlp),
                fit("meshwright", "single", *mlp),
                fit("meshwright, generator", "single", *mlp, "--generator"),
                fit("stock", "stock", *mlp),
            ],
            bars=[
                Bar(ours="meshwright", theirs="stock", speedup=3.0),
                Bar(ours="meshwright", theirs="floor", speedup=0.95),
            ],
        ),
    ]


def mesh(is_short: bool) -> list[Comparison]:
    """What a mesh costs at the same global batch: 8 minutes."""
    found = []
    for title, job in (("reference CNN", "cnn"), ("tiny MLP", "mlp")):
        sizes = sized(job, is_short)
        contenders = [
            fit("1 device", "single", *sizes),
            fit("2 virtual devices", "mirrored", "--devices", "2", *sizes),
            fit("8 virtual devices", "mirrored", "--devices", "8", *sizes),
        ]
        bar = Bar(ours="8 virtual devices", theirs="1 device", speedup=1 / 1.1)
        found.append(Comparison(name=title, contenders=contenders, bars=[bar]))
    sizes = sized("mlp", is_short)
    steps = [
        Contender(
            name=name, script="one_step.py", arguments=[*sizes, *more], environment=CPU
        )
        for name, more in (("plain jit", []), ("a mesh of one", ["--mesh"]))
    ]
    found.append(Comparison(name="one step of the tiny MLP", contenders=steps))
    return found


def scaling(is_short: bool) -> list[Comparison]:
    """Two processes on a core each against one on one core: 7 minutes."""
    found = []
    for title, job, speedup in (
        ("matmul-bound MLP", "matmul", 1.85),
        ("reference CNN", "cnn", 1.6),
    ):
        sizes = [*sized(job, is_short), "--epochs", "3", "--pinned"]
        contenders = [
            fit("1 process", "mirrored", *sizes),
            fit("2 processes", "mirrored", "--processes", "2", *sizes),
        ]
        bar = Bar(ours="2 processes", theirs="1 process", speedup=speedup)
        found.append(Comparison(name=title, contenders=contenders, bars=[bar]))
    return found


def pipeline(is_short: bool) -> list[Comparison]:
    """Two stages on a core each against one process on one core: 18 minutes.

    The bars are shares of what a schedule without any other cost would give: with m
    microbatches and two stages, 2 m / (m + 1) times the speed of one. With one
    microbatch, which is layer-wise placement, nothing is to be gained.
    """
    found = []
    for number, share in ((1, 0.0), (4, 0.85), (8, 0.92), (16, 0.92)):
        sizes = [*sized("deep", is_short), "--microbatches", str(number), "--pinned"]
        contenders = [
            fit("1 process", "single", *sizes),
            fit("2 stages", "pipeline", "--processes", "2", *sizes),
        ]
        speedup = share * 2 * number / (number + 1)
        bar = Bar(ours="2 stages", theirs="1 process", speedup=speedup)
        name = "layer-wise" if number == 1 else f"{number} microbatches, 1F1B"
        bars = [bar] if share else []
        found.append(Comparison(name=name, contenders=contenders, bars=bars))
    return found


def local_sgd(is_short: bool) -> list[Comparison]:
    """Other ways to share gradients, on two processes with a core each: 6 minutes.

    What local SGD really sends is measured by `benchmarks/local_sgd.py`.
    """
    sizes = [*sized("matmul", is_short), "--epochs", "3", "--pinned"]
    contenders = [
        fit(name, strategy, "--processes", "2", *sizes)
        for name, strategy in (
            ("Mirrored", "mirrored"),
            ("LocalSGD(8)", "local"),
            ("CentralStorage", "central"),
        )
    ]
    bar = Bar(ours="LocalSGD(8)", theirs="Mirrored", speedup=1.0)
    return [Comparison(name="matmul-bound MLP", contenders=contenders, bars=[bar])]


def checkpoints(is_short: bool) -> list[Comparison]:
    """What a save per 20 steps costs: 8 minutes.

    The bar of a save alone is a hundredth of 20 steps of 130 ms; its seconds are those
    of the processor, to which others on the machine do not add.
    """
    sizes = ["--job", "cnn", "--samples", "512" if is_short else "46080"]
    fits = [
        fit("fit", "single", *sizes),
        fit("saved every 20 steps", "single", "--save-every", "20", *sizes),
    ]
    save = Contender(
        name="a save alone", script="one_save.py", arguments=sizes, environment=CPU
    )
    bar = Bar(ours="saved every 20 steps", theirs="fit", speedup=0.99)
    return [
        Comparison(name="180 steps of the reference CNN", contenders=fits, bars=[bar]),
        Comparison(
            name="processor time of a save",
            contenders=[save],
            bars=[Bar(ours="a save alone", seconds=0.026)],
        ),
    ]


def packed(is_short: bool) -> list[Comparison]:
    """32 tiny MLPs as one program against one by one: 6 minutes.

    Seconds are those of one member. `fit` is compiled, and dispatches step by step; one
    member packed is a compiled loop of steps, bound by its arithmetic on a CPU.
    """
    job = [*sized("mlp", is_short), "--epochs", "2"]

    def members(name: str, *arguments: str) -> Contender:
        return Contender(
            name=name,
            script="packed.py",
            arguments=[*job, *arguments],
            environment=CPU,
        )

    contenders = [
        fit("one by one, stock", "stock", *job, "--silent"),
        fit("one by one, meshwright", "single", *job, "--silent"),
        members("one packed", "--members", "1"),
        members("32 packed, own orders"),
        members("32 packed, one order", "--shares"),
        members("32 packed on 2 virtual devices, own orders", "--devices", "2"),
        members("32 packed on 2 virtual devices", "--devices", "2", "--shares"),
    ]
    bars = [
        Bar(ours=ours.name, theirs="one by one, stock", speedup=4.0)
        for ours in contenders[-4:]
    ]
    return [Comparison(name="tiny MLP", contenders=contenders, bars=bars)]


def ensemble(is_short: bool) -> list[Comparison]:
    """Two members on a core each against one on one core: 4 minutes.

    The bar is 1.2 times the time of one.
    """
    found = []
    for title, job, epochs in (
        ("reference CNN", "cnn", "4"),
        ("matmul-bound MLP", "matmul", "6"),
    ):
        sizes = [*sized(job, is_short), "--epochs", epochs]
        contenders = [
            Contender(
                name=name,
                script="ensemble_predict.py",
                arguments=[*sizes, *more],
                environment=CPU,
            )
            for name, more in (
                ("1 member", []),
                ("2 members", ["--members", "2"]),
                ("stock predict", ["--stock"]),
            )
        ]
        bar = Bar(ours="2 members", theirs="1 member", speedup=1 / 1.2)
        name = f"predict of the {title}"
        found.append(Comparison(name=name, contenders=contenders, bars=[bar]))
    return found


def asynchronous(is_short: bool) -> list[Comparison]:
    """Two workers, one four times as slow, with and without waiting: 2 minutes."""
    sizes = sized("cnn", is_short)

    def slowed(name: str, strategy: str) -> Contender:
        return Contender(
            name=name,
            script="slow_worker.py",
            arguments=["--strategy", strategy, *sizes],
            environment=CPU,
        )

    return [
        Comparison(
            name="reference CNN, one of two workers four times as slow",
            contenders=[
                slowed("synchronous", "mirrored"),
                slowed("asynchronous", "async"),
            ],
            bars=[Bar(ours="asynchronous", theirs="synchronous", speedup=1.5)],
        )
    ]


SUITES: dict[str, Callable[[bool], Sequence[Comparison]]] = {
    "async": asynchronous,
    "checkpoints": checkpoints,
    "devices": devices,
    "ensemble": ensemble,
    "start": start_up,
    "fit": fits,
    "mesh": mesh,
    "packed": packed,
    "pipeline": pipeline,
    "scaling": scaling,
    "local_sgd": local_sgd,
}


def peers(is_short: bool, tensorflow: str, torch: str) -> list[Comparison]:
    """The reference job next to TensorFlow and PyTorch, which live elsewhere."""
    cnn = sized("cnn", is_short)

    def on_tensorflow(name: str, strategy: str, *arguments: str) -> Contender:
        return Contender(
            name=name,
            script="keras_fit.py",
            arguments=["--strategy", strategy, *cnn, *arguments],
            python=tensorflow,
            environment={**CPU, "KERAS_BACKEND": "tensorflow"},
        )

    def on_torch(name: str, *arguments: str) -> Contender:
        return Contender(
            name=name,
            script="torch_loop.py",
            arguments=[*cnn, *arguments],
            python=torch,
            environment=CPU,
        )

    two = ("--devices", "2")
    contenders = [
        floor(*cnn),
        fit("meshwright, 1 device", "single", *cnn),
        fit("meshwright, 2 virtual devices", "mirrored", *two, *cnn),
        fit("keras on jax", "stock", *cnn),
        fit("keras DataParallel, 2 virtual devices", "keras-data-parallel", *two, *cnn),
        on_tensorflow("keras on tensorflow", "stock"),
        on_tensorflow("MirroredStrategy, 2 logical CPUs", "tf-mirrored", *two),
        on_torch("pytorch, 1 process"),
        on_torch("pytorch DDP, 2 processes", "--processes", "2"),
    ]
    bars = [
        Bar(ours="meshwright, 1 device", theirs="keras on tensorflow", speedup=0.8),
        Bar(ours="meshwright, 1 device", theirs="keras on tensorflow", speedup=1.25),
        Bar(
            ours="meshwright, 2 virtual devices",
            theirs="MirroredStrategy, 2 logical CPUs",
            speedup=1.5,
        ),
    ]
    return [Comparison(name="reference CNN", contenders=contenders, bars=bars)]
