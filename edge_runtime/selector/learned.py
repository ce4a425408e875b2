"""What calibration learned that placement and selector look at, read from an artifact into tables. Knows no cluster.

Groups are made here and nowhere else, so that planner and nodes mean the same ones.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_runtime.artifacts import Artifact, artifact_folder
from edge_runtime.errors import ArtifactError
from topology.cluster import Cluster
from topology.grouping import group_experts, quantile_thresholds
from topology.traits import ExpertTraits, Floats, shares

FREQUENCY, SIMILARITY, MISMATCH, SENSITIVITY, TRANSITIONS, TOGETHER = (
    "frequency",
    "similarity",
    "mismatch",
    "sensitivity",
    "transitions",
    "together",
)


SAFETY = 1.2
"""A budget is a promise, so stand-ins are taken for dearer than calibration found them. Demo model, validation text, budgets
of 0.7 and 3 %: without this the measured loss was 0.90 and 1.20 of what was spent."""
HUGE = 1e9  # of what was never measured: beyond every budget


@dataclass(frozen=True)
class Losses:
    """What a substitution costs, and what follows what. M MoE layers, E experts.

    layers       the model's layer of each row
    loss         [M, E, E] float32, relative loss of a token when column j stands in for row i at gate weight 1
    power        with what power of the gate weight a loss grows: 2 where the artifact says what squared deviations cost.
                 Taken linearly, from the slots that weigh least, losses come to a sixth of what heavy ones cost
    near         [M, E, E] bool, whether j is among the half of experts that cost least in place of i
    transitions  [M-1, E, E] float64, share of choices of an expert that are followed by each expert one layer on
    coherence    how far deviations of different layers point the same way, 0 to 1: of those a and b of a token, 2 * a * b
                 times this is lost beyond a * a + b * b. 1 where it was not measured: never too little
    left_out     [M, E] float64, the deviation of leaving an expert out at gate weight 1; None where it was not measured
    late         [M, E] float64, the same of adding what it gives one layer later; 0 in a last layer
    """

    layers: tuple[int, ...]
    loss: NDArray[np.float32]
    transitions: Floats
    near: NDArray[np.bool_]
    power: float = 1.0
    coherence: float = 0.0
    left_out: Floats | None = None
    late: Floats | None = None

    @classmethod
    def of(
        cls,
        layers: tuple[int, ...],
        loss: NDArray[np.float32],
        transitions: Floats,
        power: float = 1.0,
        coherence: float = 0.0,
        left_out: Floats | None = None,
        late: Floats | None = None,
    ) -> "Losses":
        """With `near` worked out."""
        return cls(layers, loss, transitions, nearest(loss), power, coherence, left_out, late)

    @property
    def drag_per_deviation(self) -> float:
        """Loss for each unit of deviation, and each unit that a row deviated in layers before."""
        return 2 * self.coherence if self.power == 2.0 else 0.0


def nearest(loss: NDArray[np.float32]) -> NDArray[np.bool_]:
    """[M, E, E] which half of the experts, and the row's own, cost least in place of each."""
    rank = np.argsort(np.argsort(loss, axis=2, kind="stable"), axis=2)
    found: NDArray[np.bool_] = rank <= loss.shape[2] // 2
    return found


def find_artifact(cluster: Cluster, model_hash: str) -> Artifact | None:
    """The artifact that a topology file names, else the one in the model's folder; None if there is none there."""
    if cluster.calibration is not None:
        return Artifact.open(cluster.calibration, model_hash=model_hash)
    beside = artifact_folder(cluster.model)
    return Artifact.open(beside, model_hash=model_hash) if beside.is_dir() else None


def find_traits(cluster: Cluster, model_hash: str) -> ExpertTraits | None:
    """What calibration found of the experts of a cluster's model; None where there is no artifact, or it lacks that."""
    artifact = find_artifact(cluster, model_hash)
    return read_traits(artifact) if artifact is not None else None


