"""One event is one line, and EDGE_LOG says which events are shown."""

import io
import logging
import re

import pytest

from edge_runtime.errors import ConfigError
from edge_runtime.log import Reminder, setup_logging


@pytest.fixture(autouse=True)
def _leave_logging_as_it_was(monkeypatch):
    monkeypatch.delenv("EDGE_LOG", raising=False)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in ("tests.loud", "tests.quiet"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def lines_after(*, process: str = "", default: str = "info") -> list[str]:
    stream = io.StringIO()
    setup_logging(process, default=default, stream=stream)
    logging.getLogger("tests.loud").debug("detail %d", 1)
    logging.getLogger("tests.quiet").info("epoch %d: %d experts moved", 12, 3)
    logging.getLogger("tests.quiet").warning("peer sent %s", "a\nb\x1b[31m")
    return stream.getvalue().splitlines()


def test_a_line_carries_time_level_process_and_event():
    first = lines_after(process="node-3 100%s")[0]
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d\.\d{3} info    node-3 100%s tests\.quiet: epoch 12: 3 experts moved", first
    )


def test_what_a_peer_sent_cannot_start_a_line_or_colour_a_terminal():
    lines = lines_after()
    assert len(lines) == 2
    assert lines[1].endswith(r"peer sent a\nb\x1b[31m")


def test_the_variable_wins_over_the_default(monkeypatch):
    monkeypatch.setenv("EDGE_LOG", "error")
    assert lines_after(default="debug") == []


def test_one_package_can_be_louder_than_the_rest(monkeypatch):
    monkeypatch.setenv("EDGE_LOG", "warning,tests.loud=debug")
    assert [line.split(": ")[-1][:6] for line in lines_after()] == ["detail", "peer s"]


def test_an_unknown_level_is_refused_with_those_allowed(monkeypatch):
    monkeypatch.setenv("EDGE_LOG", "verbose")
    with pytest.raises(ConfigError, match="'verbose'; allowed are debug, info, warning, error"):
        setup_logging()


def test_the_traceback_of_an_error_of_ours_follows_its_event():
    stream = io.StringIO()
    setup_logging(stream=stream)
    try:
        raise ZeroDivisionError("step 7")
    except ZeroDivisionError:
        logging.getLogger("tests.quiet").exception("the engine stopped")
    assert "the engine stopped\nTraceback" in stream.getvalue()


def test_a_long_wait_is_told_of_more_and_more_seldom_and_news_of_it_at_once():
    def told(until_s: int, what) -> list[int]:
        return [now for now in range(1, until_s) if reminder.is_due(now, what(now))]

    reminder = Reminder(0.0)
    assert told(150, lambda now: "n1") == [2, 6, 14, 30, 60, 90, 120]
    assert reminder.is_due(150.0, "n2") and not reminder.is_due(151.0, "n1") and reminder.is_due(152.0, "n1")
    reminder.restart(200.0)
    assert not reminder.is_due(201.0, "n1") and reminder.is_due(202.0, "n1") and reminder.began_s == 200.0
    reminder = Reminder(0.0)
    assert told(9, lambda now: f"{now} MB of 9") == [2, 4, 6, 8]
