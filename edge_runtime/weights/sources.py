"""From whom a node takes its next weights. Pure; knows names, rates and what became of earlier tries."""

import zlib
from collections.abc import Iterable, Mapping

import msgspec

RETRY_S = 1.0  # a source that failed is left alone for so long, doubled each time ...
MAX_RETRY_S = 30.0  # ... up to this


class Source(msgspec.Struct, frozen=True):
    """Somebody who may have what is wanted.

    bandwidth_bps   of the link to it, as the topology file says
    retry_at_s      when it may be asked again
    """

    name: str
    bandwidth_bps: float = 0.0
    is_coordinator: bool = False
    failures: int = 0
    retry_at_s: float = 0.0


def choose_source(sources: Iterable[Source], held: Mapping[str, int], taker: str, now: float) -> str | None:
    """The one to ask: reliable before fast, a peer before the coordinator, whose link everybody needs.

    held   source -> how many of the wanted chunks it has
    taker  whose choice it is: several takers with equal choices spread over equal sources
    None if nobody who may be asked now has any.
    """

    def preference(source: Source) -> tuple[float | int | str, ...]:
        spread = zlib.crc32(f"{taker}<-{source.name}".encode())
        return source.failures, source.is_coordinator, -source.bandwidth_bps, spread, source.name

    able = [source for source in sources if held.get(source.name) and now >= source.retry_at_s]
    return min(able, key=preference).name if able else None


def failed(source: Source, now: float) -> Source:
    """The source after it broke off, lied or did not answer."""
    wait_s = min(RETRY_S * 2**source.failures, MAX_RETRY_S)
    return msgspec.structs.replace(source, failures=source.failures + 1, retry_at_s=now + wait_s)