def read_traits(artifact: Artifact) -> ExpertTraits | None:
    """Frequencies and groups; None if the artifact lacks a section for them."""
    if not (artifact.has(FREQUENCY) and artifact.has(SIMILARITY)):
        return None
    counted = artifact.tensors(FREQUENCY)
    similarity = artifact.tensor(SIMILARITY, "centred").double().numpy()
    overall = shares(artifact.tensor(FREQUENCY, "overall").double().numpy())
    by_domain = counted.get("by_domain")
    _check_shape(artifact, SIMILARITY, similarity, (*overall.shape, overall.shape[1]))
    groups = group_experts(similarity, overall, thresholds=quantile_thresholds(similarity))
    clusters = None if by_domain is None else shares(by_domain.double().numpy())
    return ExpertTraits(layers_of(artifact), overall, similarity, groups, clusters)


def read_losses(artifact: Artifact) -> Losses | None:
    """What a selector needs beside the groups; None if the artifact lacks a section for it."""
    if not (artifact.has(MISMATCH) and artifact.has(SENSITIVITY)):
        return None
    mismatch = artifact.tensor(MISMATCH, "mismatch").float().numpy()
    squares = artifact.tensors(SENSITIVITY).get("quadratic")
    power = 1.0 if squares is None else 2.0
    sensitivity = (
        artifact.tensor(SENSITIVITY, "sensitivity" if squares is None else "quadratic").float().numpy()
    )
    num_rows, num_experts = mismatch.shape[:2]
    _check_shape(artifact, MISMATCH, mismatch, (num_rows, num_experts, num_experts))
    _check_shape(artifact, SENSITIVITY, sensitivity, (num_rows,))
    sensitivity = np.maximum(sensitivity, 0.0)
    coherence, late = (1.0 if power == 2.0 else 0.0), None
    if power == 2.0 and artifact.has(TOGETHER):
        found = artifact.tensors(TOGETHER)
        _check_shape(artifact, TOGETHER, found["late"].numpy(), (num_rows,))
        alone, together = found["factors"].double().tolist()
        sensitivity, coherence = sensitivity * alone * SAFETY, together / alone
        late = np.sqrt(np.maximum(found["late"].double().numpy(), 0.0))
    loss = sensitivity[:, None, None] * np.maximum(mismatch, 0.0) ** power
    loss[~np.isfinite(loss)] = np.inf  # a pair that was never measured costs more than any budget
    norm = artifact.tensors(MISMATCH).get("norm")
    left_out = None
    if norm is not None:
        lengths = np.nan_to_num(norm.double().numpy(), nan=HUGE, posinf=HUGE)
        left_out = sensitivity[:, None] ** (1 / power) * lengths
        late = None if late is None else late[:, None] * lengths
    if artifact.has(TRANSITIONS):
        counts = artifact.tensor(TRANSITIONS, "transitions").double().numpy()
        _check_shape(artifact, TRANSITIONS, counts, (num_rows - 1, num_experts, num_experts))
    else:
        counts = np.zeros((num_rows - 1, num_experts, num_experts))
    return Losses.of(
        layers_of(artifact),
        loss.astype(np.float32),
        shares(counts + 1.0),
        power,
        coherence,
        left_out,
        late if left_out is not None else None,
    )


def layers_of(artifact: Artifact) -> tuple[int, ...]:
    """The model's layers that the rows of every section stand for."""
    layers = artifact.meta(FREQUENCY).get("layers")
    if not isinstance(layers, list) or not all(isinstance(layer, int) for layer in layers):
        raise ArtifactError(
            f"calibration artifact {artifact.folder}: section {FREQUENCY} does not say which layers it describes; "
            "run `edge-runtime calibrate` again"
        )
    return tuple(layers)


def _check_shape(artifact: Artifact, section: str, found: NDArray, expected: tuple[int, ...]) -> None:
    if found.shape != expected:
        raise ArtifactError(
            f"calibration artifact {artifact.folder}: section {section} has the shape {list(found.shape)}, expected "
            f"{list(expected)}; run `edge-runtime calibrate` again"
        )
