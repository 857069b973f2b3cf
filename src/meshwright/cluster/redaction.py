"""What a run folder may tell of an environment and of arguments: no secrets."""

import re
from collections.abc import Mapping, Sequence

HIDDEN = "***"

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_ALLOWED = re.compile(
    "MESHWRIGHT_|KERAS_|JAX_|XLA_|TF_CPP_|CUDA_|NVIDIA_|NCCL_|GLOO_|ROCR_|HIP_|TPU_|OMP_|MKL_"
    "|SLURM_|OMPI_|PMI|PYTHON|LD_LIBRARY_PATH$|LANG$|LC_|TZ$"
    "|(?:https?|all|grpc|no)_proxy$",
    re.IGNORECASE,
)
_ORDERS = {"MESHWRIGHT_ORDERS", "MESHWRIGHT_CHANNEL"}


def redact_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that say how a run is computed, by name; secrets are hidden.

    >>> redact_environment({"XLA_FLAGS": "--a", "HOME": "/me", "JAX_TOKEN": "42"})
    {'JAX_TOKEN': '***', 'XLA_FLAGS': '--a'}
    """
    return {
        name: HIDDEN if _SECRET.search(name) else _CREDENTIALS.sub(HIDDEN, value)
        for name, value in sorted(environment.items())
        if _ALLOWED.match(name) and name not in _ORDERS
    }


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Arguments with the values of secrets hidden.

    >>> redact_arguments(["--lr", "0.1", "--api-key", "42", "token=43"])
    ['--lr', '0.1', '--api-key', '***', 'token=***']
    """
    shown: list[str] = []
    hide_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hide_next and not argument.startswith("-"):
            shown.append(HIDDEN)
        elif equals and _SECRET.search(name):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(_CREDENTIALS.sub(HIDDEN, argument))
        is_flag = argument.startswith("-") and not equals
        hide_next = is_flag and bool(_SECRET.search(argument))
    return shown
