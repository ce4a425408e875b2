"""Changes emulated links of a running cluster: tells both ends of each, directly.

The daemons must have been started with `--shape`. What is said here is not itself held up by any link, so that a cut
can be healed.
"""

import math
import re
from collections.abc import Iterator, Sequence

from edge_runtime.errors import ClusterError, ConfigError, PeerError, Refusal
from edge_runtime.protocol import LinkShaped, ShapeLink
from edge_runtime.transport.endpoint import Channel
from edge_runtime.transport.keys import Keys
from topology.cluster import Cluster
from topology.units import format_duration, format_rate

ALL = "all"
COORDINATOR = "coordinator"
ANSWER_S = 5.0
_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")


def parse_share(text: str) -> float:
    """`"1%"` to 0.01. ValueError unless it is at least 0 and below 100 %."""
    match = _PERCENT.fullmatch(text)
    if match is None or float(match[1]) >= 100:
        raise ValueError(f'"{text}" is not a share: write a number below 100 and %, as in "1%"')
    return float(match[1]) / 100


def pairs_of(cluster: Cluster, a: str, b: str, *, one_way: bool) -> list[tuple[str, str]]:
    """The directions between `a` and `b`, or between `a` and `all` others, as (source, target)."""
    names = (COORDINATOR, *cluster.node_names)
    for name in (a, b):
        if name not in names and (name, b) != (ALL, name):
            raise ConfigError(f"no end of a link is called {name}; there are {', '.join(names)}")
    others = [name for name in names if name != a] if b == ALL else [b]
    if a in others:
        raise ConfigError(f"a link has two ends; {a} was named twice")
    forth = [(a, other) for other in others]
    return (
        forth
        if one_way
        else [pair for source, target in forth for pair in ((source, target), (target, source))]
    )


def change_links(
    cluster: Cluster, keys: Keys | None, pairs: Sequence[tuple[str, str]], change: ShapeLink
) -> Iterator[LinkShaped]:
    """Tell both ends of every direction, and say what it is like now. `change` has the values; its names do not count.

    ClusterError names the end that cannot be reached or does not shape; what was told before stays.
    """
    addresses = {COORDINATOR: cluster.coordinator, **{node.name: node.address for node in cluster.nodes}}
    fields = {name: getattr(change, name) for name in ShapeLink.__struct_fields__}
    channels: dict[str, Channel] = {}
    try:
        for source, target in pairs:
            message = ShapeLink(**(fields | {"source": source, "target": target}))
            for name in (target, source):
                if name not in channels:
                    channels[name] = Channel(addresses[name], name=name, keys=keys)
                shaped = _tell(channels[name], message)
            yield shaped
    finally:
        for channel in channels.values():
            channel.close()


def _tell(channel: Channel, message: ShapeLink) -> LinkShaped:
    try:
        answer = channel.request(message, LinkShaped, ANSWER_S).message
    except Refusal as refusal:
        raise ClusterError(
            f"{channel.name} does not shape its links; start the cluster with: edge-runtime up --shape"
        ) from refusal
    except PeerError as error:
        raise ClusterError(
            f"the link from {message.source} to {message.target} is not changed: {error}"
        ) from error
    assert isinstance(answer, LinkShaped)
    return answer


def describe(link: LinkShaped) -> str:
    """`n1 -> n5: 10 ms one way, 10 Mbit/s, up to 2 ms of jitter, 1 % lost, cut for 9.8 s`."""
    parts = [
        f"{format_duration(link.delay_s)} one way" if link.delay_s else "no delay",
        format_rate(link.rate_bps) if link.rate_bps else "any rate",
    ]
    if link.jitter_s:
        parts.append(f"up to {format_duration(link.jitter_s)} of jitter")
    if link.loss:
        parts.append(f"{100 * link.loss:g} % lost")
    if link.is_cut:
        parts.append(
            "cut until healed" if link.cut_s is None else f"cut for {math.ceil(link.cut_s * 10) / 10:g} s"
        )
    return f"{link.source} -> {link.target}: {', '.join(parts)}"
