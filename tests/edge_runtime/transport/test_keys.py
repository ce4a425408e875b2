import shutil
import stat
import threading

import pytest

from edge_runtime.clock import SystemClock
from edge_runtime.errors import ConfigError, DeadlinePassed
from edge_runtime.protocol import Hello, Stop, Welcome
from edge_runtime.transport.endpoint import Channel, Server
from edge_runtime.transport.keys import is_loopback, load_keys, new_keys, require_keys_for
from tests.support.handshakes import Recorder, is_no_answer, replayed

SOON_S = 5.0


@pytest.fixture
def folder(tmp_path):
    new_keys(tmp_path / "keys", ["n1", "n2"])
    return tmp_path / "keys"


@pytest.fixture
def server(folder):
    with Server("127.0.0.1:0", keys=load_keys(folder, "n1")) as server:
        yield server


def stranger(tmp_path):
    new_keys(tmp_path / "strange", ["x"])
    return load_keys(tmp_path / "strange", "x")


def test_a_secret_is_readable_by_its_owner_only_and_never_shown(folder):
    assert stat.S_IMODE((folder / "n1.key_secret").stat().st_mode) == 0o600
    keys = load_keys(folder, "n1")
    assert keys.secret.decode() not in repr(keys)
    assert sorted(keys.peers) == ["n1", "n2"]


def test_keys_are_never_overwritten_and_then_none_is_written(folder):
    before = (folder / "n2.key").read_bytes()
    with pytest.raises(ConfigError, match="n2.key exists"):
        new_keys(folder, ["n3", "n2"])
    assert (folder / "n2.key").read_bytes() == before
    assert not (folder / "n3.key").exists()


@pytest.mark.parametrize("name", ["", "../n1", "a/b", ".hidden", "x" * 101, "n 1"])
def test_a_name_that_could_leave_the_folder_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot name a key"):
        new_keys(tmp_path, [name])


def test_a_missing_secret_says_how_to_make_it(folder):
    with pytest.raises(ConfigError, match="edge-runtime keys new n7"):
        load_keys(folder, "n7")


def test_a_secret_open_to_others_is_refused(folder):
    (folder / "n1.key_secret").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_keys(folder, "n1")


@pytest.mark.parametrize("content", [b"", b"short", b"\x00" * 40, b"x" * 4000])
def test_a_damaged_key_file_is_named(folder, content):
    (folder / "n2.key").write_bytes(content)
    with pytest.raises(ConfigError, match=r"n2\.key does not hold a key"):
        load_keys(folder, "n1")


def test_halves_that_do_not_belong_together_are_told(folder):
    (folder / "n1.key").write_bytes((folder / "n2.key").read_bytes())
    with pytest.raises(ConfigError, match="not the public half"):
        load_keys(folder, "n1")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:5551", True),
        ("tcp://127.9.9.9:5551", True),
        ("localhost:5551", True),
        ("[::1]:5551", True),
        ("ipc:///tmp/x", True),
        ("0.0.0.0:5551", False),
        ("*:5551", False),
        ("[::]:5551", False),
        ("10.0.0.4:5551", False),
        ("example.org:5551", False),
        ("localhost.example.org:5551", False),
    ],
)
def test_only_loopback_may_do_without_keys(address, expected, folder):
    assert is_loopback(address) is expected
    require_keys_for(address, load_keys(folder, "n1"))
    if expected:
        require_keys_for(address, None)
    else:
        with pytest.raises(ConfigError, match="keys"):
            require_keys_for(address, None)


def test_a_server_refuses_to_listen_openly_without_keys():
    with pytest.raises(ConfigError, match="edge-runtime keys new"):
        Server("0.0.0.0:0")
    with pytest.raises(ConfigError, match="edge-runtime keys new"):
        Channel("10.0.0.4:5551")


def test_good_keys_pass_and_the_server_knows_whose_they_are(folder, server):
    with Channel(server.address, name="n1", keys=load_keys(folder, "n2")) as channel:
        assert channel.wait_until_up(SOON_S)
        channel.send(Stop("hello"))
        peer, envelope = server.receive(SOON_S)
        assert envelope.message == Stop("hello")
        assert server.key_owner == "n2"
        server.send(peer, Stop("back"))
        assert channel.receive(SOON_S).message == Stop("back")


def reaches_nothing(channel, server):
    with channel, pytest.raises(DeadlinePassed) as caught:
        channel.request(Hello("x"), Welcome, 0.3)
    assert server.receive(0.05) is None
    return str(caught.value)


def test_a_stranger_gets_nothing(folder, server, tmp_path):
    public = load_keys(folder, "n1").public
    message = reaches_nothing(
        Channel(server.address, name="n1", keys=stranger(tmp_path), server_key=public), server
    )
    assert "key handshake failed" in message


