"""What a node says of itself in a heartbeat: sizes, loads and counters, read from the parts that keep them."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

import psutil

from edge_runtime.clock import Clock
from edge_runtime.engine.engine import EngineThread
from edge_runtime.engine.pipeline import PipelineEngine
from edge_runtime.engine.runner import Runner
from edge_runtime.node.expert_service import ExpertService
from edge_runtime.node.gauge import Gauge
from edge_runtime.node.resident import resident_bytes
from edge_runtime.node.share import LoadedShare, ShareLoader
from edge_runtime.protocol import NodeReport


def node_report(
    share: LoadedShare | None,
    service: ExpertService,
    loader: ShareLoader | None,
    engine_thread: EngineThread | None,
    gauge: Gauge,
    clock: Clock,
    more: Mapping[str, float] | None = None,
) -> NodeReport:
    """One report, with `more` numbers that others keep.

    Counters are read while others write them: each is whole, together they are nearly of one moment.
    """
    state = "loading" if loader is not None else "ready" if share is not None else "joining"
    served = service.counters
    numbers = {
        "calls_refused": float(served.refused),
        "pairs_served": float(served.pairs),
        "service_s": served.busy_s,
        **(more or {}),
        "processor_s": clock.processor_s(),
        "control_s": clock.thread_s(),  # whoever reports is the thread that hands out what steps bring
        "blocks_handed_on": float(served.blocks),
    }
    report: dict[str, Any] = {
        "state": state,
        "rss_bytes": resident_bytes(),
        "calls_served": served.calls,
        "rows_served": served.rows,
        "bad_frames": service.bad_messages,
        "busy_s": served.busy_s,
    }
    if share is not None:
        report |= {"epoch": share.epoch, "planned_bytes": share.planned_bytes}
    engine = engine_thread.engine if engine_thread is not None else None
    if share is not None and share.experts is not None and (engine is not None or share.place is not None):
        runner = engine.runner if engine is not None else share.runner
        assert runner is not None, "whoever has experts behind a port runs layers"
        experts, times = share.experts, runner.times
        traffic = list(experts.traffic.values())
        numbers |= {f"step_{name}": float(value) for name, value in asdict(times).items()}
        numbers |= {f"experts_{name}": value for name, value in asdict(experts.times).items()}
        numbers |= {
            "calls_made": float(sum(peer.calls for peer in traffic)),
            "rows_sent": float(sum(peer.rows for peer in traffic)),
            "pairs_sent": float(sum(peer.pairs for peer in traffic)),
            "bytes_out": float(sum(peer.bytes_out for peer in traffic)),
            "bytes_in": float(sum(peer.bytes_in for peer in traffic)),
            "call_failures": float(sum(peer.failures for peer in traffic)),
        }
        if isinstance(runner, Runner):
            counts = runner.segment_counts()
            numbers |= {f"segments_{name}": float(value) for name, value in counts._asdict().items()}
        step_s = times.plan + times.rows + times.attention + times.experts + times.head + times.sample
        report["busy_s"] = served.busy_s + step_s
    if isinstance(engine, PipelineEngine):
        rounds = engine.stage_times
        numbers |= {"stage_steps": float(rounds.steps), "stage_round_s": rounds.round_s}
        numbers |= {f"stage_{index}_s": seconds for index, seconds in enumerate(rounds.by_stage, 1)}
    if engine is not None:
        scheduler = engine.scheduler
        numbers |= {
            "preemptions": float(scheduler.num_preemptions),
            "cached_tokens": float(scheduler.num_cached_tokens),
        }
        report |= {
            "kv_blocks_free": scheduler.free_blocks,
            "kv_blocks_total": scheduler.pool.num_blocks,
            "waiting": scheduler.num_waiting,
            "running": scheduler.num_running,
            "tokens_generated": engine.tokens_generated,
            "prefix_hits": scheduler.pool.num_hits,
        }
    speed, links = gauge.report()
    return NodeReport(numbers=numbers, speed=speed, links=links, cores=float(num_processors()), **report)


@cache
def num_processors() -> int:
    """How many this process may run on."""
    process = psutil.Process()
    has_affinity = hasattr(process, "cpu_affinity")  # not everywhere
    return len(process.cpu_affinity()) if has_affinity else psutil.cpu_count() or 1
