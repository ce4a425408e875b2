"""Looks for what would keep this machine from serving, and says how to mend it. Changes nothing."""

import os
import platform
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import psutil

from edge_runtime.clock import Clock
from edge_runtime.config import SHAPE_VARIABLE, resolve_topology_path
from edge_runtime.errors import EXIT_CLUSTER, EXIT_USER, ConfigError, EdgeError
from edge_runtime.log import check_levels
from kernels.settings import COMPILE_VARIABLE, GRAPHS_VARIABLE, SettingError, checked_threads, is_on
from topology.cluster import Cluster, Node, is_loopback, split_address
from topology.errors import TopologyError
from topology.files import read_cluster

REACH_S = 2.0


class Finding(NamedTuple):
    """One thing looked at. exit_code: what the command ends with if it is not well."""

    what: str
    is_well: bool
    detail: str
    exit_code: int = EXIT_USER


def examine(topology: Path | None, clock: Clock) -> Iterator[Finding]:
    """All findings, each as soon as it is known; without a topology file only those about this machine."""
    yield Finding(
        "python", sys.version_info >= (3, 11), f"{platform.python_version()}; 3.11 or newer is needed"
    )
    packages = ("torch", "pyzmq", "msgpack", "tokenizers", "safetensors", "numpy")
    yield Finding("packages", True, ", ".join(f"{name} {version(name)}" for name in packages))
    memory = psutil.virtual_memory()
    yield Finding(
        "memory", True, f"{memory.available / 2**20:.0f} MiB available of {memory.total / 2**20:.0f} MiB"
    )
    yield _environment()
    yield _kernels()
    yield from _gpu()
    try:
        path = resolve_topology_path(topology)
    except ConfigError as error:
        yield Finding(
            "topology", topology is None, f"not looked at: {error}" if topology is None else str(error)
        )
        return
    try:
        cluster = read_cluster(path, needs_model=False)
    except TopologyError as error:
        yield Finding("topology", False, str(error))
        return
    yield Finding("topology", True, f"{path}: cluster {cluster.name}, {len(cluster.nodes)} nodes")
    yield from _nodes(cluster)
    yield _model(cluster)
    yield from _peers(cluster, clock)


def _environment() -> Finding:
    """The variables that change what commands do: README lists them."""
    from kernels import backends

    faults = []
    checks: tuple[Callable[[], object], ...] = (
        lambda: backends.choose(os.environ),
        check_levels,
        *(partial(is_on, os.environ, name) for name in (GRAPHS_VARIABLE, COMPILE_VARIABLE, SHAPE_VARIABLE)),
    )
    for check in checks:
        try:
            check()
        except (SettingError, ConfigError) as error:
            faults.append(str(error))
    found = ", ".join(
        f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("EDGE_")
    )
    return Finding("environment", not faults, "; ".join(faults) or found or "no variable EDGE_... is set")


def _nodes(cluster: Cluster) -> Iterator[Finding]:
    """Nodes of the file that are this machine, where it cannot be what the file says, or has a GPU that it names."""
    from kernels import backends

    for node in filter(_is_here, cluster.nodes):
        faults = []
        checks: tuple[Callable[[], object], ...] = (
            partial(backends.check_device, node.device),
            partial(checked_threads, node.threads),
        )
        for check in checks:
            try:
                check()
            except SettingError as error:
                faults.append(str(error))
        if faults or node.device != "cpu":
            yield Finding(f"node {node.name}", not faults, "; ".join(faults) or f"computes on {node.device}")


def _is_here(node: Node) -> bool:
    """Whether a node's address is one of this machine's."""
    if is_loopback(node.address):
        return True
    own = {each.address.partition("%")[0] for found in psutil.net_if_addrs().values() for each in found}
    try:
        named = {str(found[4][0]) for found in socket.getaddrinfo(split_address(node.address)[0], None)}
    except OSError:
        return False
    return not named.isdisjoint(own)


