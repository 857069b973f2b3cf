"""Where variables go under a plan: rules, fsdp, tensor; each with its reason."""

from typing import Any

import meshwright as mw
from meshwright.errors import RuleError
from meshwright.parallel.layout import lay_out_model
from meshwright.parallel.plan import Plan
from meshwright.parallel.rules import check_rules

import keras
import pytest

L = keras.layers


def specs(model: keras.Model, plan: Plan) -> dict[str, Any]:
    return {p: v.spec for p, v in lay_out_model(model, plan).items()}


def reasons(model: keras.Model, plan: Plan) -> dict[str, str]:
    return {p: v.because for p, v in lay_out_model(model, plan).items()}


def stack(*layers: keras.layers.Layer, width: int = 8) -> keras.Model:
    return keras.Sequential([keras.Input((width,)), *layers], name="m")


def test_without_an_axis_for_variables_all_are_whole() -> None:
    model = stack(L.Dense(4, name="d"))
    assert specs(model, Plan(data=8)) == {
        "m/d/kernel": (None, None),
        "m/d/bias": (None,),
    }
    assert set(reasons(model, Plan(data=8)).values()) == {
        "replicated: no axis splits variables"
    }


def test_fsdp_splits_the_largest_dim_that_divides_and_names_what_stays() -> None:
    model = stack(L.Dense(6, name="d"), L.Dropout(0.5, name="drop"))
    plan = Plan(fsdp=4)
    assert specs(model, plan)["m/d/kernel"] == ("fsdp", None)
    assert specs(model, plan)["m/d/bias"] == (None,)
    found = reasons(model, plan)
    assert found["m/d/kernel"] == "fsdp splits dim 0 of (8, 6) by 4"
    assert found["m/d/bias"] == "whole over fsdp: no free dim of (6,) divides by 4"
    (seed,) = [v for p, v in found.items() if "seed" in p]
    assert seed == "whole over fsdp: uint32 is a seed or a counter"


def test_tensor_splits_columns_then_rows() -> None:
    model = stack(
        L.Dense(16, name="up"),
        L.ReLU(),
        L.Dense(8, name="down"),
        L.Dense(4, name="out"),
    )
    found = specs(model, Plan(tensor=4))
    assert found == {
        "m/up/kernel": (None, "tensor"),
        "m/up/bias": ("tensor",),
        "m/down/kernel": ("tensor", None),
        "m/down/bias": (None,),
        "m/out/kernel": (None, "tensor"),
        "m/out/bias": ("tensor",),
    }
    why = reasons(model, Plan(tensor=4))
    assert why["m/up/kernel"] == "tensor splits columns: its input is whole"
    assert why["m/down/kernel"] == "tensor splits rows: its input arrives split"


def test_layers_that_mix_features_end_a_split() -> None:
    model = stack(L.Dense(8, name="a"), L.LayerNormalization(), L.Dense(8, name="b"))
    assert specs(model, Plan(tensor=2))["m/b/kernel"] == (None, "tensor")


def test_tensor_splits_convolutions_and_the_statistics_between_them() -> None:
    model = keras.Sequential(
        [
            keras.Input((6, 6, 3)),
            *(L.Conv2D(8, 3, name="a"), L.BatchNormalization(name="bn")),
            *(L.ReLU(), L.Conv2D(4, 3, name="b")),
        ],
        name="m",
    )
    found = specs(model, Plan(tensor=4))
    assert found["m/a/kernel"] == (None, None, None, "tensor")
    assert found["m/bn/gamma"] == ("tensor",)
    assert found["m/b/kernel"] == (None, None, "tensor", None)


def test_tensor_splits_attention_by_heads_and_says_when_they_do_not_divide() -> None:
    inputs = keras.Input((5, 12))
    outputs = L.MultiHeadAttention(6, 2, name="att")(inputs, inputs)
    model = keras.Model(inputs, outputs)
    found = specs(model, Plan(tensor=3))
    assert found["att/query/kernel"] == (None, "tensor", None)
    assert found["att/query/bias"] == ("tensor", None)
    assert found["att/attention_output/kernel"] == ("tensor", None, None)
    why = reasons(model, Plan(tensor=4))
    assert why["att/key/kernel"] == "whole over tensor: 6 heads do not divide by 4"