def test_a_peer_with_the_wrong_server_key_gets_nothing(folder, server):
    message = reaches_nothing(Channel(server.address, name="n2", keys=load_keys(folder, "n2")), server)
    assert "n2 at" in message


def test_a_peer_without_keys_gets_nothing(server):
    assert "it wants keys" in reaches_nothing(Channel(server.address, name="n1"), server)


def test_a_peer_with_keys_at_a_server_without_gets_nothing(folder):
    with Server("127.0.0.1:0") as server:
        reaches_nothing(Channel(server.address, name="n1", keys=load_keys(folder, "n2")), server)


def test_a_handshake_that_is_replayed_gets_nothing_and_nobody_hears_its_message(folder, server):
    """Every byte that a good client sent, once more: the server's answers are other ones by then."""
    recorder = Recorder(server.address)
    with Channel(recorder.address, name="n1", keys=load_keys(folder, "n2")) as channel:
        assert channel.wait_until_up(SOON_S)
        channel.send(Stop("once"))
        assert server.receive(SOON_S)[1].message == Stop("once")
    recorder.close()
    assert len(recorder.sent) > 500
    assert is_no_answer(replayed(server.address, recorder.sent))
    assert server.receive(0.2) is None
    with Channel(server.address, name="n1", keys=load_keys(folder, "n2")) as channel:
        assert channel.wait_until_up(SOON_S)


def test_strangers_do_not_disturb_a_peer_with_good_keys(folder, server, tmp_path):
    intruder = Channel(server.address, keys=stranger(tmp_path), server_key=load_keys(folder, "n1").public)
    with intruder, Channel(server.address, name="n1", keys=load_keys(folder, "n2")) as channel:
        assert channel.wait_until_up(SOON_S)
        channel.send(Stop("still here"))
        assert server.receive(SOON_S)[1].message == Stop("still here")


def test_a_peer_without_a_known_key_is_named(folder):
    with pytest.raises(ConfigError, match="no key of 'n9'; known are n1, n2"):
        Channel("127.0.0.1:5551", name="n9", keys=load_keys(folder, "n1"))


def test_two_keyed_servers_live_in_one_process(folder, server):
    n1, n2 = load_keys(folder, "n1"), load_keys(folder, "n2")
    with Server("127.0.0.1:0", keys=n2) as other, Channel(other.address, name="n2", keys=n1) as channel:
        assert channel.wait_until_up(SOON_S)


# Rotation: keys come and go while everybody runs.


def until(found):
    """The first true answer; how often is asked does not matter, since the deadline is far."""
    clock, deadline = SystemClock(), SystemClock().now() + 2 * SOON_S
    while not (answer := found()):
        assert clock.now() < deadline, "it did not happen in time"
    return answer


def talks(channel, server, word):
    """A message goes through on this very connection, and an answer comes back."""
    assert channel.send(Stop(word))
    peer, envelope = until(lambda: server.receive(0.05))
    assert envelope.message == Stop(word)
    assert server.send(peer, Stop("yes"))
    assert channel.receive(SOON_S).message == Stop("yes")


def newcomer(tmp_path, folder, name="n9"):
    """Another machine's folder: its own pair, and the public key of n1."""
    new_keys(tmp_path / name, [name])
    shutil.copy(folder / "n1.key", tmp_path / name / "n1.key")
    return tmp_path / name


def test_a_new_key_is_let_in_by_a_server_that_runs_and_by_a_channel_that_was_refused_before(
    folder, server, tmp_path
):
    theirs = newcomer(tmp_path, folder)
    with Channel(server.address, name="n1", keys=load_keys(theirs, "n9")) as channel:
        until(lambda: not channel.is_up() and "handshake failed" in channel.why_unreachable())
        shutil.copy(theirs / "n9.key", folder / "n9.key")
        until(lambda: channel.wait_until_up(0.05))
        talks(channel, server, "let in")
        assert server.key_owner == "n9"


def test_a_removed_key_keeps_its_connection_and_gets_no_other(folder, server, tmp_path):
    theirs = newcomer(tmp_path, folder)
    shutil.copy(theirs / "n9.key", folder / "n9.key")
    keys = load_keys(theirs, "n9")
    with Channel(server.address, name="n1", keys=keys) as channel:
        assert channel.wait_until_up(SOON_S)
        (folder / "n9.key").unlink()
        talks(channel, server, "still connected")
    reaches_nothing(Channel(server.address, name="n1", keys=keys), server)


