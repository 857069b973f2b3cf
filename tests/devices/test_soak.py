"""The device layer, again and again."""

import pytest

from conftest import Run


@pytest.mark.soak
def test_two_hundred_restarts_of_the_runtime_leak_nothing(run_script: Run) -> None:
    done = run_script(
        "import psutil\n"
        "import jax, jax.numpy as jnp\n"
        "import meshwright as mw\n"
        "sizes = []\n"
        "for i in range(200):\n"
        "    mw.configure(virtual=2 + i % 3)\n"
        "    assert len(jax.devices()) == 2 + i % 3\n"
        "    with mw.device('CPU:1'):\n"
        "        assert float(jnp.arange(1000.0).sum()) == 499500\n"
        "    sizes.append(psutil.Process().memory_info().rss)\n"
        "print(sizes[-1] - sizes[50])\n"
    )
    assert int(done.stdout) < 150 * 2**20, "less than a MiB per restart"
