"""What two processes really send: local SGD and DiLoCo beside Mirrored. 2 minutes.

Each strategy runs in a network namespace of its own, so that the bytes which its
loopback device counts are those of the training, of Gloo's headers and of what the
processes say to each other. The bar is a share of Mirrored's bytes: 1 / sync_every and
5 %. `python benchmarks/local_sgd.py [--steps 128]`; needs `unshare` and `ip`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

STRATEGIES = {
    "Mirrored": ("mw.Mirrored(['CPU:0'])", None),
    "LocalSGD(1)": ("mw.LocalSGD(1, devices=['CPU:0'])", 1),
    "LocalSGD(4)": ("mw.LocalSGD(4, devices=['CPU:0'])", 4),
    "LocalSGD(16)": ("mw.LocalSGD(16, devices=['CPU:0'])", 16),
    "DiLoCo, 16": (
        "mw.LocalSGD(16, keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True), "
        "devices=['CPU:0'])",
        16,
    ),
}
SCRIPT = """
import json, sys
import meshwright as mw, keras, numpy as np
steps = int(sys.argv[2])
x = np.random.default_rng(0).normal(size=(16 * steps, 256)).astype("float32")
keras.utils.set_random_seed(0)
layers = [keras.layers.Dense(1024, activation="relu"), keras.layers.Dense(256)]
model = keras.Sequential([keras.Input((256,)), *layers])
model.compile("adam", "mse")
mw.distribute(model, {strategy})
def sent():
    line = next(line for line in open("/proc/net/dev") if "lo:" in line)
    return int(line.split()[9])
class Count(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.before = sent()
    def on_epoch_end(self, epoch, logs=None):
        self.sent = sent() - self.before
count = Count()
model.fit(x, x, batch_size=16, epochs=2, verbose=0, callbacks=[count])
if mw.process_index() == 0:
    told = dict(sent=count.sent / steps, parameters=4 * model.count_params())
    open(sys.argv[1], "w").write(json.dumps(told))
"""


def measure(strategy: str, steps: int) -> dict[str, float]:
    """Bytes that a step of two processes sends, after an epoch that compiles."""
    with tempfile.TemporaryDirectory() as folder:
        script, told = Path(folder, "script.py"), Path(folder, "told.json")
        script.write_text(SCRIPT.replace("{strategy}", strategy))
        program = str(Path(sys.executable).with_name("meshwright"))
        train = [program, "train", "--processes", "2"]
        train += ["--run", f"{folder}/run", str(script), "--", str(told), str(steps)]
        up = 'ip link set lo up && exec "$@"'
        command = ["unshare", "-rn", "sh", "-c", up, "sh", *train]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        found: dict[str, float] = json.loads(told.read_text())
        return found


def main() -> None:
    """Prints a table; the exit status tells whether all bars were met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=128, help="of the counted epoch")
    steps = parser.parse_args().steps
    print("| strategy | KiB a step | of Mirrored | bar |\n|---|---|---|---|")
    mirrored, is_met = 0.0, True
    for name, (strategy, every) in STRATEGIES.items():
        sent = measure(strategy, steps)["sent"]
        mirrored = mirrored or sent
        share, bar = sent / mirrored, 1.0 if every is None else 1 / every + 0.05
        is_met &= share <= bar
        print(f"| {name} | {sent / 1024:.1f} | {share:.1%} | {bar:.1%} |", flush=True)
    sys.exit(0 if is_met else 1)


if __name__ == "__main__":
    main()
