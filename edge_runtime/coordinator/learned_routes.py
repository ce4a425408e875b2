"""Finds what calibration learned for a cluster and gives it to those who place and route. Reads files; decides nothing."""

from typing import NamedTuple

from edge_runtime.coordinator.routes import Routes
from edge_runtime.elastic.sub_experts import read_elasticity
from edge_runtime.routing.fit import SECTION, SignatureFit, read_fit
from edge_runtime.selector.learned import find_artifact, read_traits
from topology.cluster import Cluster
from topology.costs import ModelFootprint
from topology.traits import ExpertTraits


class Learned(NamedTuple):
    """What placement knows of the experts, None without calibration, and who chooses homes."""

    traits: ExpertTraits | None
    routes: Routes


def find_learned(cluster: Cluster, footprint: ModelFootprint, model_hash: str, *, seed: int = 0) -> Learned:
    """Traits and router of a cluster. ArtifactError for a damaged artifact, or a policy that needs one that is not there."""
    artifact = find_artifact(cluster, model_hash)
    fit: SignatureFit | None = None
    if artifact is not None and artifact.has(SECTION):
        tensors = {name: tensor.numpy() for name, tensor in artifact.tensors(SECTION).items()}
        recorded = artifact.tensors("requests") if artifact.has("requests") else {}
        counts = recorded.get("decode_counts")
        fit = read_fit(
            tensors,
            artifact.meta(SECTION),
            layers=len(footprint.moe_layers),
            experts=footprint.experts_per_layer,
            decode_counts=counts.numpy() if counts is not None else None,
        )
    traits = read_traits(artifact) if artifact is not None else None
    elasticity = read_elasticity(artifact, footprint.top_k) if cluster.sub_experts else None
    return Learned(traits, Routes(cluster, footprint, fit, seed=seed, elasticity=elasticity))
