"""What calibration learned that placement and selector look at, read from an artifact into tables. Knows no cluster.

Groups are made here and nowhere else, so that planner and nodes mean the same ones.
"""

from collections.abc import Sequence
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


def find_traits(
    cluster: Cluster, model_hash: str, *, layers: Sequence[int] | None = None, experts: int | None = None
) -> ExpertTraits | None:
    """What calibration found of the experts of a cluster's model; None where there is no artifact, or it lacks that."""
    artifact = find_artifact(cluster, model_hash)
    return read_traits(artifact, layers=layers, experts=experts) if artifact is not None else None


def read_traits(
    artifact: Artifact, *, layers: Sequence[int] | None = None, experts: int | None = None
) -> ExpertTraits | None:
    """Frequencies and groups; None if the artifact lacks a section for them.

    layers, experts  numbers of the model's MoE layers, and experts of each; None: whatever the artifact says
    """
    if not (artifact.has(FREQUENCY) and artifact.has(SIMILARITY)):
        return None
    described = layers_of(artifact, layers)
    overall = artifact.numbers(FREQUENCY, "overall", (len(described), experts), least=0.0)
    shape = overall.shape
    similarity = artifact.numbers(SIMILARITY, "centred", (*shape, shape[1]))
    clusters = None
    if "by_domain" in artifact.tensors(FREQUENCY):
        clusters = shares(artifact.numbers(FREQUENCY, "by_domain", (None, *shape), least=0.0))
    frequency = shares(overall)
    groups = group_experts(similarity, frequency, thresholds=quantile_thresholds(similarity))
    return ExpertTraits(described, frequency, similarity, groups, clusters)


def read_losses(artifact: Artifact) -> Losses | None:
    """What a selector needs beside the groups; None if the artifact lacks a section for it."""
    if not (artifact.has(MISMATCH) and artifact.has(SENSITIVITY)):
        return None
    layers = layers_of(artifact)
    num_rows, num_experts = len(layers), int(artifact.tensor(FREQUENCY, "overall").shape[-1])
    pairs = (num_experts, num_experts)
    mismatch = artifact.numbers(
        MISMATCH, "mismatch", (num_rows, *pairs), least=0.0, may_be_unknown=True
    ).astype(np.float32)
    power = 2.0 if "quadratic" in artifact.tensors(SENSITIVITY) else 1.0
    name = "quadratic" if power == 2.0 else "sensitivity"
    sensitivity = np.maximum(artifact.numbers(SENSITIVITY, name, (num_rows,)), 0.0).astype(np.float32)
    coherence, late = (1.0 if power == 2.0 else 0.0), None
    if power == 2.0 and artifact.has(TOGETHER):
        late = np.sqrt(np.maximum(artifact.numbers(TOGETHER, "late", (num_rows,)), 0.0))
        alone, together = artifact.numbers(TOGETHER, "factors", (2,), least=0.0).tolist()
        if not alone:
            raise ArtifactError(
                f"calibration artifact {artifact.folder}: tensor factors of section {TOGETHER} says that stand-ins cost "
                "nothing, expected more than 0; run `edge-runtime calibrate` again"
            )
        sensitivity, coherence = sensitivity * alone * SAFETY, together / alone
    loss = sensitivity[:, None, None] * mismatch**power
    loss[~np.isfinite(loss)] = np.inf  # a pair that was never measured costs more than any budget
    left_out = None
    if "norm" in artifact.tensors(MISMATCH):
        norm = artifact.numbers(MISMATCH, "norm", (num_rows, num_experts), least=0.0, may_be_unknown=True)
        lengths = np.nan_to_num(norm, nan=HUGE, posinf=HUGE)
        left_out = sensitivity[:, None].astype(np.float64) ** (1 / power) * lengths
        late = None if late is None else late[:, None] * lengths
    counts = np.zeros((num_rows - 1, *pairs))
    if artifact.has(TRANSITIONS):
        counts = artifact.numbers(TRANSITIONS, "transitions", (num_rows - 1, *pairs), least=0.0)
    return Losses.of(
        layers,
        loss.astype(np.float32),
        shares(counts + 1.0),
        power,
        coherence,
        left_out,
        late if left_out is not None else None,
    )


def layers_of(artifact: Artifact, expected: Sequence[int] | None = None) -> tuple[int, ...]:
    """The model's layers that the rows of every section stand for; ArtifactError where they are not those expected."""
    layers = artifact.meta(FREQUENCY).get("layers")
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise ArtifactError(
            f"calibration artifact {artifact.folder}: section {FREQUENCY} does not say which layers it describes; "
            "run `edge-runtime calibrate` again"
        )
    if not layers or layers != sorted(set(layers)) or (expected is not None and layers != list(expected)):
        told = "ascending numbers" if expected is None else str(list(expected))
        raise ArtifactError(
            f"calibration artifact {artifact.folder}: section {FREQUENCY} describes the layers {layers}, expected {told}; "
            "run `edge-runtime calibrate` again"
        )
    return tuple(layers)
