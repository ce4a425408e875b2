"""Topology files: a good one becomes values, a bad one is told all its faults with line and key."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topology.cluster import Cluster, Link, Pin, Routing, find_node, is_loopback, split_address
from topology.errors import ClusterFileError, Fault, TopologyError, UnknownNode
from topology.ids import ExpertId
from topology.parse import parse_cluster

GOOD = """\
[cluster]
name = "home"
model = "models/demo"

[[node]]
name = "desk"
address = "127.0.0.1:6001"
memory = "8 GiB"

[[node]]
name = "attic"
address = "127.0.0.1:6002"
memory = "512 MiB"
roles = ["experts"]
"""

SCRAPS = [
    "",
    "\n",
    '"',
    "[",
    "]",
    "{",
    "}",
    "[[node]]\n",
    "[link]\n",
    "[[pin]]\n",
    'expert = "3.17"\n',
    "node = 3\n",
    "=",
    "#",
    "\\",
    "'",
    '"""',
    "1979-05-27",
]


def faults_of(text: str) -> tuple[Fault, ...]:
    with pytest.raises(ClusterFileError) as error:
        parse_cluster(text, source="home.toml")
    return error.value.faults


def only_fault(text: str) -> Fault:
    (fault,) = faults_of(text)
    return fault


def changed(line: str, into: str) -> str:
    """The good file with one of its lines replaced."""
    assert f"{line}\n" in GOOD
    return GOOD.replace(f"{line}\n", f"{into}\n", 1)


def test_a_short_file_is_filled_up_with_defaults() -> None:
    cluster = parse_cluster(GOOD)
    assert (cluster.name, cluster.model, cluster.coordinator) == ("home", "models/demo", "127.0.0.1:5550")
    assert (cluster.memory_ratio, cluster.keys, cluster.context_tokens) == (2.0, None, None)
    assert (cluster.call_deadline_s, cluster.heartbeat_s, cluster.lost_after_s) == (10.0, 1.0, 5.0)
    assert cluster.weights_rate_bps is None
    assert cluster.process_reserve_bytes == 350 * 2**20
    desk, attic = cluster.nodes
    assert desk.roles == {"prefill", "decode", "experts"} and attic.roles == {"experts"}
    assert (desk.memory_bytes, desk.device, desk.weight_format, desk.threads) == (
        8 * 2**30,
        "cpu",
        "as_stored",
        1,
    )
    assert (desk.host, desk.port, desk.flops, desk.memory_bytes_per_s) == ("127.0.0.1", 6001, None, None)
    assert desk.holds_trunk and desk.hosts_experts and not attic.holds_trunk


def test_every_key_is_read() -> None:
    cluster = parse_cluster("""
[cluster]
name = "every-key"
model = "/models/demo"
coordinator = "10.0.0.1:7000"
memory_ratio = 3
keys = "keys"
process_reserve = "300 MiB"
kv_tokens = 100
max_batch_rows = 64
max_requests = 4
context_tokens = 200
call_deadline = "2 s"
heartbeat = "200 ms"
weights_rate = "80 Mbit/s"
lost_after = "1 s"
[default_node]
memory = "1 GiB"
threads = 4
[default_link]
rtt = "2 ms"
bandwidth = "100 Mbit/s"
[[node]]
name = "a"
address = "10.0.0.1:7001"
device = "cpu"
weight_format = "fp32"
memory_bandwidth = "8 GB/s"
compute = "120 GFLOP/s"
[[node]]
name = "b"
address = "[fd00::2]:7001"
memory = "2 GiB"
threads = 2
[[node]]
name = "c"
address = "attic.local:7001"
roles = ["decode", "experts"]
[[link]]
between = ["b", "a"]
rtt = "5 ms"
""")
    a, b, c = cluster.nodes
    assert (a.memory_bytes, a.threads, a.weight_format, a.memory_bytes_per_s, a.flops) == (
        2**30,
        4,
        "float32",
        8e9,
        1.2e11,
    )
    assert (b.memory_bytes, b.threads, b.host, b.port) == (2**31, 2, "fd00::2", 7001)
    assert c.host == "attic.local"
    assert cluster.link("a", "b") == cluster.link("b", "a") == Link("b", "a", 0.005, 1e8)
    assert cluster.link("a", "c") == Link("a", "c", 0.002, 1e8)
    limits = (cluster.kv_tokens, cluster.max_batch_rows, cluster.max_requests, cluster.context_tokens)
    assert limits == (100, 64, 4, 200)
    assert (cluster.memory_ratio, cluster.keys, cluster.process_reserve_bytes) == (3.0, "keys", 300 * 2**20)
    assert (cluster.call_deadline_s, cluster.heartbeat_s, cluster.lost_after_s) == (2.0, 0.2, 1.0)
    assert cluster.weights_rate_bps == 80e6


