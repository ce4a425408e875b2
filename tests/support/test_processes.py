"""The tests' own way to run commands: it waits for what it is told to, and leaves nothing behind."""

import signal
import subprocess
import sys

import psutil
import pytest

from tests.support.processes import CliProcess, accepts_connections, free_ports, wait_until_gone


def python(script: str, **options) -> CliProcess:
    return CliProcess("-c", script, program=[sys.executable], **options)


def test_a_line_is_found_whether_it_came_before_or_after_the_question():
    with python("print('ready: 3 nodes'); import sys; print('warned', file=sys.stderr); input()") as process:
        assert process.wait_for_line(r"ready: (\d) nodes")[1] == "3"
        process.wait_for_line("warned")
        process.wait_for_line("ready")


def test_a_line_that_never_comes_fails_with_all_that_was_said():
    with (
        python("print('the port is in use')") as process,
        pytest.raises(AssertionError, match="the port is in use"),
    ):
        process.wait_for_line("ready")


def test_a_command_is_read_to_its_end_on_both_streams():
    with python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)") as process:
        assert process.finish() == (3, "out\n", "err\n")


def test_stopping_takes_along_what_ignores_a_polite_request():
    script = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "print('child', child.pid, flush=True)\n"
        "signal.pause()\n"
    )
    with python(script, stop_deadline_s=0.2) as process:
        child = int(process.wait_for_line(r"child (\d+)")[1])
        process.stop()
    wait_until_gone([process.pid, child])


def test_a_command_that_does_not_end_in_time_is_stopped_and_shown():
    with python("print('waiting for node-7', flush=True); import signal; signal.pause()") as process:
        process.wait_for_line("waiting")
        with pytest.raises(AssertionError, match="waiting for node-7"):
            process.finish(deadline_s=0.1)
    assert not psutil.pid_exists(process.pid)


def test_an_interrupt_reaches_the_command():
    script = (
        "import signal\n"
        "try:\n    print('ready', flush=True)\n    signal.pause()\n"
        "except KeyboardInterrupt:\n    print('interrupted')\n"
    )
    with python(script) as process:
        process.wait_for_line("ready")
        assert process.stop(signal.SIGINT).stdout == "ready\ninterrupted\n"


def test_a_zombie_counts_as_gone():
    child = subprocess.Popen([sys.executable, "-c", ""])
    wait_until_gone([child.pid])
    child.wait()


def test_free_ports_are_different_and_nobody_listens_there():
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert not accepts_connections(ports[0])
