"""Finds what calibration learned for a cluster and gives it to those who place and route. Reads files; decides nothing."""

from typing import NamedTuple

from edge_runtime.coordinator.routes import Routes
from edge_runtime.elastic.sub_experts import gate_neurons_of, read_elasticity
from edge_runtime.errors import ArtifactError
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.footprint import footprint
from edge_runtime.routing.fit import SECTION, SignatureFit, read_fit
from edge_runtime.selector.learned import find_artifact, read_losses, read_traits
from topology.cluster import Cluster
from topology.costs import ModelFootprint
from topology.traits import ExpertTraits


def sizes_of(cluster: Cluster, checkpoint: Checkpoint) -> ModelFootprint:
    """What the parts of a cluster's model take, what homes choose among sub-experts with included."""
    artifact = find_artifact(cluster, checkpoint.model_hash) if cluster.sub_experts else None
    is_linear = artifact is not None and cluster.gate == "linear"
    return footprint(
        checkpoint,
        context_tokens=cluster.context_tokens,
        gate_neurons=0 if is_linear else gate_neurons_of(artifact),
        gate_rows=artifact.whole_number("partition", "num_parts")
        if is_linear and artifact is not None
        else 0,
    )


class Learned(NamedTuple):
    """What placement knows of the experts, None without calibration, and who chooses homes."""

    traits: ExpertTraits | None
    routes: Routes


def find_learned(cluster: Cluster, sizes: ModelFootprint, model_hash: str, *, seed: int = 0) -> Learned:
    """Traits and router of a cluster. ArtifactError for a damaged artifact, or a policy that needs one that is not there.

    Also for what only selectors read: a file whose homes would end with that is told before it is started.
    """
    artifact = find_artifact(cluster, model_hash)
    fit: SignatureFit | None = None
    if artifact is not None and artifact.has(SECTION):
        tensors = {name: tensor.numpy() for name, tensor in artifact.tensors(SECTION).items()}
        recorded = artifact.tensors("requests") if artifact.has("requests") else {}
        counts = recorded.get("decode_counts")
        try:
            fit = read_fit(
                tensors,
                artifact.meta(SECTION),
                layers=len(sizes.moe_layers),
                experts=sizes.experts_per_layer,
                decode_counts=counts.numpy() if counts is not None else None,
            )
        except ArtifactError as error:
            raise ArtifactError(f"calibration artifact {artifact.folder}: {error}") from error
    traits = None
    if artifact is not None:
        traits = read_traits(artifact, layers=sizes.moe_layers, experts=sizes.experts_per_layer)
        if traits is not None:
            read_losses(artifact)
    elasticity = read_elasticity(artifact, sizes.top_k) if cluster.sub_experts else None
    return Learned(traits, Routes(cluster, sizes, fit, seed=seed, elasticity=elasticity))