def _kernels() -> Finding:
    import torch

    from kernels import backends, ops

    try:
        found = backends.describe()
    except SettingError:
        return Finding("kernels", False, "not looked at: the environment asks for others than there are")
    path = f"{found['backend']} path" + (f", {found['isa']}" if found["isa"] else "")
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 40, generator=generator), torch.randn(21, 40, generator=generator)
    error = (ops.linear(x, ops.pack_linear(weight)) - x @ weight.T).abs().max().item()
    if error > 1e-4:
        return Finding("kernels", False, f"{path}: self-test is off by {error:.2e}; reinstall edge-runtime")
    why = ""
    if found["native_error"]:
        how = "" if found["compiler"] else "install a C++ compiler, then "
        why = f"; the native kernels are missing ({found['native_error']}), answers come slower: {how}run `make install`"
    found_gpus = "; ".join(found["gpus"]) or f"none that torch {torch.__version__} can use"
    return Finding("kernels", True, f"{path}, self-test off by {error:.1e}{why}; GPU: {found_gpus}")


def _gpu() -> Iterator[Finding]:
    """Whether the first GPU computes; nothing where there is none."""
    import torch

    from kernels import backends

    if not backends.gpus():
        return
    try:
        from kernels import gpu

        generator = torch.Generator().manual_seed(0)
        x, weight = (torch.randn(n, 64, generator=generator).cuda() for n in (3, 32))
        error = (gpu.linear(x, gpu.pack_linear(weight)) - x @ weight.T).abs().max().item()
    except Exception as fault:  # noqa: BLE001 - drivers and compilers fail in ways of their own
        first_line = str(fault).partition("\n")[0]
        yield Finding("gpu", False, f'its self-test failed ({first_line}); nodes here need device = "cpu"')
        return
    yield Finding("gpu", error < 1e-3, f"self-test off by {error:.1e}")


def _model(cluster: Cluster) -> Finding:
    from edge_runtime.model.folder import open_whole
    from edge_runtime.model.footprint import footprint
    from edge_runtime.selector.learned import find_traits
    from edge_runtime.weights.locate import folder_of, located
    from topology.placement import plan_placement

    folder = folder_of(cluster)
    if folder is None:
        return Finding(
            "model", True, f"{cluster.model} is not on this machine: a node gets it from the cluster"
        )
    try:
        checkpoint, _ = open_whole(folder)
        parts = footprint(checkpoint, context_tokens=cluster.context_tokens)
        traits = find_traits(
            located(cluster, checkpoint),
            checkpoint.model_hash,
            layers=parts.moe_layers,
            experts=parts.experts_per_layer,
        )
        placement = plan_placement(cluster, parts, traits=traits)
    except (EdgeError, TopologyError, OSError) as error:
        return Finding("model", False, str(error))
    planned = sum(plan.planned_bytes for plan in placement.nodes)
    family = checkpoint.spec.family
    return Finding("model", True, f"{family} at {cluster.model}, placed on {planned / 2**20:.0f} MiB in all")


def _peers(cluster: Cluster, clock: Clock) -> Iterator[Finding]:
    from edge_runtime.protocol import Hello, Welcome
    from edge_runtime.transport.endpoint import Channel
    from edge_runtime.transport.keys import load_keys

    try:
        keys = load_keys(Path(cluster.keys), "client") if cluster.keys else None
    except ConfigError as error:
        yield Finding("keys", False, str(error))
        return
    addresses = {"coordinator": cluster.coordinator, **{node.name: node.address for node in cluster.nodes}}
    for name, address in addresses.items():
        host, port = split_address(address)
        try:
            socket.create_connection((host, port), timeout=REACH_S).close()
        except OSError as error:
            why = error.strerror or str(error)
            yield Finding(
                name, False, f"nobody answers at {address} ({why}); is its daemon running?", EXIT_CLUSTER
            )
            continue
        try:
            hello = Hello(node="client", role="client", cluster=cluster.name)
            with Channel(address, name=name, keys=keys, clock=clock) as channel:
                welcome = channel.request(hello, Welcome, REACH_S).message
            found = getattr(welcome, "node", "")
            is_it = "" if found == name else f", expected {name}; another cluster's port?"
            yield Finding(name, found == name, f"{address} answers as {found}{is_it}", EXIT_CLUSTER)
        except EdgeError as error:
            yield Finding(name, False, str(error), EXIT_CLUSTER)
