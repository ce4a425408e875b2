"""Which node computes a request's prompt, and which one answers it: the topology file's router, and what it goes by. Pure.

Knows who is where and what was sent where; no socket, no clock and no file. Fits the clusters of calibration to the homes
there are, again when they change.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from edge_runtime.coordinator.traffic_book import TrafficBook
from edge_runtime.elastic.tiers import FULL, Elasticity, tier_asked
from edge_runtime.errors import ArtifactError
from edge_runtime.protocol import Submit
from edge_runtime.routing.base import HomeLoad, Question, Router
from edge_runtime.routing.baselines import (
    LeastPressure,
    PowerOfTwo,
    RandomChoice,
    RoundRobin,
    ShortestQueue,
)
from edge_runtime.routing.clusters import Clusters
from edge_runtime.routing.fit import SignatureFit, band_for
from edge_runtime.routing.lane_book import LaneBook
from edge_runtime.routing.lanes import LaneSettings
from edge_runtime.routing.locality_band import BandRule, LocalityBand
from edge_runtime.routing.online import SignatureWindow, follow
from edge_runtime.routing.prefill_ring import HASHED_BYTES, PrefillRing
from topology.cluster import DECODE, Cluster
from topology.costs import ModelFootprint
from topology.placement import Placement
from topology.speeds import LinkSpeed
from topology.traits import ExpertTraits, Traffic, shares

ELDR = "eldr"


class Routes:
    """The router of one cluster, as its file wants it.

    policy  in use: the file's, or what `auto` came to
    """

    def __init__(
        self,
        cluster: Cluster,
        footprint: ModelFootprint,
        fit: SignatureFit | None,
        *,
        seed: int,
        elasticity: Elasticity | None = None,
    ) -> None:
        """elasticity: of the model, where its experts are split; without it there are no lanes."""
        self._footprint = footprint
        self._elasticity = elasticity
        self._lanes: LaneBook | None = None
        self._fit = fit
        self._seed = seed
        self._clusters: dict[int, Clusters] = {}  # by number of homes
        self._rings: dict[tuple[str, ...], PrefillRing] = {}
        self._sent: dict[str, OrderedDict[bytes, None]] = {}  # home -> blocks that it has had, latest last
        self.num_sent: dict[str, int] = {}
        self.traffic = TrafficBook()
        self.num_prompt_blocks: dict[str, int] = {}
        self.num_hit_blocks: dict[str, int] = {}
        self._band: LocalityBand | None = None
        self._window = SignatureWindow()
        self._resident: np.ndarray | None = None  # [H, L, E] what homes hold, by the placement that counts
        self._links: Mapping[tuple[str, str], LinkSpeed] = {}
        self.follow(cluster, None)

    def follow(self, cluster: Cluster, placement: Placement | None) -> None:
        """Another topology file or placement counts from now on; without one, before anything runs, nobody is held up by a fit.

        Raises ArtifactError for a policy or lanes that it cannot have.
        """
        groups = placement.groups if placement is not None else ()
        homes = tuple(group.nodes[0] for group in groups) or homes_of(cluster)
        self._is_staged = any(len(group.nodes) > 1 for group in groups)
        policy, settings = policy_of(cluster, self._fit), lane_settings(cluster, self._elasticity)
        self.policy = policy
        self._cluster = cluster
        self.homes = homes
        self._router: Router = self._baseline()
        if settings is None:
            self._lanes = None
        elif self._lanes is None or self._lanes.settings != settings:
            self._lanes = LaneBook(settings)
        if self.policy == ELDR:
            assert self._fit is not None, "policy_of refuses eldr without a fit"
            routing = cluster.routing
            rule = BandRule(
                tau=routing.tau,
                affinity=routing.affinity,
                min_candidates=routing.min_candidates,
                uses_speed=routing.count_speed,
                uses_transfer=routing.count_transfer,
            )
            resident = None if placement is None else residents_of(placement, homes, self._footprint)
            self._resident = resident
            if placement is None or len(homes) in self._clusters:
                clusters = self.clusters_for(len(homes))
                self._band = band_for(self._fit, homes, rule, clusters=clusters, resident=resident)
            else:  # it takes seconds, and `refit_due` has it done beside; until then load decides
                self._band = LocalityBand(np.zeros((0, self._fit.rule.dim)), (), rule)
            self._router = self._band
            self._window = SignatureWindow()

    def refit_due(self, now: float) -> Callable[[], None] | None:
        """What makes the clusters that are needed now, for a thread of its own: those of another number of homes, or, where
        that is wanted, new ones of the latest requests.
        """
        band, fit, resident, homes = self._band, self._fit, self._resident, self.homes
        if self.policy != ELDR or band is None or fit is None:
            return None
        if not len(band.centroids):

            def fit_anew() -> None:
                found = band_for(
                    fit, homes, band.rule, clusters=self.clusters_for(len(homes)), resident=resident
                )
                if self._band is band:
                    self._band = self._router = found

            return fit_anew
        if not self._cluster.routing.refit:
            return None
        signatures = self._window.take(len(band.centroids), now)
        if signatures is None:
            return None

        def refit() -> None:
            try:
                found = follow(band, signatures, lambda centroids: fit.assign(centroids, resident))
            except ArtifactError:  # signatures that are all alike tell no homes apart: the clusters stay
                return
            if self._band is band:
                self._band = self._router = found

        return refit

    def follow_lanes(self, loads: Sequence[HomeLoad], now: float) -> None:
        """These homes serve now, so busy."""
        if self._lanes is not None:
            self._lanes.follow(loads, now)

    def tier_of(self, submit: Submit) -> int:
        """How many sub-experts a request asks for, as far as that matters here; 0 for all."""
        return FULL if self._lanes is None else tier_asked(self._elasticity, submit.sampling)

    def refuse(self, cluster: Cluster) -> None:
        """Raise ArtifactError if `follow` could not follow this file."""
        lane_settings(cluster, self._elasticity)
        if policy_of(cluster, self._fit) == ELDR:
            self.clusters_for(len(homes_of(cluster)))

    def _baseline(self) -> Router:
        match self.policy:
            case "round_robin":
                return RoundRobin()
            case "random":
                return RandomChoice(self._seed)
            case "jsq":
                return ShortestQueue(self._seed)
            case "power_of_two":
                return PowerOfTwo(self._seed)
        return LeastPressure()

    @property
    def separates(self) -> bool:
        """Whether prompts are computed by one node and answered by another, or the same one, chosen afterwards.

        Not where a request lives on several nodes, each with KV of its own layers.
        """
        if self._is_staged:
            return False
        return self._router.needs_signature or self._cluster.separates

    def clusters_for(self, num_homes: int) -> Clusters:
        """One cluster of requests for each home; fitted once for each number of homes, in about a second."""
        assert self._fit is not None, "only a fit has clusters"
        if num_homes not in self._clusters:
            self._clusters[num_homes] = self._fit.clusters_for(num_homes)
        return self._clusters[num_homes]

    def joint(
        self, homes: Sequence[str], traits: ExpertTraits | None
    ) -> tuple[ExpertTraits | None, Traffic | None]:
        """What a placement for these homes should know: how many of the requests each has had, and with `eldr` that each will
        get the requests of one cluster, and what those use.
        """
        share = self.traffic.shares(homes)
        counted = Traffic(share) if share else None
        if self.policy != ELDR or traits is None or self._fit is None or not homes:
            return traits, counted
        demand = self._fit.demand(self.clusters_for(len(homes)))
        if demand is None or demand.shape[1:] != traits.frequency.shape:
            return traits, counted
        known = ExpertTraits(
            traits.layers, traits.frequency, traits.similarity, traits.groups, by_cluster=shares(demand)
        )
        one = np.eye(len(homes)).tolist()
        return known, Traffic(share, dict(zip(homes, one, strict=True)))

    # Requests.

    def choose_worker(self, submit: Submit, workers: Sequence[str], loads: Mapping[str, int]) -> str:
        """Who computes a prompt, of at least one worker; those that begin alike go to one."""
        ring = self._rings.get(tuple(workers))
        if ring is None:
            if len(self._rings) > 64:
                self._rings.clear()
            ring = self._rings[tuple(workers)] = PrefillRing(workers)
        return ring.choose(first_bytes(submit), loads)

    def signature(self, counts: np.ndarray) -> np.ndarray | None:
        """The signature of counts [L, E] of a prompt, or of a part; None where it is not needed or cannot be had."""
        if (
            self._fit is None
            or not self._router.needs_signature
            or counts.shape != self._fit.rule.weights.shape
        ):
            return None
        return self._fit.rule.signature(counts)

    def see(self, signature: np.ndarray | None, now: float) -> None:
        """A prompt was computed: clusters may follow what is asked."""
        if signature is not None:
            self._window.see(signature, now)

    def choose_home(
        self,
        loads: Sequence[HomeLoad],
        signature: np.ndarray | None = None,
        *,
        source: str = "",
        hashes: Sequence[bytes] = (),
        ahead: str = "",
        num_ahead: int = 0,
        tier: int = FULL,
    ) -> str | None:
        """Who answers a request: of its tier's lane the home that the router chooses by signature and pressure.

        source, hashes    where the blocks of its prompt are, as far as they are computed
        ahead, num_ahead  who was told to fetch the first of them; a router that goes by nothing that the rest of the prompt
                          tells has chosen that home already
        tier              sub-experts that it asks for, 0 for all
        """
        if not loads:
            return None
        if self._lanes is not None:
            loads = self._lanes.allowed(tier, loads)
        if ahead and not self._router.needs_signature and any(load.node == ahead for load in loads):
            return ahead
        if source:
            told = {ahead: num_ahead}
            loads = [
                load._replace(transfer_s=self.transfer_s(source, load.node, hashes, told.get(load.node, 0)))
                for load in loads
            ]
        return loads[self._router.choose(Question(signature), loads)].node

    def transfer_s(self, source: str, home: str, hashes: Sequence[bytes], num_ahead: int = 0) -> float:
        """How long it takes to move a prompt's blocks, those apart that the home has had or was told to fetch."""
        if source == home:
            return 0.0
        missing = len(hashes) - max(self.hits(home, hashes), num_ahead)
        link = self._links.get((min(source, home), max(source, home))) or self._cluster.link(source, home)
        bits = missing * 8 * _block_bytes(self._footprint)
        return (link.rtt_s + bits / link.bandwidth_bps) if missing else 0.0

    def sent(
        self,
        home: str,
        hashes: Sequence[bytes],
        most_blocks: int,
        tier: int = FULL,
        signature: np.ndarray | None = None,
    ) -> None:
        """A request with these blocks went there; a home of `most_blocks` blocks has no more than that."""
        self._router.took(home, signature)
        if self._lanes is not None:
            self._lanes.sent(tier, home)
        self.num_sent[home] = self.num_sent.get(home, 0) + 1
        self.traffic.sent(home)
        self.num_prompt_blocks[home] = self.num_prompt_blocks.get(home, 0) + len(hashes)
        self.num_hit_blocks[home] = self.num_hit_blocks.get(home, 0) + self.hits(home, hashes)
        known = self._sent.setdefault(home, OrderedDict())
        for content in hashes:
            known[content] = None
            known.move_to_end(content)
        while len(known) > most_blocks:
            known.popitem(last=False)

    def forget(self, home: str) -> None:
        """Its process is gone, and its blocks with it."""
        self._sent.pop(home, None)

    def measured(self, links: Mapping[tuple[str, str], LinkSpeed]) -> None:
        """What the links between nodes have turned out to be, by pair of names in order; the file's word counts elsewhere."""
        self._links = links

    def hits(self, home: str, hashes: Sequence[bytes]) -> int:
        """How many of a prompt's leading blocks a home has had."""
        known = self._sent.get(home, ())
        return next((place for place, content in enumerate(hashes) if content not in known), len(hashes))

    def as_text(self) -> str:
        """The router, for people."""
        if self.policy == ELDR and self._band is not None:
            rule, fit = self._band.rule, self._fit
            told = f"affinity {rule.affinity:g}" if rule.tau is None else f"tau {rule.tau:g}"
            if not len(self._band.centroids):
                return f"eldr, {told}; clusters for {len(self.homes)} homes are being made, and load decides until then"
            told = f"eldr, {told}, {len(self._band.centroids)} centroids of {self._band.centroids.shape[1]}"
            if fit is not None and fit.num_clusters != len(self._band.centroids):
                told += f" (fitted anew: calibration has {fit.num_clusters})"
            return told
        return self.policy

    def body(self) -> dict[str, Any]:
        """What `status` shows."""
        found: dict[str, Any] = {"policy": self.policy, "separates": self.separates, "text": self.as_text()}
        if self.policy == ELDR and self._band is not None:
            rule = self._band.rule
            found |= {
                "tau": rule.tau,
                "affinity": rule.affinity if rule.tau is None else None,
                "min_candidates": rule.min_candidates,
                "centroids": len(self._band.centroids),
                "dim": int(self._band.centroids.shape[1]),
            }
        if self._lanes is not None:
            found["lanes"] = self._lanes.body()
        found["homes"] = {
            home: {
                "centroid": self._band.home_of.index(home)
                if self.policy == ELDR and self._band is not None and home in self._band.home_of
                else None,
                "requests": self.num_sent.get(home, 0),
                "prompt_blocks": self.num_prompt_blocks.get(home, 0),
                "hit_blocks": self.num_hit_blocks.get(home, 0),
            }
            for home in self.homes
        }
        return found


