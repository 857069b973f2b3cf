"""What two processes with a core each need to add up numbers: half a minute.

    python benchmarks/collectives.py

Milliseconds, the median of several calls: as JAX leaves Gloo's thread, and when it
gives way to others (`meshwright/cluster/gloo.py`).
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

from contender import Follower, free_address, pin
from jobs import arguments

CALLS = 15
SIZES = {"1,000 numbers": 1_000, "4.2 million numbers (17 MB)": 4_208_640}


def adding_up(size: int) -> Callable[[], Any]:
    """A call that adds up arrays of all processes."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh, split = Mesh(np.array(jax.devices()), ("process",)), PartitionSpec("process")
    where = NamedSharding(mesh, split)
    own = np.ones((1, size), np.float32)
    array = jax.make_array_from_process_local_data(where, own)
    program = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, "process"),
            mesh=mesh,
            in_specs=split,
            out_specs=split,
        )
    )
    return lambda: jax.block_until_ready(program(array))


def milliseconds(call: Callable[[], Any]) -> float:
    """The median over some calls, after a first one that compiles."""
    call()
    seconds = []
    for _ in range(CALLS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return 1000 * statistics.median(seconds)


def main() -> None:
    """Runs in both processes; the first one prints."""
    parser = arguments(__doc__)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--address", default=None)
    options = parser.parse_args()
    address = options.address or free_address()
    follower = None if options.rank else Follower(address)
    pin(options.rank)

    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address, 2, options.rank, coordinator_bind_address=address
    )
    from meshwright.cluster.gloo import let_gloo_give_way

    calls = {name: adding_up(size) for name, size in SIZES.items()}
    before = {name: milliseconds(call) for name, call in calls.items()}
    assert let_gloo_give_way(), "Gloo's thread was not found"
    after = {name: milliseconds(call) for name, call in calls.items()}
    if not options.rank:
        print("| added up | as it is | when it gives way |\n|---|---|---|")
        for name in SIZES:
            print(f"| {name} | {before[name]:.2f} | {after[name]:.2f} |")
    jax.distributed.shutdown()
    if follower is not None:
        follower.wait()


if __name__ == "__main__":
    main()