@pytest.mark.parametrize(
    ("line", "into", "number", "key", "words"),
    [
        ('name = "home"', 'nme = "home"', 2, "[cluster] nme", 'did you mean "name"?'),
        (
            'model = "models/demo"',
            "model = 3",
            3,
            "[cluster] model",
            "expected text in quotes, found the number 3",
        ),
        ('model = "models/demo"', 'model = ""', 3, "[cluster] model", "found an empty one"),
        ('name = "desk"', 'name = "my desk"', 6, "[[node]] my desk: name", "is not a name"),
        ('name = "desk"', 'name = "coordinator"', 6, "[[node]] coordinator: name", "is reserved"),
        ('name = "attic"', 'name = "desk"', 11, "[[node]] desk: name", "already taken in line 6"),
        ('memory = "8 GiB"', 'memory = "8 Gib"', 8, "[[node]] desk: memory", 'did you mean "8 GiB"?'),
        (
            'memory = "8 GiB"',
            "memory = 8000000000",
            8,
            "[[node]] desk: memory",
            'with its unit in quotes, as in "8 GiB"',
        ),
        ('memory = "8 GiB"', 'memory = "0 GiB"', 8, "[[node]] desk: memory", "not more than 0"),
        ('memory = "8 GiB"', 'memory = "350 MiB"', 8, "[[node]] desk: memory", "350.0 MiB reserved"),
        ('memory = "8 GiB"', "", 5, "[[node]] desk: memory", "missing"),
        (
            'address = "127.0.0.1:6001"',
            'address = "127.0.0.1:0"',
            7,
            "[[node]] desk: address",
            "from 1 to 65535",
        ),
        (
            'address = "127.0.0.1:6001"',
            'address = "127.0.0.1:65536"',
            7,
            "[[node]] desk: address",
            "port 65536",
        ),
        (
            'address = "127.0.0.1:6001"',
            'address = "127.0.0.1"',
            7,
            "[[node]] desk: address",
            "write host:port",
        ),
        (
            'address = "127.0.0.1:6001"',
            'address = "0.0.0.0:6001"',
            7,
            "[[node]] desk: address",
            "peers can reach",
        ),
        (
            'address = "127.0.0.1:6001"',
            'address = "10.0.0.9:6001"',
            7,
            "[[node]] desk: address",
            "edge-runtime keys new",
        ),
        (
            'address = "127.0.0.1:6002"',
            'address = "localhost:6001"',
            12,
            "[[node]] attic: address",
            "taken in line 7",
        ),
        (
            'address = "127.0.0.1:6001"',
            'address = "127.0.0.1:5550"',
            7,
            "[[node]] desk: address",
            "[cluster] coordinator",
        ),
        ('roles = ["experts"]', 'roles = ["expert"]', 14, "[[node]] attic: roles", 'did you mean "experts"?'),
        (
            'roles = ["experts"]',
            'roles = "experts"',
            14,
            "[[node]] attic: roles",
            "expected an array of roles",
        ),
        ('roles = ["experts"]', "roles = []", 14, "[[node]] attic: roles", "at least one of"),
        (
            'roles = ["experts"]',
            'weight_format = "int3"',
            14,
            "[[node]] attic: weight_format",
            "use as_stored, bfloat16, bfloat16x2",
        ),
        ('roles = ["experts"]', 'device = "tpu"', 14, "[[node]] attic: device", "use cpu, cuda or cuda:N"),
        ('roles = ["experts"]', 'device = "cuda:x"', 14, "[[node]] attic: device", "use cpu, cuda or cuda:N"),
        (
            'roles = ["experts"]',
            "threads = 0",
            14,
            "[[node]] attic: threads",
            "from 1 to 1024, found the number 0",
        ),
        ('roles = ["experts"]', "threads = true", 14, "[[node]] attic: threads", "found the boolean true"),
        ('roles = ["experts"]', "threads = 1.5", 14, "[[node]] attic: threads", "found the number 1.5"),
        (
            'name = "home"',
            'name = "home"\nmemory_ratio = 0.9',
            3,
            "[cluster] memory_ratio",
            "(each expert once) to 1000",
        ),
        (
            'name = "home"',
            'name = "home"\nplacement = "similar"',
            3,
            "[cluster] placement",
            'did you mean "similarity"',
        ),
        ('name = "home"', 'name = "home"\nmemory_ratio = nan', 3, "[cluster] memory_ratio", "to 1000"),
        ('name = "home"', 'name = "home"\nmemory_ratio = 1e308', 3, "[cluster] memory_ratio", "to 1000"),
        ('roles = ["experts"]', "threads = 9223372036854775807", 14, "[[node]] attic: threads", "to 1024"),
        (
            'name = "home"',
            'name = "home"\nkv_tokens = 99999999999999999999',
            3,
            "[cluster] kv_tokens",
            "to 1000000000",
        ),
        ('name = "attic"', 'name = "drain"', 11, "[[node]] drain: name", "is reserved"),
        (
            'name = "home"',
            'name = "home"\ncall_deadline = "10"',
            3,
            "[cluster] call_deadline",
            "is not a duration",
        ),
        ('name = "home"', 'name = "home"\nlost_after = "2 s"', 3, "[cluster] lost_after", "more than two"),
        ('name = "home"', 'name = "home"\nkv_tokens = {}', 3, "[cluster] kv_tokens", "found a table"),
    ],
)
def test_one_fault_is_told_with_its_line_and_key(
    line: str, into: str, number: int, key: str, words: str
) -> None:
    faults = faults_of(changed(line, into))
    fault = next(fault for fault in faults if words in fault.message)
    assert (fault.line, fault.key) == (number, key)
    # Leaving a key out by misspelling it makes two faults, all else one.
    assert len(faults) == 1 or "unknown key" in fault.message


