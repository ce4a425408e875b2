"""Turns a Deploy message into what a node runs: experts, trunk, KV pages and an engine. Runs in a thread of its own.

Knows the model folder and the numbers of the message; talks to nobody.
"""

import hashlib
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch

from edge_runtime.cache.block_pool import BlockPool
from edge_runtime.cache.block_store import BlockStore
from edge_runtime.cache.pages import KVPages
from edge_runtime.cache.signatures import SignatureCache
from edge_runtime.clock import Clock, ThreadClock
from edge_runtime.elastic.gates import ProxyGates, TierGates
from edge_runtime.elastic.linear_gate import LinearGates, with_linear_gate
from edge_runtime.elastic.sub_experts import SubExperts, read_sub_experts
from edge_runtime.elastic.tiers import Elasticity
from edge_runtime.engine.dropped import DroppedMass
from edge_runtime.engine.engine import Engine, Output
from edge_runtime.engine.later_stage import LaterStage
from edge_runtime.engine.pipeline import PipelineEngine
from edge_runtime.engine.quality import QualityBooks
from edge_runtime.engine.request_table import RequestTable
from edge_runtime.engine.runner import Runner
from edge_runtime.engine.scheduler import Scheduler, SchedulerSettings
from edge_runtime.engine.stage_step import StageLimits
from edge_runtime.errors import ArtifactError, EdgeError, Refusal, UserError, Whose
from edge_runtime.model.architectures.table import Part
from edge_runtime.model.build import add_experts, empty_store, load_trunk, trunk_names
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.encoder_decoder import decoder_of
from edge_runtime.model.footprint import footprint
from edge_runtime.model.layers import Trunk
from edge_runtime.model.moe import ExpertStore
from edge_runtime.model.sampling import Sampler
from edge_runtime.model.spec import ModelSpec
from edge_runtime.model.tokenizer import Tokenizer
from edge_runtime.node.peer_link import PeerLink
from edge_runtime.node.remote import PlacedExperts
from edge_runtime.node.resident import available_bytes, resident_bytes
from edge_runtime.node.stage_links import NextStages, StageLink, links_to
from edge_runtime.node.stage_service import StagePlace
from edge_runtime.node.trial import send_seconds, try_experts, try_home
from edge_runtime.protocol import Deploy, Hello, PeerAddress, Share
from edge_runtime.selector.home import HomeSelector
from edge_runtime.selector.learned import Losses, find_artifact, read_losses, read_traits
from edge_runtime.transport.keys import Keys
from kernels import backends
from kernels.replay import recorder
from topology.cluster import Cluster, Node
from topology.grouping import Groups
from topology.ids import ExpertId
from topology.speeds import LinkSpeed, NodeSpeed
from topology.step_time import WIRE_ITEM_BYTES
from topology.units import in_one_unit

Progress = Callable[[int, int, str], None]
Fetch = Callable[[Sequence[Part], Progress], None]

GREET_S = 1.0  # how long a change of placement waits for its peers before the first step


class ShareSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the coordinator sets for the engine and the loading of a node."""

    context_tokens: int
    """Longest prompt plus answer."""
    max_batch_rows: int
    """Rows of a step at most."""
    max_requests: int
    """Requests that run at once at most."""
    call_deadline_s: float
    """How long a call to peers may take in all."""
    selector: str = "live"
    """By what rule requests that may spend quality get along without an expert that is elsewhere."""
    drop: bool = False
    """Whether such requests may leave one out, where that loses less."""
    defer: bool = False
    """Whether its output may be added one layer late for them."""
    look_ahead: bool = True
    """Whether it counts then that the next layer has to wait."""
    counts_experts: bool = False
    """Whether prompts' choices of experts are counted, for a router that asks for them."""
    weight_format: str = "as_stored"
    """How routed experts are kept."""
    trunk_format: str = "as_stored"
    """How attention, dense MLPs and head are kept."""
    planned_bytes: int = 0
    """What the plan says this process will have resident."""


@dataclass(frozen=True)
class Learned:
    """What calibration found of the model, and what the topology file says of this node's links to its peers."""

    groups: Groups
    losses: Losses
    links: Mapping[str, LinkSpeed]