def policy_of(cluster: Cluster, fit: SignatureFit | None) -> str:
    """The router to use. ArtifactError where the file wants one that needs a calibration that is not there."""
    wanted, homes = cluster.routing.policy, homes_of(cluster)
    if wanted == "auto":
        return ELDR if fit is not None and cluster.separates and len(homes) > 1 else "pressure"
    if wanted == ELDR and fit is None:
        raise ArtifactError(
            f'{cluster.at_routing("policy")}: "eldr" goes by section signature_fit of a calibration, '
            f'and model {cluster.model} has none; run "edge-runtime calibrate", or write policy = "pressure"'
        )
    return wanted


def lane_settings(cluster: Cluster, elasticity: Elasticity | None) -> LaneSettings | None:
    """The lanes that a file wants; None where it wants none, or experts are whole. ArtifactError for a window wider than them."""
    routing = cluster.routing
    if not routing.lanes or elasticity is None:
        return None
    full = elasticity.full_tier
    if routing.lane_window >= full - full // 2:
        raise ArtifactError(
            f"{cluster.at_routing('lane_window')}: {routing.lane_window} leaves neither lane a tier of its "
            f"own: requests to this model use 1 to {full} sub-experts and the border begins at {full // 2}; write at most "
            f"{full - full // 2 - 1}"
        )
    return LaneSettings(
        elasticity.full_tier,
        low_share=routing.lane_share,
        window=routing.lane_window,
        ratio=routing.lane_ratio,
        dwell_s=routing.lane_dwell_s,
        freeze_s=routing.lane_freeze_s,
    )