@pytest.mark.parametrize(
    ("extra", "line", "key", "words"),
    [
        ("[[nodes]]", 16, "", 'unknown table "nodes" (did you mean "node"?)'),
        ('[[link]]\nbetween = ["desk", "atic"]', 17, "[[link]] number 1: between", 'did you mean "attic"?'),
        ('[[link]]\nbetween = ["desk", "desk"]', 17, "[[link]] number 1: between", '"desk" twice'),
        ('[[link]]\nbetween = ["desk"]', 17, "[[link]] number 1: between", "names of two nodes"),
        ('[[link]]\nrtt = "1 ms"', 16, "[[link]] number 1: between", "missing"),
        (
            '[[link]]\nbetween = ["desk", "attic"]\n[[link]]\nbetween = ["attic", "desk"]',
            19,
            "[[link]] number 2: between",
            "already taken in line 17",
        ),
        ('[default_link]\nbandwidth = "1 GB"', 17, "[default_link] bandwidth", "is not a rate"),
        ("[[default_node]]", 16, "[default_node]", "with one pair of brackets"),
        ('[default_node]\nname = "x"', 17, "[default_node] name", "unknown key"),
    ],
)
def test_faults_of_other_tables_are_told_too(extra: str, line: int, key: str, words: str) -> None:
    fault = only_fault(f"{GOOD}\n{extra}\n")
    assert (fault.line, fault.key) == (line, key)
    assert words in fault.message


def test_a_key_above_every_table_is_told() -> None:
    fault = only_fault(f"nam = 1\n{GOOD}")
    assert (fault.line, fault.key) == (1, "") and "outside every table" in fault.message


@pytest.mark.parametrize("table", ["cluster", "node", "link", "default_node", "default_link"])
@pytest.mark.parametrize("value", ["3", '"x"', "[1]", "true"])
def test_a_table_that_is_no_table_is_told(table: str, value: str) -> None:
    text = f"{table} = {value}\n" + GOOD.replace(f"[[{table}]]", "[[other]]").replace(f"[{table}]", "[other]")
    assert any(fault.line == 1 and f"[{table}]" in fault.message for fault in faults_of(text))


def test_a_single_pair_of_brackets_around_node_is_told_once() -> None:
    single = '[cluster]\nname = "c"\nmodel = "m"\n[node]\nname = "a"\n'
    fault = only_fault(single)
    assert fault.line == 4 and "write [[node]]" in fault.message