@dataclass
class LoadedShare:
    """A node's share in memory.

    engine, runner, experts, trunk  None on a node without trunk; engine also on one that runs a later stage
    later   of a group of several stages, at the first: the way to the others
    place   at a later one: what takes steps of the stage before
    speed   what was measured with it, None where that could not be
    peers   where every node of the placement listens; stages: of them, those of its group; first_layers: of each of these
    Shares of two placements hold what they have in common once. Where a change leaves the engine as it is, both have
    the same engine, and only `experts` differs: see `switch_to`. Where it does not, the new one's pages are touched when
    the old one's have been given back, and no step by the old share can follow.
    """

    epoch: int
    digest: str
    settings: ShareSettings
    store: ExpertStore
    weight_bytes: int
    kv_blocks: int = 0
    engine: Engine | None = None
    runner: Runner | None = None
    experts: PlacedExperts | None = None
    trunk: Trunk | None = None
    later: NextStages | None = None
    place: StagePlace | None = None
    speed: NodeSpeed | None = None
    peers: Sequence[PeerAddress] = ()
    stages: Sequence[str] = ()
    first_layers: Sequence[int] = ()

    @property
    def planned_bytes(self) -> int:
        return self.settings.planned_bytes

    @property
    def elasticity(self) -> Elasticity | None:
        """How far requests may go below the whole model here; None if not at all."""
        gates = self.runner.gates if self.runner is not None else None
        return gates.elasticity if gates is not None else None

    @property
    def is_spent(self) -> bool:
        """Whether its engine has given back its memory to one that followed."""
        return self.engine is not None and self.engine.is_closed

    def switch_to(self, running: Engine) -> tuple[Engine, list[Output]]:
        """Take the next steps over from `running`, which serves another placement. On the engine's own thread.

        Returns the engine to go on with and what could not go on.
        """
        assert self.engine is not None and self.runner is not None and self.experts is not None
        self.experts.greet_all(GREET_S)
        if self.later is not None:
            self.later.await_greeting(GREET_S)
        if self.engine is running and isinstance(running, PipelineEngine):
            assert self.later is not None, "the engine of several stages knows the others"
            running.switch_stages(self.runner, self.experts, self.later)
            return running, []
        if self.engine is running:
            running.switch_port(self.runner, self.experts)
            return running, []
        return self.engine, self.engine.take_over(running)

    def close(self) -> None:
        for part in (self.experts, self.later, self.place):
            if part is not None:
                part.close()


def learned_by(cluster: Cluster, node: Node, checkpoint: Checkpoint) -> Learned | None:
    """What a node with a trunk knows from the calibration artifact; None where there is none, or it lacks what it takes.

    Raises ArtifactError for the artifact of another model, or one that is damaged.
    """
    artifact = find_artifact(cluster, checkpoint.model_hash) if node.holds_trunk else None
    if artifact is None:
        return None
    spec = checkpoint.spec
    traits = read_traits(artifact, layers=spec.moe_layers, experts=num_experts(spec))
    losses = read_losses(artifact) if traits is not None else None
    if traits is None or losses is None:
        return None
    links = {peer.name: cluster.link(node.name, peer.name) for peer in cluster.nodes}
    speeds = {
        name: LinkSpeed(rtt_s=link.rtt_s, bandwidth_bps=link.bandwidth_bps) for name, link in links.items()
    }
    return Learned(traits.groups, losses, speeds)


def share_digest(deploy: Deploy) -> str:
    """Equal for equal shares, whether or not they count yet: a node that already holds it loads nothing."""
    deploy = msgspec.structs.replace(deploy, counts_now=True)
    return hashlib.blake2b(msgspec.json.encode(deploy), digest_size=16).hexdigest()


def hosts_of(deploy: Deploy) -> dict[ExpertId, Sequence[str]]:
    """Expert -> names of the nodes that hold it."""
    names = [peer.name for peer in deploy.peers]
    return {
        ExpertId(layer, index): tuple(names[node] for node in nodes)
        for layer, experts in enumerate(deploy.hosts)
        for index, nodes in enumerate(experts)
    }


