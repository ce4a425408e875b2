"""Finds the model for one process: its own folder, the hub's cache, or what the coordinator lets it fetch."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from edge_runtime.clock import Clock
from edge_runtime.errors import PeerError
from edge_runtime.log import Reminder
from edge_runtime.model.checkpoint import Checkpoint, Known
from edge_runtime.model.folder import open_whole
from edge_runtime.protocol import Hello
from edge_runtime.transport.endpoint import Channel
from edge_runtime.transport.keys import Keys
from edge_runtime.weights import hub
from edge_runtime.weights.fetch import COORDINATOR, Address, Fetcher, Link, ask_manifest
from edge_runtime.weights.manifest import head_chunks
from edge_runtime.weights.stores import CacheFolder, caches_folder
from topology.cluster import Cluster, Node

log = logging.getLogger(__name__)

GREET_S = 2.0  # after which it is said that the coordinator is waited for

Say = Callable[[str], None]


def folder_of(cluster: Cluster) -> Path | None:
    """The model's folder on this machine, None if it has none. Asks nobody."""
    if (model_id := hub.model_id(cluster.model)) is not None:
        return hub.find_model(model_id)
    folder = Path(cluster.model)
    try:
        is_there = (folder / "config.json").exists() or any(folder.glob("*.safetensors"))
    except OSError:
        is_there = True  # and cannot be looked into, which whoever opens it will say
    return folder if is_there else None


def whole_folder(cluster: Cluster, say: Say) -> Path:
    """The model's folder, fetched from the hub first where the file names one of its ids."""
    model_id = hub.model_id(cluster.model)
    return Path(cluster.model) if model_id is None else hub.fetch_model(model_id, say)


def open_model(cluster: Cluster, say: Say) -> Checkpoint:
    """The whole model."""
    return Checkpoint.open(whole_folder(cluster, say))


def check_model(cluster: Cluster, say: Say) -> Checkpoint:
    """The whole model, once it is known to have a tokenizer that goes with it: what nodes would end with is said now."""
    checkpoint, _ = open_whole(whole_folder(cluster, say))
    return checkpoint


def located(cluster: Cluster, checkpoint: Checkpoint) -> Cluster:
    """The cluster with the folder in which its model lies on this machine."""
    return replace(cluster, model=str(checkpoint.folder))


def model_for_node(
    cluster: Cluster, node: Node, keys: Keys | None, clock: Clock
) -> tuple[Checkpoint, CacheFolder | None]:
    """The model as this node can read it; with a cache, where its folder is not on this machine.

    Without a folder it waits for the coordinator, however long that takes, and fetches config, tokenizer and headers.
    """
    folder = folder_of(cluster)
    if folder is not None:
        return Checkpoint.open(folder), None
    hello = Hello(node=node.name, cluster=cluster.name, role="loader")
    channel = Channel(cluster.coordinator, name=COORDINATOR, keys=keys, clock=clock)
    with channel:
        link = Link(channel, hello)
        log.info("there is no model at %s; its files come from the cluster", cluster.model)
        reminder = Reminder(clock.now())
        while True:
            try:
                link.greet(GREET_S)
                manifest = ask_manifest(link)
                break
            except PeerError as error:
                if reminder.is_due(now := clock.now(), str(error)):
                    log.info("waiting for the coordinator, %.0f s: %s", now - reminder.began_s, error)
    cache = CacheFolder(caches_folder(), manifest)
    fetcher = fetcher_for(cluster, hello, cache, keys, clock)
    try:
        fetcher.fetch(head_chunks(manifest), lambda done, total, what: None)
    finally:
        fetcher.close()
    return Checkpoint.open(cache.folder, Known(manifest.model_hash, manifest.tied_head, cache.is_here)), cache


def fetcher_for(
    cluster: Cluster,
    identity: Hello,
    cache: CacheFolder,
    keys: Keys | None,
    clock: Clock,
    is_wanted: Callable[[], bool] = lambda: True,
) -> Fetcher:
    """One that asks every node of the file, and the coordinator."""
    peers = [
        Address(peer.name, peer.address, cluster.link(identity.node, peer.name).bandwidth_bps)
        for peer in cluster.nodes
    ]
    return Fetcher(
        cache,
        identity,
        Address(COORDINATOR, cluster.coordinator),
        peers,
        keys=keys,
        clock=clock,
        is_wanted=is_wanted,
    )