@pytest.mark.parametrize("empty", ["", "\n\n", "# only words\n"])
def test_an_empty_file_says_what_it_needs(empty: str) -> None:
    fault = only_fault(empty)
    assert fault.line == 1 and "the file is empty" in fault.message and "[[node]]" in fault.message


def test_a_file_without_nodes_or_cluster_says_so() -> None:
    assert "there is no [[node]]" in only_fault('[cluster]\nname = "c"\nmodel = "m"\n').message
    assert len(faults_of('[cluster]\nname = "c"\nmodel = "m"\n[default_node]\nthreads = 0\n')) == 2
    assert "there is no table [cluster]" in only_fault(GOOD[GOOD.index("[[node]]") :]).message


def test_a_syntax_error_has_its_line() -> None:
    fault = only_fault(changed('name = "desk"', 'name = "desk'))
    assert fault.line == 6 and "not valid TOML, at column" in fault.message
    assert only_fault(GOOD + "\n[cluster]\n").line == 16
    assert only_fault(GOOD + "roles = [\n").line == 15


def test_a_cluster_that_nobody_decodes_in_is_refused() -> None:
    fault = only_fault(changed('memory = "8 GiB"', 'memory = "8 GiB"\nroles = ["prefill", "experts"]'))
    assert 'no node has the role "decode"' in fault.message and fault.line == 9


def test_a_cluster_without_expert_hosts_is_refused() -> None:
    text = GOOD.replace('roles = ["experts"]', 'roles = ["decode"]').replace(
        "8 GiB", '8 GiB"\nroles = ["decode"]#'
    )
    assert 'no node has the role "experts"' in only_fault(text).message


def test_all_faults_are_told_at_once_in_the_order_of_their_lines() -> None:
    text = (
        GOOD.replace("6002", "99999")
        .replace("512 MiB", "5 MB")
        .replace("models/demo", " ")
        .replace('"8 GiB"', "8")
    )
    with pytest.raises(ClusterFileError) as error:
        parse_cluster(text, source="home.toml")
    assert [fault.line for fault in error.value.faults] == [3, 8, 12, 13]
    assert str(error.value).startswith("home.toml has 4 faults:\n  line 3, [cluster] model: ")
    assert str(error.value).count("\n") == 4


def test_a_single_fault_is_one_sentence() -> None:
    with pytest.raises(ClusterFileError) as error:
        parse_cluster(changed("[cluster]", "[cluster]\nkv_tokens = 0"), source="home.toml")
    assert (
        str(error.value)
        == "home.toml, line 2, [cluster] kv_tokens: expected a whole number from 1 to 1000000000, found 0"
    )


@pytest.mark.parametrize(("short", "full"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
def test_short_names_of_weight_formats_are_understood(short: str, full: str) -> None:
    for written in (short, full):
        nodes = parse_cluster(
            changed('memory = "512 MiB"', f'memory = "1 GiB"\nweight_format = "{written}"')
        ).nodes
        assert nodes[1].weight_format == full


def test_a_fault_in_a_default_is_told_once_and_not_for_each_node() -> None:
    assert only_fault(f'{GOOD}\n[default_node]\nmemory = "lots"\n').line == 17


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, len(GOOD)), st.integers(0, 12), st.sampled_from(SCRAPS)),
        min_size=1,
        max_size=3,
    )
)
def test_a_file_damaged_anywhere_is_read_or_refused_but_nothing_else(
    damage: list[tuple[int, int, str]],
) -> None:
    text = GOOD
    for at, length, scrap in damage:
        text = text[:at] + scrap + text[at + length :]
    try:
        parse_cluster(text)
    except ClusterFileError as error:
        assert all(1 <= fault.line <= text.count("\n") + 1 and fault.message for fault in error.faults)


def test_numbers_and_nestings_beyond_all_measure_are_faults() -> None:
    assert "not valid TOML, a number has more than 4300 digits" in only_fault(f"a = {'9' * 5000}").message
    assert "not valid TOML, it is nested too deeply" in only_fault(f"a = {'[' * 5000}{']' * 5000}").message


def test_keys_allow_addresses_that_others_can_reach() -> None:
    text = GOOD.replace("127.0.0.1:6001", "10.0.0.9:6001").replace("[cluster]", '[cluster]\nkeys = "keys"')
    assert parse_cluster(text).nodes[0].host == "10.0.0.9"


