"""What kernels need that are chosen by trial, from texts of compiled programs."""

from meshwright.devices.kernel_trials import (
    REDZONE_BYTES,
    largest_trial,
    with_workspaces,
)

import jax
import jax.numpy as jnp
import pytest

MIB = 2**20

PROGRAM_OF_A_GPU = """HloModule jit_run, is_scheduled=true

%fused (param_0: f32[8,16]) -> f32[8,16] {
  %param_0 = f32[8,16]{1,0} parameter(0)
  ROOT %tanh = f32[8,16]{1,0} tanh(%param_0)
}

ENTRY %main (state: f32[4,16], data: f32[8,4]) -> f32[8,16] {
  %state = f32[4,16]{1,0} parameter(0), metadata={op_name="state[0][0]"}
  %data = f32[8,4]{1,0} parameter(1), metadata={op_name="batch"}
  %product = (f32[8,16]{1,0}, s8[1024]{0}) custom-call(%data, %state), \
custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{}}
  %got = f32[8,16]{1,0} get-tuple-element(%product), index=0
  %again = f32[8,16]{1,0} fusion(%got, %state), kind=kCustom, calls=%gemm_fusion
  ROOT %loop_fusion = f32[8,16]{1,0} fusion(%again, %got, %again), kind=kLoop, \
calls=%fused
}
"""


def test_trials_have_the_inputs_of_a_product_and_its_outputs_twice() -> None:
    product = 4 * (8 * 4 + 4 * 16) + 2 * (4 * 8 * 16 + 1024) + 2 * REDZONE_BYTES
    assert largest_trial(PROGRAM_OF_A_GPU) == product
    lines = PROGRAM_OF_A_GPU.splitlines()
    without = "\n".join(line for line in lines if "custom-call" not in line)
    fused = 4 * (8 * 16 + 4 * 16) + 2 * 4 * 8 * 16 + 2 * REDZONE_BYTES
    assert largest_trial(without) == fused
    assert largest_trial("HloModule empty") == 0


def test_products_inside_of_loops_are_tried_out_too() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, w: (c @ w, None), x[0], x)[0]

    x = jax.ShapeDtypeStruct((5, 32, 32), jnp.float32)
    program = jax.jit(step).lower(x).compile().as_text()
    assert largest_trial(program) == 4 * 4 * 32 * 32 + 2 * REDZONE_BYTES


@pytest.mark.parametrize(
    "call",
    [
        'custom-call(%data, %state), custom_call_target="cudnn_rnn"',
        'custom-call(%data, %state), custom_call_target="__cudnn$fmhaSoftmax"',
        'fusion(%data, %state), kind=kCustom, calls=%triton_softmax_computation, \
backend_config={"fusion_backend_config":{"kind":"__triton"}}',
    ],
)
def test_calls_with_only_one_kernel_are_not_tried_out(call: str) -> None:
    line = f"  %out = (f32[8,16]{{1,0}}, u8[1073741824]{{0}}) {call}"
    assert largest_trial(PROGRAM_OF_A_GPU + line) == largest_trial(PROGRAM_OF_A_GPU)


def program(*lines: str, root: str = "%last") -> str:
    """A program of these lines; its arguments are of 1 MiB."""
    return "\n".join(
        [
            "HloModule jit_run, is_scheduled=true",
            "",
            "ENTRY %main (x: f32[512,512]) -> f32[512,512] {",
            "  %x = f32[512,512]{1,0} parameter(0)",
            *lines,
            f"  ROOT %out = (f32[512,512]{{1,0}}) tuple({root})",
            "}",
        ]
    )


def loop(name: str, *inputs: str) -> str:
    """An operation of elements, which may write over its inputs."""
    operands = ", ".join(inputs)
    return f"  %{name} = f32[512,512]{{1,0}} fusion({operands}), kind=kLoop, calls=%f"


def filter_gradient(name: str, *inputs: str) -> str:
    """A convolution that sums over the samples; without trials it has no workspace."""
    return (
        f"  %{name} = (f32[3,3]{{1,0}}, u8[0]{{0}}) custom-call({', '.join(inputs)}), "
        'custom_call_target="__cudnn$convBackwardFilter"'
    )


def test_the_gradient_of_a_filter_may_copy_its_inputs() -> None:
    text = program(
        loop("a", "%x"),
        loop("b", "%x"),
        filter_gradient("g", "%a", "%b"),
        loop("last", "%x"),
    )
    assert with_workspaces(text, 2 * MIB) == pytest.approx(4 * MIB, abs=64)


def test_workspaces_find_room_where_little_is_alive() -> None:
    many = [loop(f"m{i}", "%x") for i in range(4)]
    text = program(
        loop("a", "%x"),
        filter_gradient("g", "%a", "%a"),
        *many,
        loop("last", "%m0", "%m1", "%m2", "%m3"),
    )
    assert with_workspaces(text, 4 * MIB) == 4 * MIB


def test_without_such_convolutions_the_compiler_is_believed() -> None:
    text = program(loop("a", "%x"), loop("b", "%x"), loop("last", "%a", "%b"))
    assert with_workspaces(text, 1000) == 1000
    forward = text.replace(
        "fusion(%a, %b), kind=kLoop",
        'custom-call(%a), custom_call_target="__cudnn$conv"',
    )
    assert with_workspaces(forward, 1000) == 1000
    assert with_workspaces("HloModule empty", 1000) == 1000


def test_convolutions_inside_of_loops_count_beside_what_is_alive_outside() -> None:
    body = [
        "%body (p: (f32[512,512])) -> (f32[512,512]) {",
        "  %p = (f32[512,512]{1,0}) parameter(0)",
        "  %carried = f32[512,512]{1,0} get-tuple-element(%p), index=0",
        loop("inner", "%carried"),
        filter_gradient("g", "%inner", "%inner"),
        loop("next", "%carried"),
        "  ROOT %new = (f32[512,512]{1,0}) tuple(%next)",
        "}",
        "",
    ]
    outside = program(
        loop("a", "%x"),
        loop("kept", "%x"),
        "  %start = (f32[512,512]{1,0}) tuple(%a)",
        "  %w = (f32[512,512]{1,0}) while(%start), condition=%c, body=%body",
        "  %got = f32[512,512]{1,0} get-tuple-element(%w), index=0",
        loop("last", "%got", "%kept"),
    )
    head, entry = outside.split("\nENTRY")
    text = "\n".join([head, *body]) + "\nENTRY" + entry
    # Two outside, `inner`, and copies of both inputs.
    assert with_workspaces(text, 3 * MIB) == pytest.approx(5 * MIB, abs=64)