def sub_experts_by(cluster: Cluster, checkpoint: Checkpoint) -> SubExperts | None:
    """How a topology file has experts split; None if it does not. ArtifactError where it does and nothing says how."""
    if not cluster.sub_experts:
        return None
    artifact = find_artifact(cluster, checkpoint.model_hash)
    found = None if artifact is None else read_sub_experts(artifact, checkpoint.spec)
    if found is None:
        raise ArtifactError(
            f"sub_experts = true, but no calibration artifact of {cluster.model} has a section partition; run "
            f"`edge-runtime calibrate prism {cluster.model} --corpus FOLDER`, or name its folder by `calibration`"
        )
    if cluster.gate == "linear":
        assert artifact is not None, "a partition came from an artifact"
        found = with_linear_gate(found, artifact, checkpoint.spec)
    return found.with_splits() if cluster.split_tiers else found


def gates_for(checkpoint: Checkpoint, parts: SubExperts, trunk: Trunk) -> TierGates:
    """Who chooses sub-experts in the layers of a trunk: the tuned gate where `parts` has it, else gate neurons."""
    if parts.linear is None:
        return ProxyGates(checkpoint, parts, range(trunk.first_layer, trunk.last_layer))
    if not backends.is_on_host():
        raise Refusal(
            "gate",
            f'gate = "linear" chooses sub-experts on processors only, not on {backends.device()}; use "proxy"',
        )
    layers = enumerate(trunk.layers, trunk.first_layer)
    own = ((index, layer.gate) for index, layer in layers if layer.gate is not None)
    return LinearGates(checkpoint.spec, parts, own)


