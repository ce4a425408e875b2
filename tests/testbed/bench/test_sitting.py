"""The side-by-side benchmark without any peer: prompts, columns, rates, tables, and workers as processes."""

import json
import os
import re
import time

import pytest
from click.testing import CliRunner

from edge_runtime.errors import ClusterError, UserError
from testbed.bench.cli import bench
from testbed.bench.floors import BLOCK_BYTES, Cost
from testbed.bench.peers.engines import Rate, Work, WorkerEngine, process_cpu_s
from testbed.bench.sitting import (
    ENGINES,
    FORMATS,
    Cell,
    Corpus,
    Result,
    Sitting,
    cells_of,
    free_ports,
    joined,
    one_node,
)
from testbed.bench.table import as_json, from_json, number, tables
from testbed.carried import DEMO_MODEL
from topology.cluster import WEIGHT_FORMATS
from topology.parse import parse_cluster
from topology.readers import read_weight_format


@pytest.fixture(scope="module")
def corpus():
    return Corpus(DEMO_MODEL, "The keeper of the lighthouse counted every ship that passed the rocks. " * 20)


def test_no_two_prompts_of_a_sitting_begin_alike(corpus):
    text = Corpus(DEMO_MODEL, " ".join(str(n * n) for n in range(3000)))
    prompts = [tuple(prompt) for turn in range(4) for prompt in text.prompts(16, 32, turn)]
    assert len(set(prompts)) == 64
    assert {len(prompt) for prompt in prompts} == {32}


def test_a_prompt_longer_than_the_text_repeats_it(corpus):
    (prompt,) = corpus.prompts(1, 3000, 1)
    assert len(prompt) == 3000


def test_columns_are_the_batches_and_a_prefill_that_leaves_room_for_a_token():
    sitting = Sitting(DEMO_MODEL, batches=(1, 4), prefill_tokens=512)
    assert [cell.title for cell in cells_of(sitting, 512)] == ["decode 1", "decode 4", "prefill 511"]
    assert cells_of(sitting, 2048)[-1].tokens == 512


def test_our_node_is_one_that_the_runtime_can_read():
    cluster = parse_cluster(one_node(Sitting(DEMO_MODEL), "as_stored", 2, 512, free_ports(2)))
    (node,) = cluster.nodes
    assert (node.threads, node.weight_format, cluster.context_tokens) == (2, "as_stored", 512)
    assert cluster.max_batch_rows == 512


def test_ports_are_free_and_differ():
    assert len(set(free_ports(5))) == 5


def test_processor_time_of_a_process_is_what_it_says_itself():
    before, said = process_cpu_s(os.getpid()), time.process_time()
    assert 0 <= said - before < 0.5


WORKER = """
import sys
from testbed.bench.peers.worker import Moment, Took, serve

class Toy:
    def __init__(self, order):
        print("a library that prints where answers go")
        if order["threads"] > 7:
            print("too many", file=sys.stderr)
            raise SystemExit(3)
        self.facts = {"version": f"toy {order['threads']}"}

    def decode(self, prompts, steps):
        return Took(Moment(1, 1), Moment(3, 2), len(prompts) * steps)

    def prefill(self, prompt):
        return Took(Moment(0, 0), Moment(2, 1), len(prompt))

    def parts(self, order):
        return {"answer": order["ask"] + 1}

serve(Toy)
"""


def started(tmp_path, threads):
    (tmp_path / "toy.py").write_text(WORKER)
    engine = WorkerEngine("toy", (str(tmp_path / "toy.py"),), {"threads": threads})
    return engine.start()


def test_a_worker_tells_its_facts_and_the_rates_of_its_rounds(tmp_path):
    engine = started(tmp_path, 2)
    try:
        assert engine.facts == {"version": "toy 2"}
        assert engine.run(Work("decode", [[1], [2]], 10)) == Rate(10.0, 40.0)
        assert engine.run(Work("prefill", [[1, 2, 3, 4]], 0)) == Rate(2.0, 8.0)
        assert engine.ask({"do": "parts", "ask": 4}) == {"answer": 5}
    finally:
        engine.close()


def test_a_worker_that_ends_is_told_with_its_last_words(tmp_path):
    with pytest.raises(ClusterError, match="toy ended: .*too many"):
        started(tmp_path, 8)


