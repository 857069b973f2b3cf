"""The networks of keras.applications train on meshes as on one device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("applications.py")
MODELS = (
    *("MobileNet", "MobileNetV2", "MobileNetV3Small", "VGG16", "ResNet50"),
    *("ResNet50V2", "DenseNet121", "EfficientNetB0", "EfficientNetV2B0", "Xception"),
    *("InceptionV3", "NASNetMobile", "ConvNeXtTiny", "InceptionResNetV2"),
)
FIRST_BLOCKS = {
    "ResNet50": "conv2_block2_out",
    "EfficientNetV2B0": "block2b_add",
}
"""Networks of which `make test` compiles the part that ends with this layer."""

TOLERANCE = 1e-6
"""Of the updates in float64, whose rounding deep networks amplify (seen: 3.5e-8); a
wrong gradient is off by about as much as they are."""

# Compiling takes longer than computing here.
FLAGS = os.environ["XLA_FLAGS"] + " --xla_llvm_disable_expensive_passes=true"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MODELS)
def test_one_epoch_over_meshes_equals_one_device_in_float64(name: str) -> None:
    compare_in_float64(name)


@pytest.mark.parametrize(
    "name",
    ["ResNet50", pytest.param("EfficientNetV2B0", marks=pytest.mark.soak)],
)
def test_first_blocks_over_meshes_equal_one_device_in_float64(name: str) -> None:
    compare_in_float64(name, FIRST_BLOCKS[name])


def compare_in_float64(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_ENABLE_X64": "1", "XLA_FLAGS": FLAGS},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(*arguments, json.dumps(found))
    for strategy in ("Mirrored", "FSDP", "TensorParallel"):
        assert found[strategy]["weights"] < TOLERANCE, strategy
        assert found[strategy]["loss"] < TOLERANCE, strategy