def load_share(
    deploy: Deploy,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | None,
    *,
    identity: Hello,
    keys: Keys | None,
    clock: Clock,
    progress: Progress,
    held: LoadedShare | None = None,
    fetch: Fetch | None = None,
    learned: Learned | None = None,
    parts: SubExperts | None = None,
) -> LoadedShare:
    """Read the share's tensors and build what runs them. Refused before anything is allocated if it cannot fit.

    held     the share that is being served: what both have is not read again
    fetch    brings the parts it is given into the checkpoint's folder, where that does not hold everything
    learned  what calibration found, for requests that may spend quality
    parts    how experts are split; None for whole ones
    """
    try:
        settings = msgspec.convert(deploy.settings, ShareSettings)
    except msgspec.ValidationError as error:
        raise Refusal("settings", f"the coordinator's settings are wrong: {error}") from error
    spec, share, node = checkpoint.spec, deploy.share, identity.node
    wanted = [ExpertId(layer, index) for layer, ids in enumerate(share.experts) for index in ids]
    has_trunk = share.last_layer > share.first_layer
    nodes = [deploy.peers[index].name for index in deploy.stages if index < len(deploy.peers)]
    if 0 < share.last_layer - share.first_layer < spec.num_layers:
        _refuse_stages(share, nodes, deploy.first_layers, node, spec)
    _refuse_formats(settings, node)
    _refuse_if_too_large(settings.planned_bytes, node)

    store = empty_store(spec)
    if held is not None and held.settings.weight_format == settings.weight_format:
        _share_experts(held.store, store, wanted)
    missing = [expert for expert in wanted if expert not in store]
    trunk = held.trunk if held is not None and _has_same_trunk(held, deploy, settings) else None
    names = (
        trunk_names(checkpoint, spec, share.first_layer, share.last_layer)
        if has_trunk and trunk is None
        else []
    )
    expert_bytes = sum(map(checkpoint.stored_bytes, checkpoint.expert_names(missing)))
    total = expert_bytes + sum(map(checkpoint.stored_bytes, names))
    if fetch is not None:
        fetch([*names, *checkpoint.expert_names(missing)], progress)

    add_experts(
        store,
        checkpoint,
        missing,
        weight_format=settings.weight_format,
        progress=lambda done, _, what: progress(done, total, what),
        order_of=lambda expert: (
            None if parts is None else parts.layers[expert.layer].permutation[expert.index]
        ),
    )
    digest = share_digest(deploy)
    if not has_trunk:
        return LoadedShare(deploy.epoch, digest, settings, store, store.nbytes)

    if trunk is None:
        trunk = load_trunk(
            checkpoint,
            spec,
            share.first_layer,
            share.last_layer,
            context_tokens=settings.context_tokens,
            trunk_format=settings.trunk_format,
            progress=lambda done, _, what: progress(expert_bytes + done, total, what),
        )
    hosts = {
        expert: names
        for expert, names in hosts_of(deploy).items()
        if share.first_layer <= expert.layer < share.last_layer
    }
    hosting = {name for names in hosts.values() for name in names} - {node}
    helpers = [peer for peer in deploy.peers if peer.name in hosting]
    experts = PlacedExperts(
        node=node,
        store=store,
        hosts=hosts,
        links=[PeerLink(peer, identity, deploy.epoch, keys, clock) for peer in helpers],
        selector=selector_for(
            settings.selector,
            spec,
            learned,
            [peer.name for peer in helpers],
            drops=settings.drop,
            defers=settings.defer,
            looks_ahead=settings.look_ahead,
        ),
        num_layers=spec.num_layers,
        num_experts=num_experts(spec),
        epoch=deploy.epoch,
        deadline_s=settings.call_deadline_s,
        clock=clock,
    )
    loaded = LoadedShare(
        deploy.epoch,
        digest,
        settings,
        store,
        store.nbytes + trunk.nbytes,
        share.kv_blocks,
        experts=experts,
        trunk=trunk,
    )
    peers = {peer.name: peer for peer in deploy.peers}

    def link_to(name: str) -> PeerLink:
        return PeerLink(peers[name], identity, deploy.epoch, keys, clock)

    def new_runner() -> Runner:
        gates = gates_for(checkpoint, parts, trunk) if parts is not None else None
        follows = held is not None and held.engine is not None and not share.first_layer
        return _runner(share, settings, spec, trunk, experts, clock, gates, touched=not follows)

    if share.first_layer > 0:
        stage = held.place.stage if held is not None and held.place and _fits(held, share, settings) else None
        if held is None or trunk is not held.trunk or stage is None:
            stage = _later_stage(share, settings, spec, new_runner(), clock)
        following, first = links_to(nodes, node, lambda name: StageLink(link_to(name), deploy.epoch, clock))
        loaded.runner = stage.runner
        loaded.place = StagePlace(deploy.epoch, node, nodes, stage, experts, first, following)
        return loaded
    if share.last_layer < spec.num_layers:
        loaded.later = NextStages(nodes, link_to(nodes[1]), deploy.epoch, clock)
    if held is not None and trunk is held.trunk and held.engine is not None and _fits(held, share, settings):
        loaded.engine, loaded.runner = held.engine, held.runner
        return loaded
    eos_ids = tuple(sorted(tokenizer.eos_token_ids)) if tokenizer else ()
    scheduler = Scheduler(
        SchedulerSettings(
            vocab_size=spec.vocab_size,
            context_tokens=settings.context_tokens,
            eos_ids=eos_ids,
            max_rows=settings.max_batch_rows,
            max_running=settings.max_requests,
        ),
        BlockPool(share.kv_blocks),
        model_hash=checkpoint.model_hash,
        tokenizer_hash=tokenizer.content_hash if tokenizer else "",
    )
    runner = loaded.runner = new_runner()
    if loaded.later is None:
        assert runner.pages is not None, "a runner of a share has pages"
        blocks = BlockStore(scheduler.pool, runner.pages, runner.signatures)
        loaded.engine = Engine(scheduler, runner, Sampler(spec.vocab_size), clock, blocks)
        loaded.engine.books = runner.books = _books_of(runner)
    else:
        loaded.engine = PipelineEngine(scheduler, runner, loaded.later, clock, settings.call_deadline_s)
        loaded.engine.books = _books_of(runner)
    return loaded


def measured(
    loaded: LoadedShare, deploy: Deploy, checkpoint: Checkpoint, held: LoadedShare | None, clock: Clock
) -> LoadedShare:
    """The share with its speed: tried now, before it is used, unless one like it was tried before.

    Not of an encoder-decoder model, whose steps have two kinds of rows. One thread is timed by its processor time, since
    nodes that start together on one machine are in each other's way; of several, some are idle, and only the clock tells.
    """
    share, settings, spec = deploy.share, loaded.settings, checkpoint.spec
    loaded.peers = deploy.peers
    loaded.stages = [deploy.peers[index].name for index in deploy.stages]
    loaded.first_layers = deploy.first_layers
    if held is not None and _is_alike(held, share, settings):
        loaded.speed = held.speed
    if loaded.speed is not None or spec.encoder is not None:
        return loaded
    sizes = footprint(checkpoint, context_tokens=settings.context_tokens)
    if torch.get_num_threads() == 1:
        clock = ThreadClock(clock)
    if loaded.runner is None:
        loaded.speed = try_experts(sizes, loaded.store, weight_format=settings.weight_format, clock=clock)
    elif held is None or loaded.runner is not held.runner:
        speed = try_home(
            sizes,
            loaded.runner.decoder,
            loaded.store,
            weight_format=settings.weight_format,
            num_blocks=share.kv_blocks,
            max_rows=settings.max_batch_rows,
            context_tokens=settings.context_tokens,
            clock=clock,
        )
        loaded.speed = speed and replace(speed, send_overhead_s=send_seconds(sizes, clock))
    return loaded