def some_result():
    cells = (Cell("decode", 1, 32), Cell("decode", 8, 32), Cell("prefill", 1, 511))
    result = Result("tiny", "bf16", 1, cells, stream_bps=[9e9, 10e9, 11e9], peak_flops=100e9)
    result.load_average = [0.5, 2.25]
    result.rates = {
        "own": {
            "decode 1": [Rate(100, 200), Rate(110, 220), Rate(90, 180)],
            "decode 8": [Rate(400, 800)],
            "prefill 511": [Rate(1000, 2000)],
        },
        "a": {"decode 1": [Rate(50, 250)], "decode 8": [Rate(200, None)], "prefill 511": [Rate(4000, 4000)]},
        "b": {"decode 1": [Rate(60, 60)]},
    }
    result.costs = {"own": {"decode 1": Cost(40e6, 1e6), "prefill 511": Cost(1e6, 511 * 40e6)}}
    result.distinct_experts = {"decode 1": 4.0}
    result.step_us = {"decode 1": {"plan": 10.4, "experts": 600.0}}
    result.versions = {"own": "ours", "a": "theirs"}
    result.left_out = {"c": "not installed"}
    return result


def rows_of(text):
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line
    ]


def test_rates_stand_side_by_side_with_their_spread():
    rows = rows_of(tables(some_result()))
    assert ["own", "100 (90.0-110)", "400 (400-400)", "1000 (1000-1000)"] in rows
    assert ["a", "250 (250-250)", "", "4000 (4000-4000)"] in rows
    assert ["b", "60.0 (60.0-60.0)", "", ""] in rows


def test_ratios_are_over_the_best_other_engine_of_each_column():
    rows = rows_of(tables(some_result()))
    assert ["own", "1.67 (b)", "2.00 (a)", "0.25 (a)"] in rows
    assert ["own, processor time", "0.80 (a)", "", "0.50 (a)"] in rows


def test_floors_say_what_limits_each_cell():
    rows = rows_of(tables(some_result()))
    assert ["decode 1", "own", "4.0", "40", "250", "80%", "0%", "bandwidth"] in rows
    assert ["prefill 511", "own", "all", "1", "2500", "0%", "80%", "arithmetic"] in rows


def test_the_parts_of_our_step_have_a_table():
    rows = rows_of(tables(some_result()))
    assert rows[rows.index(["cell", "plan", "experts"]) + 2] == ["decode 1", "10", "600"]


def test_every_table_is_whole_and_every_engine_accounted_for():
    text = tables(some_result())
    for block in re.split(r"\n\n", text):
        widths = {len(row) for row in rows_of(block)}
        assert len(widths) <= 1, block
    assert "- a: theirs" in text
    assert "- without c: not installed" in text
    assert "Load average 0.5 to 2.2;" in text


def test_the_json_form_keeps_every_round():
    (found,) = as_json([some_result()])
    assert found["rates"]["own"]["decode 1"][1] == {"wall": 110, "cpu": 220}
    assert found["bytes_and_flops"]["own"]["decode 1"] == [40e6, 1e6]


def test_a_result_comes_back_from_its_json_form():
    (found,) = from_json(json.loads(json.dumps(as_json([some_result()]))))
    assert found == some_result()


def test_pieces_of_a_sitting_are_joined_by_model_format_and_threads():
    first, second, other = some_result(), some_result(), some_result()
    other.threads = 2
    second.rates["c"] = {"decode 1": [Rate(7, 7)]}
    second.left_out = {"d": "gone"}
    second.cells = (*second.cells, Cell("decode", 16, 32))
    whole, apart = joined([first, other, second])
    assert apart == other
    assert whole.rates["own"]["decode 1"] == 2 * some_result().rates["own"]["decode 1"]
    assert whole.rates["c"] == {"decode 1": [Rate(7, 7)]}
    assert whole.left_out == {"d": "gone"}, "c was measured by one piece"
    assert [cell.title for cell in whole.cells] == ["decode 1", "decode 8", "prefill 511", "decode 16"]
    assert len(whole.stream_bps) == 6 and "- without d: gone" in tables(whole)