def test_a_replaced_key_is_another_key(folder, server, tmp_path):
    old = load_keys(folder, "n2")
    new_keys(tmp_path / "new", ["n2"])
    shutil.copy(tmp_path / "new" / "n2.key", folder / "n2.key")
    reaches_nothing(Channel(server.address, keys=old, server_key=old.of_peer("n1")), server)
    new = load_keys(tmp_path / "new", "n2")
    with Channel(server.address, keys=new, server_key=old.of_peer("n1")) as channel:
        assert channel.wait_until_up(SOON_S)
        talks(channel, server, "the new one")
        assert server.key_owner == "n2"


def test_the_old_key_and_the_next_one_are_good_together_and_are_one_owners(folder, server, tmp_path):
    new_keys(tmp_path / "new", ["n2"])
    shutil.copy(tmp_path / "new" / "n2.key", folder / "n2+next.key")
    expected = load_keys(folder, "n1").public
    for keys in (load_keys(folder, "n2"), load_keys(tmp_path / "new", "n2")):
        with Channel(server.address, keys=keys, server_key=expected) as channel:
            assert channel.wait_until_up(SOON_S)
            talks(channel, server, "one of two")
            assert server.key_owner == "n2"


def test_a_nodes_own_next_key_is_as_good_as_its_first(folder, tmp_path):
    new_keys(tmp_path / "new", ["n1"])
    shutil.copy(tmp_path / "new" / "n1.key", folder / "n1+next.key")
    shutil.copy(tmp_path / "new" / "n1.key_secret", folder / "n1.key_secret")
    assert load_keys(folder, "n1").public == load_keys(tmp_path / "new", "n1").public


def test_a_channel_finds_a_server_that_came_back_with_its_next_key(folder, tmp_path):
    """The order of a rotation at its worst: the server is back before its peers know its key."""
    keys = load_keys(folder, "n2")
    with Server("127.0.0.1:0", keys=load_keys(folder, "n1")) as server:
        address = server.address
        channel = Channel(address, name="n1", keys=keys)
        assert channel.wait_until_up(SOON_S)
        talks(channel, server, "before")
    new_keys(tmp_path / "new", ["n1"])
    shutil.copy(folder / "n2.key", tmp_path / "new" / "n2.key")
    with channel, Server(address, keys=load_keys(tmp_path / "new", "n1")) as server:
        until(channel.is_lost)
        channel.reconnect()
        assert not channel.wait_until_up(0.2)
        shutil.copy(tmp_path / "new" / "n1.key", folder / "n1.key")
        until(lambda: channel.wait_until_up(0.05))
        talks(channel, server, "after")


def test_a_channel_whose_peers_key_was_removed_goes_on_with_the_last_one(folder, server):
    with Channel(server.address, name="n1", keys=load_keys(folder, "n2")) as channel:
        assert channel.wait_until_up(SOON_S)
        (folder / "n1.key").unlink()
        channel.reconnect()
        assert channel.wait_until_up(SOON_S)


def test_a_key_that_is_damaged_while_everybody_runs_is_no_key_and_hurts_no_other(folder, server, caplog):
    keys = load_keys(folder, "n2")
    (folder / "n9.key").write_bytes(b"half a key")
    with Channel(server.address, name="n1", keys=keys) as channel:
        assert channel.wait_until_up(SOON_S)
        talks(channel, server, "good")
    assert "n9.key does not hold a key" in caplog.text


def test_a_folder_that_is_gone_lets_nobody_in_and_comes_back(folder, server):
    keys = load_keys(folder, "n2")
    expected = keys.of_peer("n1")
    folder.rename(folder.with_name("elsewhere"))
    reaches_nothing(Channel(server.address, keys=keys, server_key=expected), server)
    folder.with_name("elsewhere").rename(folder)
    with Channel(server.address, keys=keys, server_key=expected) as channel:
        assert channel.wait_until_up(SOON_S)


def test_keys_that_change_all_the_time_never_disturb_who_is_good(folder, server, tmp_path):
    new_keys(tmp_path / "new", [f"x{index}" for index in range(20)])
    stop = threading.Event()

    def churn():
        while not stop.is_set():
            for path in (tmp_path / "new").glob("*.key"):
                shutil.copy(path, folder / path.name)
            for path in folder.glob("x*.key"):
                path.unlink()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(20):
            with Channel(server.address, name="n1", keys=load_keys_whatever(folder)) as channel:
                assert channel.wait_until_up(SOON_S)
    finally:
        stop.set()
        thread.join()


def load_keys_whatever(folder):
    """Keys of n2, once no file is half written."""

    def loaded():
        try:
            return load_keys(folder, "n2")
        except (ConfigError, OSError):
            return None

    return until(loaded)