def _is_alike(held: LoadedShare, share: Share, settings: ShareSettings) -> bool:
    """Whether what was measured with `held` holds for another share too."""
    layers = (held.trunk.first_layer, held.trunk.last_layer) if held.trunk is not None else (0, 0)
    return (
        layers == (share.first_layer, share.last_layer)
        and held.settings.weight_format == settings.weight_format
        and held.settings.trunk_format == settings.trunk_format
    )


def _runner(
    share: Share,
    settings: ShareSettings,
    spec: ModelSpec,
    trunk: Trunk,
    experts: PlacedExperts,
    clock: Clock,
    gates: TierGates | None,
    *,
    touched: bool,
) -> Runner:
    shapes = spec.kv_shapes(share.first_layer, share.last_layer)
    dtype = backends.page_dtype(trunk.layers[0].attention.out.format)
    pages = KVPages(share.kv_blocks, shapes, dtype, touched=touched)
    signatures = None
    if settings.counts_experts:
        signatures = signatures_for(
            spec, share.first_layer, share.last_layer, share.kv_blocks, settings.max_batch_rows
        )
    counts = signatures.counts if signatures is not None else None
    return Runner(
        decoder=decoder_of(spec, trunk, pages, max_rows=settings.max_batch_rows, counts=counts),
        signatures=signatures,
        pages=pages,
        gates=gates,
        record=recorder(),
        dropped=DroppedMass(),
        port=experts,
        table=RequestTable(settings.max_requests, settings.context_tokens),
        clock=clock,
    )


def _later_stage(
    share: Share, settings: ShareSettings, spec: ModelSpec, runner: Runner, clock: Clock
) -> LaterStage:
    limits = StageLimits(
        max_rows=settings.max_batch_rows,
        num_blocks=share.kv_blocks,
        context_tokens=settings.context_tokens,
        vocab_size=spec.vocab_size,
        has_encoder=spec.encoder is not None,
    )
    sampler = Sampler(spec.vocab_size) if share.last_layer == spec.num_layers else None
    return LaterStage(runner, sampler, clock, limits)


def _refuse_stages(
    share: Share, nodes: Sequence[str], first_layers: Sequence[int], node: str, spec: ModelSpec
) -> None:
    """A part of the layers makes sense only as a stage of a group in which its place is known."""
    is_known = len(nodes) > 1 and (node, share.first_layer) in zip(nodes, first_layers, strict=False)
    if not is_known or (share.first_layer == 0) != (nodes[0] == node):
        raise Refusal(
            "stages",
            f"{node} is to run layers {share.first_layer} to {share.last_layer - 1} of {spec.num_layers} in a group of "
            f"{', '.join(nodes) or 'no nodes'}, in which these are not its layers",
        )


def signatures_for(
    spec: ModelSpec, first_layer: int, last_layer: int, num_blocks: int, max_rows: int
) -> SignatureCache | None:
    """Where layers [first_layer, last_layer) count what rows choose; None for a model that is not routed by that."""
    num_layers = sum(first_layer <= layer < last_layer for layer in spec.moe_layers)
    if spec.encoder is not None or num_layers == 0:
        return None
    return SignatureCache(num_blocks, num_layers, num_experts(spec), max_rows=max_rows)


def _books_of(runner: Runner) -> QualityBooks:
    its_runner = weakref.ref(
        runner
    )  # which holds the books: in a circle, KV would outlive the share by minutes

    def port() -> PlacedExperts:  # of the placement that serves when it is asked
        runner = its_runner()
        assert runner is not None and isinstance(runner.port, PlacedExperts), (
            "a node's runner calls a placement's"
        )
        return runner.port

    return QualityBooks(
        lambda layer, slots, may_defer: port().choose(layer, slots, may_defer),
        lambda: port().start_price(),
        lambda: port().take_late(),
        lambda: port().drag_per_deviation,
    )


