"""`FILE.py:make_model` on the command line."""

import difflib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from meshwright.errors import MeshwrightError, ModelFileError
from meshwright.models.profile import build_abstractly

import jax

_FORM = "A model or its data is given as FILE.py:FUNCTION, without arguments."
_EXAMPLE = "Write, for example, examples/resnet50.py:make_model."
_RESULT = "The function returns a compiled and built Keras model."


def load_model(target: str, *, with_values: bool = False) -> Any:
    """Makes the model of `FILE.py:make_model`, without allocating it.

    Arguments:
        target: The text.
        with_values: Whether to allocate it after all.

    Raises:
        ModelFileError: There is no such file or function, it fails, or it returns
            something else than a built and compiled model.
    """
    make_model = load_function(target)
    file = target.rpartition(":")[0]

    def make() -> Any:
        model = make_model()
        _check(model, target)
        return model

    try:
        return make() if with_values else build_abstractly(make)
    except MeshwrightError:
        raise
    except jax.errors.JAXTypeError as error:
        # JAX's text is long, and its first line says it.
        raise ModelFileError(
            f"{target} looked at a value{_place(error, Path(file))}: "
            f"{str(error).splitlines()[0]}",
            "A model is planned from shapes alone, and its weights have no values.",
            "Load weights, compute from values and train outside of the function.",
        ) from error
    except Exception as error:
        raise _failure(target, error, Path(file), _RESULT) from error


def load_function(target: str) -> Callable[[], Any]:
    """The function of `FILE.py:NAME`; the file is imported.

    Arguments:
        target: The text.

    Raises:
        ModelFileError: There is no such file or function, or the file fails.
    """
    file, colon, name = target.rpartition(":")
    if not (file and colon and name):
        raise ModelFileError(f"The model received {target!r}.", _FORM, _EXAMPLE)
    return _function(_load(Path(file)), name, file)


def _load(path: Path) -> ModuleType:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        near = difflib.get_close_matches(
            path.name, [f.name for f in path.parent.glob("*.py")], n=2
        )
        raise ModelFileError(
            f"The file {path} {what}.",
            _FORM,
            f"Did you mean {' or '.join(near)}?" if near else _EXAMPLE,
        )
    # A name of its own: a file called keras.py does not take the place of Keras.
    spec = importlib.util.spec_from_file_location(f"model_file_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ModelFileError(f"The file {path} is not Python.", _FORM, _EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    # As for a script: what lies beside it can be imported, and it is found by name.
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except MeshwrightError:
        raise
    except Exception as error:
        raise _failure(str(path), error, path, "The file is imported.") from error
    return module


def _function(module: ModuleType, name: str, file: str) -> Callable[[], Any]:
    found = getattr(module, name, None)
    if callable(found):
        return found
    names = [
        each
        for each, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    near = difflib.get_close_matches(name, names, n=2, cutoff=0.5)
    wrong = "has no function" if found is None else f"has a {type(found).__name__}"
    raise ModelFileError(
        f"{file} {wrong} {name!r}.",
        _FORM,
        f"Did you mean {' or '.join(near)}?"
        if near
        else f"It has these functions: {', '.join(names) or 'none'}.",
    )


def _check(model: Any, target: str) -> None:
    import keras

    if not isinstance(model, keras.Model):
        raise ModelFileError(
            f"{target} returned {_shown(model)} (a {type(model).__name__}).",
            _RESULT,
            "End the function with `return model`.",
        )
    if not model.built:
        raise ModelFileError(
            f"{target} returned {model.name!r}, which is not built.",
            _RESULT,
            "Give it a keras.Input, or call build(input_shape) in the function.",
        )
    if not model.compiled:
        raise ModelFileError(
            f"{target} returned {model.name!r}, which is not compiled.",
            _RESULT,
            "Call compile(optimizer=..., loss=...) in the function.",
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _failure(what: str, error: Exception, path: Path, rule: str) -> ModelFileError:
    text = str(error).strip().splitlines()
    message = f": {text[0]}" if text else ""
    return ModelFileError(
        f"{what} failed{_place(error, path)}: {type(error).__name__}{message}",
        rule,
        "Write --debug before the verb to see the whole error.",
    )


def _place(error: Exception, path: Path) -> str:
    """The last line of the file that an error came through."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).resolve() == path.resolve()
    ]
    if isinstance(error, SyntaxError) and error.lineno is not None:
        lines.append(error.lineno)
    return f" in line {lines[-1]}" if lines else ""
