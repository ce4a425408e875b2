"""The cluster as its topology file states it: machines, links and limits. Values only; `files.py` reads them.

Knows no model: what the machines will hold is `placement.py`'s to say.
"""

import difflib
import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from topology.errors import UnknownNode
from topology.ids import ExpertId

PREFILL, DECODE, EXPERTS = "prefill", "decode", "experts"
ROLES = (PREFILL, DECODE, EXPERTS)
DEVICES = ("cpu", "cuda")
"""What a node may compute on. Of several GPUs `cuda:1` is the second; torch calls those of AMD so too."""
WEIGHT_FORMATS = ("as_stored", "bfloat16", "bfloat16x2", "float16", "float32", "int8", "int4", "mxfp4")
PLANS = ("home", "solo", "stages", "auto")
"""How requests may live: every decode node a home of all layers with remote experts; one that holds everything; layers
split over several homes; or whatever is predicted to be fastest."""

PLACEMENTS = ("spread", "similarity", "popularity", "eplb", "latency", "random")
"""How experts are placed: see `rules.py`."""
SELECTORS = ("live", "paper", "exact")
"""Who stands in for an expert that is elsewhere, for requests that allow it: the best by the token's own gate scores,
or the one that calibration found least different; or nobody."""

MOST_STAGES = 8  # each costs a hop: beyond a few there is nothing to win
ROUTING = ("auto", "eldr", "pressure", "jsq", "round_robin", "random", "power_of_two")
"""Who chooses the decode home of a request. `eldr`: the experts its prompt used, then load; the others: load, or nothing.
`auto`: `eldr` where there is a calibration to go by and machines that prefill for others, else `pressure`."""

GATES = ("proxy", "linear")
"""What chooses sub-experts: a few neurons of each, or a gate with a row for each, tuned by calibration."""

MIB = 2**20
GPU_RESERVE_BYTES = 600 * MIB
"""What CUDA and the compiled kernels take of a GPU's memory beside all that a node puts there. Rounded up from what drivers
are known to take; not measured here."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine's daemon."""

    name: str
    """Unique in the cluster."""
    address: str
    """`host:port` where it listens and where its peers find it."""
    memory_bytes: int
    """Everything its process may have resident where it computes: libraries, weights, KV, workspace."""
    roles: frozenset[str] = frozenset(ROLES)
    """What it may do, of `ROLES`."""
    device: str = "cpu"
    """Where it computes: one of `DEVICES`, or `cuda:N`."""
    weight_format: str = "as_stored"
    """How it keeps its routed experts, of `WEIGHT_FORMATS`."""
    trunk_format: str = "as_stored"
    """How it keeps attention, dense MLPs and head, of `WEIGHT_FORMATS`."""
    threads: int = 1
    """Threads of its arithmetic."""
    cpu_share: float | None = None
    """Processor time that `up --limits` lets its process have, seconds per second; None: all it can get."""
    memory_bytes_per_s: float | None = None
    """Measured memory bandwidth in bytes per second, if known."""
    flops: float | None = None
    """Measured speed in floating-point operations per second, if known."""

    @property
    def host(self) -> str:
        return split_address(self.address)[0]

    @property
    def port(self) -> int:
        return split_address(self.address)[1]

    @property
    def holds_trunk(self) -> bool:
        """Whether it runs attention, and so needs the trunk and KV: decode and prefill nodes do."""
        return bool(self.roles & {DECODE, PREFILL})

    @property
    def hosts_experts(self) -> bool:
        return EXPERTS in self.roles


@dataclass(frozen=True)
class Link:
    """What it takes to get from node `a` to node `b` or back; `*` stands for any node."""

    a: str
    b: str
    rtt_s: float = 0.001
    """Round-trip time of a small message, seconds."""
    bandwidth_bps: float = 1e9
    """Bits per second."""


