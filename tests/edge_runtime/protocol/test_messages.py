import msgspec
import pytest

from edge_runtime.errors import Refusal
from edge_runtime.protocol import MESSAGES, Abort, Hello, Refused, Welcome, refuse_mismatch

OURS = Hello("n1", model_hash="aaa", dtype="float32", numerics="native")


def test_every_tag_is_the_snake_case_of_its_class():
    assert MESSAGES["expert_call"].__name__ == "ExpertCall"
    assert msgspec.to_builtins(Abort("r"))["type"] == "abort"
    assert not [tag for tag in MESSAGES if tag.startswith("_")]


def test_messages_are_frozen():
    with pytest.raises(AttributeError):
        Abort("r").request_id = "s"


def test_equal_identities_work_together():
    assert refuse_mismatch(Welcome("n2", model_hash="aaa", dtype="float32", numerics="native"), OURS) is None


def test_nodes_whose_kernels_differ_in_the_last_bit_work_together_too():
    assert refuse_mismatch(msgspec.structs.replace(OURS, numerics="torch"), OURS) is None


def test_what_one_side_does_not_know_yet_is_not_compared():
    assert refuse_mismatch(Hello("cli", role="client"), OURS) is None


@pytest.mark.parametrize(
    ("changes", "reason", "values"),
    [
        ({"model_hash": "bbb"}, "model", ("aaa", "bbb")),
        ({"dtype": "bfloat16"}, "dtype", ("float32", "bfloat16")),
        ({"protocol": 7}, "version", ("1", "7")),
    ],
)
def test_a_mismatch_is_refused_with_both_values_and_both_names(changes, reason, values):
    refused = refuse_mismatch(msgspec.structs.replace(OURS, node="n2", **changes), OURS)
    assert refused.reason == reason
    assert all(word in refused.detail for word in (*values, "n1", "n2"))


def test_a_refusal_travels_as_refused_and_comes_back():
    error = Refused.of(Refusal("busy", "n1 has 64 requests waiting", 0.5), "r1").as_error()
    assert (error.reason, str(error), error.retry_after_s) == ("busy", "n1 has 64 requests waiting", 0.5)