def test_a_folder_that_will_not_do_is_a_fault_among_the_others() -> None:
    def nowhere(folder: str) -> str:
        raise ValueError(f"there is no folder {folder}")

    with pytest.raises(ClusterFileError) as error:
        parse_cluster(GOOD.replace("6002", "0"), find_model=nowhere)
    assert [(fault.line, fault.key) for fault in error.value.faults] == [
        (3, "[cluster] model"),
        (12, "[[node]] attic: address"),
    ]


def test_an_unknown_node_is_answered_with_the_names_there_are() -> None:
    cluster = parse_cluster(GOOD)
    assert find_node(cluster, "attic").name == "attic"
    with pytest.raises(
        UnknownNode, match=r'no node is called "atic" \(did you mean "attic"\?\).*desk, attic'
    ):
        find_node(cluster, "atic")
    assert issubclass(UnknownNode, TopologyError) and issubclass(ClusterFileError, TopologyError)


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1:1", True),
        ("127.8.8.8:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("192.168.0.4:1", False),
        ("attic.local:1", False),
        ("[fd00::1]:1", False),
    ],
)
def test_loopback_is_told_from_what_others_can_reach(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


def test_an_address_is_split_at_its_last_colon() -> None:
    assert split_address("[::1]:5551") == ("::1", 5551)


def test_a_cluster_is_a_value() -> None:
    assert parse_cluster(GOOD) == parse_cluster(GOOD)
    assert isinstance(hash(parse_cluster(GOOD)), int) and isinstance(parse_cluster(GOOD), Cluster)


def test_pins_name_an_expert_in_either_way() -> None:
    pins = """
[[pin]]
expert = "3.17"
node = "attic"

[[pin]]
layer = 0
index = 2
node = "desk"
"""
    found = parse_cluster(GOOD + pins).pins
    assert found == (Pin(ExpertId(3, 17), "attic"), Pin(ExpertId(0, 2), "desk"))
    assert parse_cluster(GOOD).pins == ()


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ('expert = "3.17"', "missing; write it as in node = "),
        ('node = "desk"', 'which expert is missing; write expert = "3.17", or layer = 3 and index = 17'),
        ('layer = 3\nnode = "desk"', "which expert is missing"),
        ('expert = "3.17"\nlayer = 3\nnode = "desk"', "write either expert, or layer and index"),
        (
            'expert = "3-17"\nnode = "desk"',
            'expected layer and index in quotes, as in "3.17", found the text "3-17"',
        ),
        (
            'expert = 3.17\nnode = "desk"',
            'expected layer and index in quotes, as in "3.17", found the number 3.17',
        ),
        ('layer = -1\nindex = 0\nnode = "desk"', "expected a whole number from 0 on, found -1"),
        (
            'layer = 1\nindex = true\nnode = "desk"',
            "expected a whole number from 0 on, found the boolean true",
        ),
        (
            'expert = "3.17"\nnode = "dsk"',
            'no node is called "dsk" (did you mean "desk"?); there are desk, attic',
        ),
        (
            'expert = "3.17"\nnode = "talker"',
            'talker does not have the role "experts", so it can hold no expert',
        ),
    ],
)
def test_a_pin_that_means_nothing_is_one_fault(pin: str, message: str) -> None:
    talker = '[[node]]\nname = "talker"\naddress = "127.0.0.1:6003"\nmemory = "8 GiB"\nroles = ["decode"]\n'
    text = GOOD + (talker if "talker" in message else "") + "[[pin]]\n" + pin
    assert message in only_fault(text).message


def test_a_pin_that_stands_twice_is_told_with_the_first_line() -> None:
    twice = '[[pin]]\nexpert = "3.17"\nnode = "desk"\n[[pin]]\nlayer = 3\nindex = 17\nnode = "desk"\n'
    fault = only_fault(GOOD + twice)
    assert "pin of expert 3.17 on desk is already taken in line 15" in fault.message and fault.line == 18
    elsewhere = twice.replace('index = 17\nnode = "desk"', 'index = 17\nnode = "attic"')
    assert len(parse_cluster(GOOD + elsewhere).pins) == 2


