"""Names of experts, for programs and for people."""

from topology.ids import ExpertId, describe_experts


def test_experts_sort_by_layer_then_index() -> None:
    assert sorted([ExpertId(1, 0), ExpertId(0, 9), ExpertId(0, 2)]) == [(0, 2), (0, 9), (1, 0)]


def test_an_expert_says_its_layer_and_index() -> None:
    assert str(ExpertId(3, 17)) == "layer 3 expert 17"


def test_neighbours_are_folded_into_ranges() -> None:
    experts = [ExpertId(0, index) for index in (7, 1, 2, 3)] + [ExpertId(2, 4), ExpertId(2, 4)]
    assert describe_experts(experts) == "layer 0: 1-3, 7; layer 2: 4"


def test_many_layers_are_counted_rather_than_listed() -> None:
    experts = [ExpertId(layer, index) for layer in range(5) for index in range(4)]
    assert describe_experts(experts, max_layers=2) == "layer 0: 0-3; layer 1: 0-3; and 12 in 3 more layers"
    assert describe_experts(experts, max_layers=4).endswith("; and 4 in 1 more layer")


def test_no_experts_are_none() -> None:
    assert describe_experts([]) == "none"
