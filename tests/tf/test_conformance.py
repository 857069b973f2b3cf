"""The page about TensorFlow's edges says what the tests hold us to."""

import conformance


def test_the_page_is_current() -> None:
    assert conformance.PAGE.read_text() == conformance.page(), (
        "run `python tests/conformance.py`"
    )


def test_of_the_lines_of_the_reference_most_are_covered() -> None:
    covered = len(conformance.LINES) - len(conformance.NOT_COVERED)
    assert covered / len(conformance.LINES) >= 0.85