def test_the_plan_is_one_of_the_words_there_are() -> None:
    assert parse_cluster(GOOD).plan == "home"
    assert parse_cluster(changed('name = "home"', 'name = "home"\nplan = "auto"')).plan == "auto"
    fault = only_fault(changed('name = "home"', 'name = "home"\nplan = "stage"'))
    assert (
        'plan "stage" is not supported (did you mean "stages"?); use home, solo, stages, auto'
        in fault.message
    )


def test_a_number_of_stages_is_from_2_to_8_and_of_the_plan_stages_alone() -> None:
    assert parse_cluster(changed('name = "home"', 'name = "home"\nplan = "stages"\nstages = 3')).stages == 3
    for wrong in (1, 9):
        text = changed('name = "home"', f'name = "home"\nplan = "stages"\nstages = {wrong}')
        assert only_fault(text).message == f"{wrong} stages; give 2 to 8"
    fault = only_fault(changed('name = "home"', 'name = "home"\nstages = 3'))
    assert fault.message == 'counts only with plan = "stages"'


def test_routing_has_its_defaults_and_can_be_told_otherwise():
    assert parse_cluster(GOOD).routing == Routing()
    text = GOOD + '\n[routing]\npolicy = "eldr"\ntau = 0.2\nmin_candidates = 2\ncount_transfer = false\n'
    routing = parse_cluster(text).routing
    assert (routing.policy, routing.tau, routing.min_candidates, routing.count_transfer) == (
        "eldr",
        0.2,
        2,
        False,
    )
    assert str(routing) == "eldr, tau 0.2, min_candidates 2, count_transfer False"
    text = changed('name = "home"', 'name = "home"\nsub_experts = true')
    text += '\n[routing]\nlanes = true\nlane_share = 0.3\nlane_window = 3\nlane_dwell = "500 ms"\n'
    found = parse_cluster(text, source="a.toml")
    routing = found.routing
    line = text.splitlines().index("lane_window = 3") + 1
    assert found.at_routing("lane_window") == f"a.toml, line {line}, [routing] lane_window"
    assert found.at_routing("tau") == "a.toml, [routing] tau", "it does not stand there"
    assert found == parse_cluster("\n" + text, source="a.toml"), "where it stands changes nothing"
    assert (routing.lanes, routing.lane_share, routing.lane_window) == (True, 0.3, 3)
    assert (routing.lane_dwell_s, routing.lane_freeze_s, routing.lane_ratio) == (0.5, 5.0, 1.25)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('policy = "elder"', 'did you mean "eldr"'),
        ("tau = 1.5", "from 0 (best match alone) to 1 (load alone), found 1.5"),
        ("tau = true", "found the boolean true"),
        ("min_candidates = 0", "from 1"),
        ('count_speed = "yes"', "expected true or false"),
        ("policies = 1", "unknown key"),
        ("lanes = true", "lanes are of tiers, so they need sub_experts = true in [cluster]"),
        ("lane_share = 1.0", "between 0 and 1"),
        ("lane_share = 0.3", "counts only with lanes = true"),
        ('lane_dwell = "1 s"', "counts only with lanes = true"),
        ("lane_ratio = 1", "above 1"),
        ("lane_window = 0", "from 1"),
        ("lane_dwell = 2", "with its unit"),
    ],
)
def test_routing_that_cannot_be_is_refused_with_its_line(line, told):
    with pytest.raises(ClusterFileError) as caught:
        parse_cluster(f"{GOOD}\n[routing]\n{line}\n")
    [fault] = caught.value.faults
    assert told in fault.message and fault.line == GOOD.count("\n") + 3


@pytest.mark.parametrize(
    ("edit", "key"),
    [
        (("device", 'weight_format = "bfloat16x2"\ndevice'), "weight_format"),
        (("[cluster]", '[cluster]\nsub_experts = true\ngate = "linear"'), "device"),
    ],
)
def test_what_no_gpu_does_is_told_of_the_file(edit: tuple[str, str], key: str) -> None:
    text = """[cluster]
name = "a"
model = "m"
[[node]]
name = "tower"
address = "127.0.0.1:5551"
memory = "2 GiB"
device = "cuda"
"""
    with pytest.raises(ClusterFileError) as refused:
        parse_cluster(text.replace(*edit, 1), source="topology.toml")
    assert [fault.key for fault in refused.value.faults] == [f"[[node]] tower: {key}"]
