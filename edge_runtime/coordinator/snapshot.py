"""What a coordinator keeps on disk so that the next one goes on where it was: the file that was applied, and its placement. Pure.

Who is there, what they hold and which answers run, nodes tell themselves. One that cannot be read counts as none.
"""

from collections.abc import Mapping

import msgspec

from edge_runtime.coordinator.deploy import Plan, refuse_unchangeable
from edge_runtime.coordinator.epochs import Epochs, Outcome
from topology.cluster import Cluster
from topology.errors import TopologyError
from topology.placement import Placement

FORMAT = 1


class Snapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One moment of a cluster.

    file_hash  of the topology file with which the coordinator was started, as it was then
    newest     epoch: no later one was used
    requests   by home, as the placement's planner counts them; see `traffic_book.py`
    """

    format: int
    model_hash: str
    file_hash: str
    cluster: Cluster
    placement: Placement
    newest: int
    outcomes: list[Outcome]
    requests: dict[str, int] = {}


def snapshot_of(
    epochs: Epochs, model_hash: str, file_hash: str, requests: Mapping[str, int] | None = None
) -> Snapshot:
    """What is worth keeping of it now."""
    return Snapshot(
        format=FORMAT,
        model_hash=model_hash,
        file_hash=file_hash,
        cluster=epochs.cluster,
        placement=epochs.placement,
        newest=epochs.newest,
        outcomes=list(epochs.outcomes),
        requests=dict(requests or {}),
    )


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """As JSON, so that a person can read it."""
    return msgspec.json.encode(snapshot)


def decode_snapshot(content: bytes) -> Snapshot | None:
    """None for what is no snapshot of this version."""
    try:
        found = msgspec.json.decode(content, type=Snapshot)
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError):
        return None
    return found if found.format == FORMAT else None


def plan_to_go_on_with(
    snapshot: Snapshot | None,
    cluster: Cluster,
    model_hash: str,
    file_hash: str,
    context_tokens: int,
) -> tuple[Plan | None, str]:
    """The plan that a new coordinator of `cluster` goes on with, None to begin with the file itself; and why, for the log.

    context_tokens  that the cluster can have at most

    Whoever edits the file between two coordinators wants the edit: then the file counts.
    """
    if snapshot is None:
        return None, ""
    if snapshot.model_hash != model_hash:
        return None, f"epoch {snapshot.placement.epoch} was of another model; the file counts"
    if snapshot.file_hash != file_hash:
        return None, f"{cluster.source} was edited since epoch {snapshot.placement.epoch}; the file counts"
    try:
        refuse_unchangeable(cluster, snapshot.cluster, context_tokens)
    except TopologyError as error:
        return None, f"epoch {snapshot.placement.epoch} does not fit the file, which counts: {error}"
    plan = Plan(snapshot.cluster, snapshot.placement)
    return plan, f"going on with epoch {snapshot.placement.epoch} of {snapshot.cluster.source}"
