"""Which line of TensorFlow's behaviour which test holds us to, and the page of it.

`python tests/conformance.py` writes `docs/tf_conformance.md`; a test compares.
"""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tf_conformance.md"

Verdict = Literal["same", "better"]
Test = TypeVar("Test", bound=Callable[..., Any])

SECTIONS = {
    "4.1": "Discovery and configuration",
    "4.2": "Memory growth, limits, logical devices",
    "4.3": "`tf.device`, soft placement, log",
    "4.4": "Strategies and their scope",
    "4.5": "What an assignment to a variable means",
    "4.6": "Datasets",
    "4.7": "`run`, `reduce`, `gather`",
    "4.8": "Scaling of losses",
    "4.9": "Other strategies",
    "4.10": "The same edges on Keras and JAX alone",
}

LINES = {
    "4.1.1": "`list_physical_devices`: names; unknown and lower-case kinds give `[]`",
    "4.1.2": "`list_logical_devices` starts the runtime; names",
    "4.1.3": "what starts the runtime and what does not",
    "4.1.4": "`get_device_details` of a CPU is empty",
    "4.1.5": "`get_memory_info`: errors",
    "4.1.6": "`set_visible_devices`: wrong values; no device at all",
    "4.1.7": "visible devices after the start; the same value is fine",
    "4.1.8": "threads after the start; soft placement and the log at any time",
    "4.2.1": "memory growth of CPUs",
    "4.2.2": "memory growth of a device that was split",
    "4.2.3": "memory growth after the start",
    "4.2.4": "unequal memory growth",
    "4.2.5": "`LogicalDeviceConfiguration`",
    "4.2.6": "limits by kind of device",
    "4.2.7": "`set_logical_device_configuration`: None, `[]`, texts",
    "4.2.8": "logical devices after the start",
    "4.3.1": "spellings of a device",
    "4.3.2": "soft placement",
    "4.3.3": "hard placement",
    "4.3.4": "what is no device in either mode",
    "4.3.5": "nested scopes; variables keep their device",
    "4.3.6": "lines of the log; TF_CPP_MIN_LOG_LEVEL",
    "4.3.7": "Keras' layers in a scope",
    "4.4.1": "`MirroredStrategy`: its devices, and wrong ones",
    "4.4.2": "the same strategy nests, others do not mix",
    "4.4.3": "`get_replica_context`, `has_strategy`",
    "4.4.4": "variables that are made in a scope, in `run`, in a function",
    "4.4.5": "`variable_created_in_scope`; variables from outside in `run`",
    "4.4.6": "synchronization NONE; ON_READ and trainable",
    "4.5.1": "mirrored, NONE",
    "4.5.2": "mirrored, SUM, MEAN, ONLY_FIRST_REPLICA",
    "4.5.3": "mirrored, SUM, a plain number",
    "4.5.4": "on read, SUM",
    "4.5.5": "on read, MEAN",
    "4.5.6": "on read, ONLY_FIRST_REPLICA",
    "4.5.7": "on read, NONE",
    "4.5.8": "on read, scatter",
    "4.5.9": "central storage, NONE",
    "4.5.10": "Keras' metrics, slots and moving statistics",
    "4.6.1": "a global batch is split in order, rounded up",
    "4.6.2": "10 in batches of 4 on 2",
    "4.6.3": "11 in batches of 4 on 2",
    "4.6.4": "9 in batches of 4 on 2",
    "4.6.5": "batches of 5 on 2",
    "4.6.6": "batches of 1 on 2",
    "4.6.7": "batches of 4 on 3",
    "4.6.8": "10 in batches of 6 on 3",
    "4.6.9": "`drop_remainder`, `element_spec`",
    "4.6.10": "no batches; lists; distributed twice; no `len`",
    "4.6.11": "the end of the data",
    "4.6.12": "`distribute_datasets_from_function`, `InputContext`",
    "4.6.13": "`InputOptions`",
    "4.6.14": "sharding among workers: AUTO",
    "4.6.15": "sharding among workers: DATA, OFF, FILE",
    "4.6.16": "sharding among workers: text files",
    "4.6.17": "`fit` with an odd global batch",
    "4.6.18": "`fit`, `evaluate`, `predict` of 9 in batches of 4",
    "4.7.1": "`run`: arguments, results, exceptions",
    "4.7.2": "`experimental_local_results`; no float of values per replica",
    "4.7.3": "`reduce`",
    "4.7.4": "`gather`; an error does not outlive it",
    "4.7.5": "the replica context",
    "4.8.1": "`compute_average_loss`",
    "4.8.2": "`scale_regularization_loss`",
    "4.8.3": "a loop of one's own equals one device",
    "4.8.4": "Keras' loss objects in a replica",
    "4.8.5": "`apply_gradients` outside of `run`",
    "4.8.6": "models and `compile` in and out of the scope; weights",
    "4.9.1": "`CentralStorageStrategy`",
    "4.9.2": "`OneDeviceStrategy` of a device that is not there",
    "4.9.3": "`MultiWorkerMirroredStrategy` and `TF_CONFIG`",
    "4.9.4": "`ParameterServerStrategy`: schedule and join",
    "4.9.5": "a parameter server within one process",
    "4.9.6": "`fit` with a parameter server",
    "4.10.1": "9 in batches of 4 on 4",
    "4.10.2": "batches of 6 on 4",
    "4.10.3": "batch normalization over all samples",
    "4.10.4": "a layout rule that matches nothing",
    "4.10.5": "a strategy for a model that is built already",
    "4.10.6": "layers on different devices",
    "4.10.7": "eager arithmetic across devices",
    "4.10.8": "a GPU where there is none",
    "4.10.9": "a CPU that is not there",
    "4.10.10": "the number of CPU devices after the start",
    "4.10.11": "memory statistics of CPUs",
    "4.10.12": "batches ahead of their use",
}