def test_embeddings_split_by_features_and_recurrent_kernels_stay_whole() -> None:
    model = keras.Sequential(
        [keras.Input((5,)), L.Embedding(10, 8, name="e"), L.LSTM(8, name="r")], name="m"
    )
    found = lay_out_model(model, Plan(tensor=4))
    assert found["m/e/embeddings"].spec == (None, "tensor")
    kernel = found["m/r/lstm_cell/kernel"]
    assert not kernel.is_split
    assert kernel.because == "whole over tensor: recurrent kernels stay whole for now"
    narrow = keras.Sequential(
        [keras.Input((5,)), L.Embedding(10, 6, name="e")], name="m"
    )
    why = lay_out_model(narrow, Plan(tensor=4))["m/e/embeddings"].because
    assert why == "whole over tensor: 6 features do not divide by 4"


def test_features_that_do_not_divide_stay_whole_with_a_reason() -> None:
    why = reasons(stack(L.Dense(6, name="d")), Plan(tensor=4))
    assert why["m/d/kernel"] == "whole over tensor: 6 features do not divide by 4"


def test_tensor_and_fsdp_split_different_dims() -> None:
    found = specs(stack(L.Dense(16, name="d")), Plan(tensor=2, fsdp=4))
    assert found["m/d/kernel"] == ("fsdp", "tensor")


def test_rules_come_first_and_the_first_that_matches_counts() -> None:
    rules = check_rules([("d/kernel", ("tensor", None)), ("kernel", (None, None))])
    model = stack(L.Dense(8, name="d"), L.Dense(8, name="e"))
    plan = Plan(tensor=2, rules=rules)
    assert specs(model, plan)["m/d/kernel"] == ("tensor", None)
    assert specs(model, plan)["m/e/kernel"] == (None, None)
    assert reasons(model, plan)["m/e/kernel"] == "rule 'kernel'"


def fault_of(*rules: Any) -> list[str]:
    model = stack(L.Dense(6, name="dense"))
    with pytest.raises(RuleError) as caught:
        lay_out_model(model, Plan(tensor=4, rules=check_rules(rules)))
    return str(caught.value).split("\n")


def test_a_rule_that_matches_nothing_shows_the_near_misses() -> None:
    assert fault_of(("dens/kernal", (None, "tensor"))) == [
        "The rule 'dens/kernal' matches 0 of 2 variables.",
        "Every rule must take at least one variable; patterns are searched in paths "
        "such as 'm/dense/kernel'.",
        "Did you mean 'm/dense/kernel' or 'm/dense/bias'?",
    ]
    assert fault_of(("zzz", (None,)))[2].startswith("Did you mean 'm/dense/kernel'")


def test_a_rule_that_stands_twice_or_never_gets_its_turn_is_refused() -> None:
    assert fault_of(("kernel", (None, None)), ("kernel", (None, None))) == [
        "The rule 'kernel' stands twice.",
        "Rules are ordered and the first that matches counts, so each pattern stands "
        "once.",
        "Remove one of them.",
    ]
    assert fault_of(("kernel", (None, None)), ("dense/kernel", (None, None))) == [
        "The rule 'dense/kernel' never gets its turn: all of its matches "
        "(m/dense/kernel) are taken by ['kernel'].",
        "Rules are ordered and the first that matches counts.",
        "Move it up, or make the earlier patterns narrower.",
    ]


def test_a_rule_with_a_missing_axis_wrong_rank_or_indivisible_dim_is_refused() -> None:
    assert fault_of(("kernel", (None, "model"))) == [
        "The rule 'kernel' names the axes ['model'].",
        "A spec has one axis name or None per dim; the axes are "
        "('data', 'fsdp', 'tensor').",
        "Write, for example, ('dense/kernel', (None, 'tensor')).",
    ]
    assert fault_of(("kernel", ("tensor",))) == [
        "The rule 'kernel' has a spec of 1 dims ('tensor',), and matches "
        "m/dense/kernel of shape (8, 6).",
        "A spec has one axis name or None per dim.",
        "Give it 2 entries, or make the pattern narrower.",
    ]
    assert fault_of(("kernel", (None, "tensor"))) == [
        "The rule 'kernel' splits dim 1 of m/dense/kernel, of shape (8, 6), over the "
        "axis 'tensor' of degree 4.",
        "A split dim must be divisible: 6 = 4 x 1 + 2.",
        "Split another dim, or use a degree that divides 6.",
    ]


@pytest.mark.parametrize("rule", ["kernel", ("kernel",), ("(", (None,)), (3, (None,))])
def test_what_is_no_rule_is_refused(rule: Any) -> None:
    with pytest.raises(RuleError) as caught:
        mw.TensorParallel(2, rules=[rule])
    assert str(caught.value).split("\n") == [
        f"A rule is {rule!r}.",
        "A rule is a pair of a regular expression, searched in the variable's path, "
        "and a spec with one axis name or None per dim.",
        "Write, for example, ('dense/kernel', (None, 'tensor')).",
    ]
