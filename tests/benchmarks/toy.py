"""A contender that computes nothing: says what it is told to, or fails as told."""

import sys
import time

from contender import serve

what = sys.argv[-1]
runs = 0


def repeat() -> dict[str, float]:
    global runs
    runs += 1
    if what == "breaks" and runs == 3:
        raise ValueError("the third run broke")
    if what == "hangs" and runs == 3:
        time.sleep(60)
    print("a bar without an end", end="\r")
    return {"seconds": float(what) if what[0].isdigit() else 1.0, "loss": 0.5}


if __name__ == "__main__":
    if what == "missing":
        raise ImportError("no module named torch")
    serve(repeat, steps=10, device="toy")
