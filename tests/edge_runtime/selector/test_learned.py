"""From an artifact to the tables of planner and selector, and what is said where that cannot be."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from edge_runtime.artifacts import Artifact, write_section
from edge_runtime.errors import ArtifactError
from edge_runtime.selector.learned import SAFETY, find_traits, read_losses, read_traits
from tests.support.planning import cluster
from tests.support.traits import write_artifact

HASH = "a" * 32
LAYERS = (1, 3, 4)


@pytest.fixture
def artifact(tmp_path) -> Artifact:
    return Artifact.open(write_artifact(tmp_path / "calibration", HASH, LAYERS, 6), model_hash=HASH)


def test_tables_come_by_layer_and_groups_partition_them(artifact):
    traits, losses = read_traits(artifact), read_losses(artifact)
    assert traits.layers == losses.layers == LAYERS
    assert traits.frequency.sum(axis=1) == pytest.approx(np.ones(3))
    assert traits.groups.group_of.shape == (3, 6) and traits.by_cluster.shape == (2, 3, 6)
    assert (losses.loss[:, range(6), range(6)] == 0).all() and (losses.loss >= 0).all()
    assert losses.transitions.sum(axis=2) == pytest.approx(np.ones((2, 6)))
    assert (losses.transitions > 0).all(), "what was never seen may still happen"
    assert losses.near.sum(axis=2).tolist() == [[4] * 6] * 3 and losses.near[:, range(6), range(6)].all()


def test_losses_grow_with_the_square_where_squares_were_measured(artifact):
    linear = read_losses(artifact)
    mismatch = artifact.tensor("mismatch", "mismatch").float().numpy()
    sensitivity = {"sensitivity": torch.ones(3), "quadratic": torch.tensor([0.1, 0.2, 0.3])}
    write_section(artifact.folder, "sensitivity", sensitivity, model_hash=HASH)
    squared = read_losses(Artifact.open(artifact.folder))
    assert (linear.power, squared.power) == (1.0, 2.0)
    assert squared.loss[1] == pytest.approx(0.2 * mismatch[1] ** 2)


def test_several_stand_ins_cost_what_was_measured_and_the_most_there_is_where_it_was_not(artifact):
    sensitivity = {"sensitivity": torch.ones(3), "quadratic": torch.tensor([0.1, 0.2, 0.3])}
    write_section(artifact.folder, "sensitivity", sensitivity, model_hash=HASH)
    mismatch, norm = artifact.tensor("mismatch", "mismatch"), torch.full((3, 6), 0.5)
    write_section(artifact.folder, "mismatch", {"mismatch": mismatch, "norm": norm}, model_hash=HASH)
    before = read_losses(Artifact.open(artifact.folder))
    assert before.coherence == 1.0 and before.drag_per_deviation == 2.0 and before.late is None
    found = {"factors": torch.tensor([1.25, 0.25]), "late": torch.tensor([0.04, 0.01, 0.0])}
    write_section(artifact.folder, "together", found, model_hash=HASH)
    after = read_losses(Artifact.open(artifact.folder))
    assert after.loss == pytest.approx(SAFETY * 1.25 * before.loss) and after.coherence == pytest.approx(0.2)
    assert after.late == pytest.approx(np.repeat([[0.1], [0.05], [0.0]], 6, axis=1))
    assert after.left_out[1] == pytest.approx(np.full(6, 0.5 * (SAFETY * 1.25 * 0.2) ** 0.5))


def test_a_cluster_finds_the_artifact_in_its_models_folder_or_by_name(tmp_path):
    write_artifact(tmp_path / "calibration", HASH, LAYERS, 6)
    write_artifact(tmp_path / "elsewhere", HASH, LAYERS, 6, seed=1)
    beside = find_traits(replace(cluster(), model=str(tmp_path)), HASH)
    named = find_traits(
        replace(cluster(), model=str(tmp_path), calibration=str(tmp_path / "elsewhere")), HASH
    )
    assert not np.allclose(beside.frequency, named.frequency)
    assert find_traits(replace(cluster(), model=str(tmp_path / "elsewhere")), HASH) is None
    with pytest.raises(ArtifactError, match="does not exist"):
        find_traits(replace(cluster(), calibration=str(tmp_path / "nowhere")), HASH)


def test_the_artifact_of_another_model_is_refused_with_both_hashes(tmp_path):
    write_artifact(tmp_path / "calibration", HASH, LAYERS, 6)
    with pytest.raises(ArtifactError, match=f"{HASH}, expected {'b' * 32}"):
        find_traits(replace(cluster(), model=str(tmp_path)), "b" * 32)


def test_tables_of_unequal_shapes_are_refused_and_absent_ones_are_nothing(artifact):
    write_section(artifact.folder, "mismatch", {"mismatch": torch.zeros(2, 6, 6)}, model_hash=HASH)
    with pytest.raises(
        ArtifactError, match=r"section mismatch has the shape \[2, 6, 6\], expected \[3, 6, 6\]"
    ):
        read_losses(Artifact.open(artifact.folder))
    empty = artifact.folder / "empty"
    write_section(empty, "frequency", {"overall": torch.ones(3, 6)}, model_hash=HASH)
    assert read_losses(Artifact.open(empty)) is None and read_traits(Artifact.open(empty)) is None


def test_a_pair_that_was_never_measured_costs_more_than_any_budget(artifact):
    mismatch = torch.full((3, 6, 6), float("nan"))
    write_section(artifact.folder, "mismatch", {"mismatch": mismatch}, model_hash=HASH)
    assert (read_losses(Artifact.open(artifact.folder)).loss == np.inf).all()


def nan_at_first(table: torch.Tensor) -> torch.Tensor:
    table = table.clone().float()
    table.view(-1)[0] = float("nan")
    return table


@pytest.mark.parametrize(
    ("section", "name", "change", "told"),
    [
        ("frequency", "overall", lambda t: t[:-1], r"shape \[2, 6\], expected \[3, any\]"),
        ("frequency", "overall", lambda t: t[:, :0], r"shape \[3, 0\], expected \[3, any\]"),
        ("frequency", "overall", nan_at_first, "1 numbers of 18 that are not finite"),
        ("frequency", "overall", lambda t: t - 1, "expected at least 0"),
        ("frequency", "overall", None, "has no tensor overall"),
        ("frequency", "by_domain", lambda t: t[..., 1:], r"expected \[any, 3, 6\]"),
        ("similarity", "centred", lambda t: t.flatten(), r"shape \[108\], expected \[3, 6, 6\]"),
        ("similarity", "centred", nan_at_first, "not finite"),
        ("mismatch", "mismatch", lambda t: t[0], r"shape \[6, 6\], expected \[3, 6, 6\]"),
        ("mismatch", "mismatch", lambda t: t - 9, "expected at least 0"),
        ("mismatch", "norm", lambda t: torch.ones(2, 6), r"shape \[2, 6\], expected \[3, 6\]"),
        ("sensitivity", "sensitivity", nan_at_first, "not finite"),
        ("sensitivity", "quadratic", lambda t: torch.full((3,), float("inf")), "not finite"),
        ("transitions", "transitions", lambda t: t[1:], r"shape \[1, 6, 6\], expected \[2, 6, 6\]"),
        ("together", "late", None, "has no tensor late"),
        ("together", "late", lambda t: t[:1], r"shape \[1\], expected \[3\]"),
        ("together", "factors", lambda t: t[:1], r"shape \[1\], expected \[2\]"),
        ("together", "factors", lambda t: 0 * t, "says that stand-ins cost nothing"),
    ],
)
def test_tables_that_are_no_measurements_are_refused_with_section_and_tensor(
    artifact, section, name, change, told
):
    """Whoever plans reads all of them, so that a file is told before its homes end with it."""
    whole = {
        "mismatch": artifact.tensors("mismatch") | {"norm": torch.ones(3, 6)},
        "sensitivity": {"sensitivity": torch.ones(3), "quadratic": torch.ones(3)},
        "together": {"factors": torch.tensor([1.2, 0.3]), "late": torch.ones(3)},
    }
    tensors = whole.get(section) or artifact.tensors(section)
    if name == "sensitivity":
        del tensors["quadratic"]  # which is read in its place
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name]).contiguous()
    for other in whole.keys() - {section}:
        write_section(artifact.folder, other, whole[other], model_hash=HASH)
    meta = artifact.meta(section) if artifact.has(section) else {}
    write_section(artifact.folder, section, tensors, meta, model_hash=HASH)
    with pytest.raises(ArtifactError, match=told) as refused:
        broken = Artifact.open(artifact.folder)
        read_traits(broken), read_losses(broken)
    assert section in str(refused.value) and name in str(refused.value)
    assert "edge-runtime calibrate" in str(refused.value)


@pytest.mark.parametrize(
    "layers", [[0, 2, 4], [1, 3], [1, 3, 3], [4, 3, 1], [True, 3, 4], [], "1, 3, 4", None]
)
def test_tables_of_other_layers_than_the_models_are_refused(artifact, layers):
    write_section(
        artifact.folder, "frequency", artifact.tensors("frequency"), {"layers": layers}, model_hash=HASH
    )
    with pytest.raises(ArtifactError, match="section frequency d"):
        read_traits(Artifact.open(artifact.folder), layers=LAYERS, experts=6)


def test_tables_of_other_experts_than_the_models_are_refused(artifact):
    with pytest.raises(ArtifactError, match=r"tensor overall .* shape \[3, 6\], expected \[3, 8\]"):
        read_traits(artifact, layers=LAYERS, experts=8)