@dataclass(frozen=True)
class Pin:
    """An expert that a person wants on a node. Copies elsewhere are still allowed."""

    expert: ExpertId
    node: str


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How requests find their machines: table [routing]."""

    policy: str = "auto"
    """Of `ROUTING`."""
    affinity: float = 0.5
    """How much more than the mean load a home may have for suiting a request fully, in mean loads."""
    tau: float | None = None
    """How far below the best match a home may lie, in units of cosine: 0 best match alone, 1 load alone. None: no limit, and
    match and load are weighed by `affinity`."""
    min_candidates: int = 1
    """Homes among which load decides, at least."""
    count_speed: bool = True
    """Load is weighed by how fast a home is, and requests that wait there count fourfold."""
    count_transfer: bool = True
    """The time to move KV to a home counts as load."""
    refit: bool = False
    """Follow what is asked: clusters are made anew from the latest requests, not from calibration alone."""
    lanes: bool = False
    """Homes of their own for requests that use few sub-experts, and for those that use many."""
    lane_share: float = 0.5
    """Share of the homes that the lane of few sub-experts has."""
    lane_window: int = 0
    """Tiers on each side of the border between the lanes that may use either; 0: an eighth of the full tier."""
    lane_ratio: float = 1.25
    """From this ratio of the lanes' pressures on they count as unequal."""
    lane_dwell_s: float = 2.0
    """Unequal for so long, the border moves a tier, seconds."""
    lane_freeze_s: float = 5.0
    """Once moved, it stays for so long, seconds."""

    def __str__(self) -> str:
        changed = [
            f"{field.name} {getattr(self, field.name)}"
            for field in fields(self)[1:]
            if getattr(self, field.name) != field.default
        ]
        return ", ".join([self.policy, *changed])


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A whole topology file."""

    name: str
    model: str
    """The model's folder, or `hub:org/name`."""
    nodes: tuple[Node, ...]
    """In the order of the file."""
    coordinator: str = "127.0.0.1:5550"
    """`host:port` of the coordinator."""
    links: tuple[Link, ...] = ()
    """The pairs that differ from `default_link`."""
    default_link: Link = Link("*", "*")
    memory_ratio: float = 2.0
    """Most copies of experts in the whole cluster, per distinct expert; 1.0 allows no replicas."""
    plan: str = "home"
    """Of `PLANS`: what the planner may choose from."""
    stages: int | None = None
    """With the plan `stages`, into how many stages layers are split; None for as many as is fastest."""
    placement: str = "spread"
    """Of `PLACEMENTS`: what decides which expert is where."""
    selector: str = "live"
    """Of `SELECTORS`: by what rule requests with a quality budget get along without an expert that is elsewhere."""
    drop: bool = False
    """The selector may leave out an expert that is elsewhere, where that loses less than a stand-in."""
    defer: bool = False
    """The selector may let what experts elsewhere give be added one layer late."""
    look_ahead: bool = True
    """It counts then that the next layer has to wait."""
    calibration: str | None = None
    """Folder of the calibration artifact; None for the one in the model's folder, if there is one."""
    sub_experts: bool = False
    """Experts lie as calibration split them, so that requests may ask for part of them."""
    gate: str = "proxy"
    """Of `GATES`: what chooses among sub-experts for requests that ask for part of them."""
    split_tiers: bool = False
    """A request's K is spread over layers by what each is measured to lose; else it is the same in each."""
    pins: tuple[Pin, ...] = ()
    """Experts that have to be on certain nodes, in the order of the file."""
    routing: Routing = Routing()
    """How requests find their machines."""
    keys: str | None = None
    """Folder of CURVE keys; None only where every address is loopback."""
    process_reserve_bytes: int = 350 * MIB
    """Kept free on every node for the interpreter and its libraries; on a GPU GPU_RESERVE_BYTES more."""
    kv_tokens: int = 16384
    """Tokens of KV wanted on every node that holds the trunk; less is taken where experts need the room."""
    max_batch_rows: int = 256
    """Token rows in one step, prefill and decode together."""
    max_requests: int = 16
    """Requests that one node runs at the same time."""
    context_tokens: int | None = None
    """Longest prompt plus answer; None for the model's own limit, which is never exceeded."""
    call_deadline_s: float = 10.0
    """How long a call to a peer's experts may take in all, seconds."""
    weights_rate_bps: float | None = None
    """How fast one process gives weights away to nodes that lack them, bits per second; None: as fast as it can."""
    heartbeat_s: float = 1.0
    """Seconds between two heartbeats."""
    lost_after_s: float = 5.0
    """Seconds of silence after which a node counts as lost."""
    source: str = ""
    """The file it was read from."""
    lines: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Of that file, where each key of [routing] stands: some can be judged only beside the model."""

    def at_routing(self, key: str) -> str:
        """Where a key of [routing] stands, as faults of the file begin."""
        line = f"line {self.lines[key]}, " if key in self.lines else ""
        return f"{self.source or self.name}, {line}[routing] {key}"

    @property
    def separates(self) -> bool:
        """Whether some machine computes prompts for others: it may prefill, and not decode."""
        return any(PREFILL in node.roles and DECODE not in node.roles for node in self.nodes)

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.nodes)

    def process_bytes(self, node: Node) -> int:
        """What of a node's memory is kept free of the model."""
        return self.process_reserve_bytes + (0 if node.device == "cpu" else GPU_RESERVE_BYTES)

    def link(self, a: str, b: str) -> Link:
        """The link between two nodes, in either order: their own, or the default one."""
        for link in self.links:
            if {link.a, link.b} == {a, b}:
                return link
        return Link(a, b, self.default_link.rtt_s, self.default_link.bandwidth_bps)


def find_node(cluster: Cluster, name: str) -> Node:
    """The node of that name; `UnknownNode` lists the names there are."""
    for node in cluster.nodes:
        if node.name == name:
            return node
    names = ", ".join(cluster.node_names)
    raise UnknownNode(
        f'no node is called "{name}"{did_you_mean(name, cluster.node_names)}; the nodes are {names}'
    )


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """` (did you mean "node"?)`, or nothing where no allowed word is near."""
    near = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.6)
    return f' (did you mean "{near[0]}"?)' if near else ""


def split_address(address: str) -> tuple[str, int]:
    """`"10.0.0.5:5551"` or `"[::1]:5551"` to host (without brackets) and port."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(address: str) -> bool:
    """Whether `host:port` can only be reached from its own machine; of names, only localhost is."""
    host, _ = split_address(address)
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
