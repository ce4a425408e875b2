"""What people want of the placement: a file applied or looked at, a node drained. Read, worked out beside the loop, begun.

Knows which client asked; which placement it leads to is `planning.py`'s to say, and whether it still fits `epochs.py`'s.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from edge_runtime.clock import Clock
from edge_runtime.coordinator import epochs
from edge_runtime.coordinator.deploy import refuse_unchangeable
from edge_runtime.coordinator.planner import Planner
from edge_runtime.coordinator.planning import Ask, Found
from edge_runtime.coordinator.preview import preview_of
from edge_runtime.coordinator.routes import Routes
from edge_runtime.errors import ArtifactError, ConfigError, Refusal
from edge_runtime.protocol import Apply, Applying, Message, Planned, Refused
from edge_runtime.transport.keys import Keys
from topology.cluster import Cluster
from topology.costs import ModelFootprint
from topology.errors import TopologyError
from topology.files import read_cluster_text

log = logging.getLogger(__name__)

MAX_TRIES = 4  # plans made for one wish while nodes come and go
PROMISE_S = 600.0  # how long what a preview showed is what applying the same file does

Answer = Callable[[Message], None]


class Wishes:
    """Begins changes for clients, and tells them the epoch, or why not; what is refused changes nothing."""

    def __init__(
        self,
        found: epochs.Epochs,
        planner: Planner,
        routes: Routes,
        clock: Clock,
        *,
        footprint: ModelFootprint,
        keys: Keys | None,
        carry_out: Callable[[Sequence[epochs.Command]], None],
    ) -> None:
        self._epochs = found
        self._planner = planner
        self._routes = routes
        self._clock = clock
        self._footprint = footprint
        self._keys = keys
        self._carry_out = carry_out
        self._promised: tuple[Found, float] | None = (
            None  # what the last preview showed, and until when it counts
        )

    def apply(self, message: Apply, answer: Answer) -> None:
        """Change the cluster to a file."""

        def ask() -> Ask:
            self._epochs.refuse_if_busy()
            return self._epochs.ask(self._read(message))

        def work(asked: Ask) -> Found:
            self._routes.refuse(asked.cluster)
            return self._promised_for(asked) or self._epochs.work_out(asked)

        def begin(found: Found) -> Callable[[], None]:
            why = f"{message.source} was applied"
            return self._begun(*self._epochs.apply_plan(found, why, self._clock.now()), answer)

        self._pursue(ask, work, begin, answer)

    def drain(self, name: str, answer: Answer) -> None:
        """Move everything off a node."""

        def work(asked: Ask) -> Found:
            try:
                return self._epochs.work_out(asked)
            except TopologyError as error:
                raise TopologyError(f"{name} cannot be drained: without it {error}") from error

        def begin(found: Found) -> Callable[[], None]:
            why, now = f"{name} was drained", self._clock.now()
            return self._begun(*self._epochs.apply_plan(found, why, now, frozenset((name,))), answer)

        self._pursue(lambda: self._epochs.ask_without(name), work, begin, answer)

    def preview(self, message: Apply, answer: Answer) -> None:
        """Tell what a file would change, which is what it does change if it is applied soon."""

        def work(asked: Ask) -> tuple[Found, Planned]:
            self._routes.refuse(asked.cluster)
            found = self._promised_for(asked) or self._epochs.work_out(asked)
            old = asked.origin
            planned = preview_of(
                old.cluster,
                old.placement,
                asked.present,
                found.plan,
                self._footprint,
                self._epochs.traits,
                asked.measured,
            )
            return found, planned

        def begin(shown: tuple[Found, Planned]) -> Callable[[], None]:
            found, planned = shown
            if self._promised_for(found.ask) is None:
                self._promised = found, self._clock.now() + PROMISE_S
            return lambda: answer(planned)

        self._pursue(lambda: self._epochs.ask(self._read(message)), work, begin, answer)

    def _promised_for(self, asked: Ask) -> Found | None:
        """What a preview showed for the same wish. Measurements, which change with every heartbeat, may be older."""
        if self._promised is None:
            return None
        found, until_s = self._promised
        if self._clock.now() >= until_s or found.ask._replace(measured=asked.measured) != asked:
            return None
        return found._replace(ask=asked)

    def _read(self, message: Apply) -> Cluster:
        wanted = read_cluster_text(message.text, Path(message.source))
        refuse_unchangeable(self._epochs.cluster, wanted, self._footprint.context_tokens)
        if self._keys:
            for name in wanted.node_names:
                self._keys.of_peer(name)
        return wanted

    def _begun(self, epoch: int, commands: Sequence[epochs.Command], answer: Answer) -> Callable[[], None]:
        def tell() -> None:
            answer(Applying(epoch))
            self._carry_out(commands)

        return tell

    def _pursue(
        self,
        ask: Callable[[], Ask],
        work: Callable[[Ask], Any],
        begin: Callable[[Any], Callable[[], None]],
        answer: Answer,
        tries: int = MAX_TRIES,
    ) -> None:
        """Have it worked out, again if nodes came or went meanwhile, and begin; what that returns is then done."""
        with _Refusing(answer):
            asked = ask()

            def worked_out(future: Future[Any]) -> None:
                if tries > 1 and not self._epochs.is_current(asked):
                    self._pursue(ask, work, begin, answer, tries - 1)
                    return
                then: Callable[[], None] | None = None
                with _Refusing(answer):
                    result = future.result()
                    if not self._epochs.is_current(asked) and isinstance(result, Found):
                        raise Refusal("busy", "nodes come and go while the change is worked out", 1.0)
                    then = begin(result)
                if then is not None:
                    then()

            self._planner.submit(lambda: work(asked), worked_out)


class _Refusing:
    """Answers what ends the block with a refusal, as far as that is the asker's fault or an ordinary answer."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        match error:
            case Refusal():
                self._answer(Refused.of(error))
            case TopologyError() | ConfigError() | ArtifactError():
                self._answer(Refused("topology", str(error)))
            case ValueError() | ArithmeticError() | OSError() | RecursionError():
                # A value that no reader foresaw: the file's fault, and none that running answers should pay for.
                log.error("a change was asked for that cannot be worked out", exc_info=error)
                detail = f"the file cannot be worked out: {type(error).__name__}: {error}"
                self._answer(Refused("topology", detail[:1000]))
            case _:
                return False
        return True