NOT_COVERED = {
    "4.6.14": "Every process goes through the same global batches, and each takes its "
    "part. For data in files, `strategy.meshwright.distribute_dataset` takes a "
    "function of a `Shard`.",
    "4.6.15": "As above; policies are accepted, and change nothing.",
    "4.6.16": "As above; `TextLineDataset` is not there.",
    "4.9.4": "There is no coordinator: `mw.AsyncServer` gives its workers batches.",
}


INTRODUCTION = """# TensorFlow's edges, and ours

How `from meshwright import tf` behaves where TensorFlow 2.21 with Keras 3.15 has edges.
*Same* means that the results and the words of errors are TensorFlow's; *better* means
that TensorFlow is wrong or silent there. `python tests/conformance.py` writes this page
from the tests that it names, which lie in `tests/tf/`.

Of {lines} lines {same} are the same, {better} are better and {others} are not covered:
{share} % are the same or better."""


def semantics(line: str, verdict: Verdict, note: str = "") -> Callable[[Test], Test]:
    """Says which line a test is about, and whether we do as TensorFlow or better."""
    assert line in LINES, line
    assert bool(note) == (verdict == "better"), line

    def mark(test: Test) -> Test:
        return test

    return mark


def tests_by_line() -> dict[str, list[tuple[str, str, str]]]:
    """For each line: the verdict, the note and the test of all that are about it."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for file in sorted((ROOT / "tests" / "tf").rglob("test_*.py")):
        for function in ast.walk(ast.parse(file.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            for mark in function.decorator_list:
                if not isinstance(mark, ast.Call):
                    continue
                if ast.unparse(mark.func) != "semantics":
                    continue
                line, verdict, *note = (ast.literal_eval(a) for a in mark.args)
                where = file.relative_to(ROOT / "tests" / "tf")
                test = f"`{where}::{function.name}`"
                found.setdefault(line, []).append((verdict, *(note or [""]), test))
    return found


def page() -> str:
    """The page, as it should be."""
    tests = tests_by_line()
    missing = [n for n in LINES if n not in tests and n not in NOT_COVERED]
    assert not missing, f"lines without a test or a reason: {missing}"
    verdicts = {n: _verdict(tests[n]) if n in tests else "not covered" for n in LINES}
    counts = {
        v: [*verdicts.values()].count(v) for v in ("same", "better", "not covered")
    }
    share = 100 * (counts["same"] + counts["better"]) / len(LINES)
    text = [
        INTRODUCTION.format(
            lines=len(LINES),
            same=counts["same"],
            better=counts["better"],
            others=counts["not covered"],
            share=round(share),
        )
    ]
    for section, title in SECTIONS.items():
        text += [
            "",
            f"## {title}",
            "",
            "| | Line | Verdict | Held by |",
            "|---|---|---|---|",
        ]
        for number, line in LINES.items():
            if number.rpartition(".")[0] == section:
                text.append(_row(number, line, verdicts[number], tests.get(number, [])))
    return "\n".join(text) + "\n"


def _verdict(tests: list[tuple[str, str, str]]) -> str:
    return "better" if any(verdict == "better" for verdict, *_ in tests) else "same"


def _row(
    number: str, line: str, verdict: str, tests: list[tuple[str, str, str]]
) -> str:
    notes = [note for _, note, _ in tests if note] or [NOT_COVERED.get(number, "")]
    said = f"{verdict}: {' '.join(notes)}" if notes != [""] else verdict
    return f"| {number} | {line} | {said} | {', '.join(test for *_, test in tests)} |"


if __name__ == "__main__":
    PAGE.write_text(page())