def homes_of(cluster: Cluster) -> tuple[str, ...]:
    """Nodes that answer, in the order of the file."""
    return tuple(node.name for node in cluster.nodes if DECODE in node.roles)


def residents_of(placement: Placement, homes: Sequence[str], footprint: ModelFootprint) -> np.ndarray:
    """[H, L, E] whether each home holds each expert; L the MoE layers in order."""
    row = {layer: place for place, layer in enumerate(footprint.moe_layers)}
    found = np.zeros((len(homes), len(row), footprint.experts_per_layer), dtype=bool)
    at = {home: place for place, home in enumerate(homes)}
    for plan in placement.nodes:
        if plan.node in at:
            for layer, index in plan.experts:
                found[at[plan.node], row[layer], index] = True
    return found


def first_bytes(submit: Submit) -> bytes:
    """The first bytes of a prompt, as far as a prefill ring looks."""
    if submit.prompt is not None:
        return submit.prompt[:HASHED_BYTES].encode("utf-8", "surrogatepass")
    if submit.prompt_ids is not None:
        return b"".join(index.to_bytes(4, "little") for index in submit.prompt_ids[: HASHED_BYTES // 4])
    text = json.dumps(submit.messages, ensure_ascii=True, default=str)
    return text[:HASHED_BYTES].encode()


def counts_wanted(cluster: Cluster, roles: Collection[str]) -> bool:
    """Whether a node of these roles is to count the experts that prompts choose."""
    wants = cluster.routing.policy == ELDR or (cluster.routing.policy == "auto" and cluster.separates)
    return wants and "prefill" in roles


def _block_bytes(footprint: ModelFootprint) -> int:
    return footprint.block_tokens * sum(footprint.kv_bytes_per_token)