def test_the_command_joins_what_it_printed_and_refuses_other_files(tmp_path):
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps({"peers": as_json([some_result()])}) + "\n")
    done = CliRunner().invoke(bench, ["--join", str(tmp_path / "a.json"), "--join", str(tmp_path / "b.json")])
    assert done.exit_code == 0 and done.output.count("###") == 1
    assert ["own", "100 (90.0-110)", "400 (400-400)", "1000 (1000-1000)"] in rows_of(done.output)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "there is no result in it"),
        ('{"cells": []}', "the key 'peers' is missing"),
        ("{}", "the key 'peers' is missing"),
        ("[1]", "list indices"),
        ('{"peers": [{"model": "m"}]}', "the key 'format' is missing"),
        ("nonsense", "Expecting value"),
    ],
)
def test_the_command_joins_nothing_that_it_did_not_print(tmp_path, content, why):
    file = tmp_path / "c.json"
    file.write_text(content)
    refused = CliRunner().invoke(bench, ["--join", str(file)])
    assert refused.exit_code == 2 and "c.json is not what" in refused.output and why in refused.output


def test_results_of_other_types_or_without_rounds_are_none(tmp_path):
    (found,) = json.loads(json.dumps(as_json([some_result()])))
    for wrong in ({"threads": "two"}, {"stream_bps": []}, {"left_out": {"a": 3}}):
        with pytest.raises(ValueError):
            from_json([found | wrong])


@pytest.mark.parametrize(("value", "shown"), [(1234.5, "1234"), (99.94, "99.9"), (3.14159, "3.14")])
def test_numbers_have_three_digits_that_count(value, shown):
    assert number(value) == shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--streams", "1,x"], "'1,x' is no list of whole numbers"),
        (["--streams", "0"], "'0' is no list of whole numbers"),
        (["--peers", "--engine", "own,sglang"], "'sglang' is none of own, daemons"),
        (["--peers", "--format", "int3"], "'int3' is none of bf16, bf16x2, int8, int4"),
        (["--rounds", "0"], "0 is not in the range"),
        (["--peers", "--topology", str(DEMO_MODEL / "config.json")], "--topology: not with --peers"),
        (["--engine", "own"], "--engine: for --peers or --step"),
        (["--step", "--rounds", "3"], "--rounds: not with --step"),
        (["--join", str(DEMO_MODEL / "config.json"), "--streams", "1"], "--streams: not with --join"),
        (["--step", "--peers"], "--step and --peers do different things"),
        (["--peers", "--prefill-tokens", "512"], "--prefill-tokens: found 512, expected at most 511"),
        (["--peers", "--max-tokens", "999"], "--max-tokens: found 999, expected at most"),
        (["--step", "--max-tokens", "999"], "--max-tokens: found 999, expected at most"),
    ],
    ids=lambda value: " ".join(map(str, value[:2])) if isinstance(value, list) else "",
)
def test_wrong_options_are_refused_before_anything_starts(arguments, said):
    done = CliRunner().invoke(bench, arguments)
    assert done.exit_code == 2
    assert said in done.output


def test_threads_that_this_machine_cannot_be_asked_for_are_refused():
    for what in ("--peers", "--step"):
        done = CliRunner().invoke(bench, [what, "--threads", "1000"])
        assert "--threads: found 1000, expected a whole number from 1 to" in str(done.exception)


def test_formats_are_called_as_in_a_topology_file():
    formats = next(option.type for option in bench.params if option.name == "formats")
    assert formats.convert("bf16,bfloat16,float32,mxfp4", None, None) == ("bf16", "bf16", "fp32", "mxfp4")
    assert {read_weight_format(name) for name in FORMATS} == {*WEIGHT_FORMATS} - {"as_stored"}
    assert set(BLOCK_BYTES) == set(FORMATS)


def test_the_command_offers_exactly_the_engines_and_formats_that_there_are():
    offered = {option.name: option.type for option in bench.params}
    assert tuple(offered["engines"].known) == ENGINES
    assert tuple(offered["formats"].known) == tuple(FORMATS)


def test_a_python_that_cannot_be_run_is_named(tmp_path):
    (tmp_path / "python").write_text("")
    with pytest.raises(UserError, match=r"python cannot be run \(Permission denied\); name the python of"):
        WorkerEngine("vllm", (), {"threads": 1}, str(tmp_path / "python")).start()