def selector_for(
    policy: str,
    spec: ModelSpec,
    learned: Learned | None,
    peers: Sequence[str],
    *,
    drops: bool = False,
    defers: bool = False,
    looks_ahead: bool = True,
) -> HomeSelector | None:
    """The selector of a home with these peers; None where nothing was calibrated, or nobody is to stand in."""
    if learned is None or policy == "exact" or not peers:
        return None
    row_bytes = 2 * spec.width * WIRE_ITEM_BYTES  # out and back
    links = [learned.links.get(name, LinkSpeed()) for name in peers]
    return HomeSelector(
        policy,
        learned.groups,
        learned.losses,
        num_columns=max(layer.gate.top_k for layer in spec.layers if layer.gate),
        waits_s=[0.0, *(link.rtt_s + 2 * NodeSpeed.call_overhead_s for link in links)],
        slots_s=[0.0, *(link.transfer_s(row_bytes) for link in links)],
        drops=drops,
        defers=defers,
        looks_ahead=looks_ahead,
    )


def num_experts(spec: ModelSpec) -> int:
    """Routed experts of a layer; 0 in a model without."""
    return max((layer.gate.num_experts for layer in spec.layers if layer.gate), default=0)


def _share_experts(held: ExpertStore, store: ExpertStore, wanted: Sequence[ExpertId]) -> None:
    """Put what `held` has of `wanted` into `store` too; the weights are in memory once."""
    for expert in wanted:
        bank = held.bank(expert.layer)
        weight = bank.get(expert.index) if bank is not None else None
        if weight is not None:
            store.add(expert, weight)


def _has_same_trunk(held: LoadedShare, deploy: Deploy, settings: ShareSettings) -> bool:
    trunk, share = held.trunk, deploy.share
    return (
        trunk is not None
        and (trunk.first_layer, trunk.last_layer) == (share.first_layer, share.last_layer)
        and held.settings.context_tokens == settings.context_tokens
        and held.settings.trunk_format == settings.trunk_format
    )


def _fits(held: LoadedShare, share: Share, settings: ShareSettings) -> bool:
    """Whether the engine or stage of `held` is the one this share wants: KV and limits are the same."""
    return held.kv_blocks == share.kv_blocks and all(
        getattr(held.settings, name) == getattr(settings, name)
        for name in ("max_batch_rows", "max_requests", "counts_experts")
    )


def _refuse_formats(settings: ShareSettings, node: str) -> None:
    """The kernels that serve must have the formats that are asked for."""
    serving = backends.active()
    for key, op in (("weight_format", "grouped_ffn"), ("trunk_format", "linear")):
        found, allowed = getattr(settings, key), serving.FORMATS[op]
        if found != "as_stored" and found not in allowed:
            raise Refusal(
                "format",
                f"{node}, {key}: found {found!r}, which {op} of the {serving.NAME} kernels lacks; use as_stored or one of "
                f"{', '.join(allowed)}",
            )


def _refuse_if_too_large(planned_bytes: int, node: str) -> None:
    needed = max(0, planned_bytes - resident_bytes())
    available, where = available_bytes()
    if needed > available:
        wanted, there = in_one_unit(needed, available)
        raise Refusal(
            "memory",
            f"{node} needs {wanted} more for its share and {there} are available {where}; "
            "stop other programs, or give it less memory in the topology file",
        )


class ShareLoader(threading.Thread):
    """Loads one share; the outcome is in `.share` or `.fault` when `finished()` is called, from this thread.

    whose  fault it is: a damaged model is the user's
    """

    def __init__(
        self, load: Callable[[], LoadedShare], epoch: int, finished: Callable[["ShareLoader"], None]
    ) -> None:
        super().__init__(name="share-loader", daemon=True)
        self.epoch = epoch
        self.is_wanted = True
        self.share: LoadedShare | None = None
        self.fault = ""
        self.whose: Whose = "cluster"
        self.crash: BaseException | None = None
        self._load = load
        self._finished = finished

    def run(self) -> None:
        try:
            self.share = self._load()
        except MemoryError:
            self.fault = "out of memory while loading; give the node less memory in the topology file"
        except EdgeError as error:
            self.fault = str(error)
            self.whose = "user" if isinstance(error, UserError) else "cluster"
        except BaseException as crash:  # noqa: BLE001 - ours: the daemon's own thread raises it
            self.crash = crash
        self._finished(self)
