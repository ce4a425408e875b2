"""Similarity groups: a partition of each layer, around the frequent, by thresholds and caps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.traits import frequency_of, similarity_of
from topology.grouping import (
    depth_caps,
    depth_thresholds,
    group_experts,
    quantile_thresholds,
)


@given(st.integers(1, 5), st.integers(1, 24), st.integers(0, 1000), st.floats(-0.2, 1.0), st.booleans())
def test_groups_partition_every_layer_and_keep_to_threshold_and_cap(
    layers, experts, seed, threshold, complete
):
    similarity, frequency = similarity_of(layers, experts, seed), frequency_of(layers, experts, seed)
    caps = depth_caps(layers, experts)
    groups = group_experts(
        similarity, frequency, thresholds=[threshold] * layers, caps=caps, complete=complete
    )
    for row in range(layers):
        members = groups.members(row)
        assert sorted(index for group in members for index in group) == list(range(experts))
        for group in members:
            [centre] = {int(groups.dominant[row, index]) for index in group}
            assert centre in group and len(group) <= caps[row]
            assert frequency[row, centre] == max(frequency[row, group])
            others = [index for index in group if index != centre]
            assert all(similarity[row, centre, other] >= threshold for other in others)
            if complete:
                assert all(similarity[row, a, b] >= threshold for a in group for b in group if a != b)
    assert groups.together.sum() == sum(len(g) ** 2 for row in range(layers) for g in groups.members(row))


def test_the_most_frequent_expert_takes_in_the_most_similar_first():
    similarity = np.array(
        [[[1.0, 0.7, 0.8, 0.1], [0.7, 1, 0.9, 0.2], [0.8, 0.9, 1, 0.3], [0.1, 0.2, 0.3, 1]]]
    )
    frequency = np.array([[0.2, 0.5, 0.2, 0.1]])
    two = group_experts(similarity, frequency, thresholds=[0.6], caps=[2])
    assert two.members(0) == [[1, 2], [0], [3]], (
        "around 1, which has room for one more; 0 and 3 are not alike"
    )
    three = group_experts(similarity, frequency, thresholds=[0.6], caps=[4])
    assert three.members(0) == [[0, 1, 2], [3]]
    assert three.dominant[0].tolist() == [1, 1, 1, 3]


def test_complete_linkage_leaves_out_who_is_only_like_the_dominant_one():
    similarity = np.array([[[1.0, 0.9, 0.8], [0.9, 1, 0.1], [0.8, 0.1, 1]]])
    frequency = np.array([[0.6, 0.2, 0.2]])
    star = group_experts(similarity, frequency, thresholds=[0.7], caps=[3])
    linked = group_experts(similarity, frequency, thresholds=[0.7], caps=[3], complete=True)
    assert star.members(0) == [[0, 1, 2]] and linked.members(0) == [[0, 1], [2]]


def test_thresholds_fall_and_caps_grow_with_depth():
    assert depth_thresholds(5) == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5])
    assert depth_thresholds(1) == [0.9]
    assert depth_caps(4, 32) == [2, 7, 11, 16]
    assert depth_caps(3, 2) == [2, 2, 2]


def test_quantile_thresholds_leave_in_so_many_of_the_pairs():
    similarity = similarity_of(2, 30, 3)
    above = np.triu_indices(30, k=1)
    first, last = quantile_thresholds(similarity, 0.9, 0.6)
    assert (similarity[0][above] >= first).mean() == pytest.approx(0.1, abs=0.01)
    assert last >= 0.0 and (similarity[1][above] >= last).mean() <= 0.41
    assert quantile_thresholds(-np.ones((1, 4, 4))) == [0.0], "experts that are unlike are never grouped"
    assert quantile_thresholds(np.ones((1, 1, 1))) == [0.0]


def test_tables_that_do_not_belong_together_are_refused():
    with pytest.raises(ValueError, match="expected"):
        group_experts(similarity_of(2, 4), frequency_of(3, 4))
