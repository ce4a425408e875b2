"""Accounts of gate weight against a plain loop, and what is made of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.engine.bill import (
    Account,
    ServedWeight,
    StagesAccounts,
    bill_of,
    joined_accounts,
    served_in_stages,
)

NUM_HOSTS = 3
HOSTS = [f"n{i}" for i in range(NUM_HOSTS)]


@st.composite
def steps(draw) -> list:
    """Steps of (request ids, row_request [T], layers), a layer being (hosts [T, K], weights [T, K]) or a local one."""
    found = []
    for _ in range(draw(st.integers(0, 4))):
        ids = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True))
        counts = [draw(st.integers(1, 3)) for _ in ids]
        rows = np.repeat(np.arange(len(ids), dtype=np.int32), counts)
        layers = []
        for _ in range(draw(st.integers(0, 3))):
            shape = (len(rows), 2)
            hosts = draw(
                st.lists(st.integers(-1, NUM_HOSTS - 1), min_size=len(rows) * 2, max_size=len(rows) * 2)
            )
            weights = draw(
                st.lists(st.floats(0, 1, width=32), min_size=len(rows) * 2, max_size=len(rows) * 2)
            )
            layers.append(
                (np.array(hosts, np.int32).reshape(shape), np.array(weights, np.float32).reshape(shape))
            )
        found.append((ids, rows, layers, draw(st.integers(0, 2))))
    return found


@given(steps(), st.sets(st.sampled_from("abcd")))
def test_accounts_are_those_of_a_plain_loop(steps, taken_between):
    served = ServedWeight(NUM_HOSTS)
    expected: dict[str, np.ndarray] = {}
    for number, (ids, rows, layers, local_layers) in enumerate(steps):
        served.begin_step(rows, len(ids))
        for hosts, weights in layers:
            served.add_layer(hosts, weights)
        served.add_local_layers(local_layers, 2)
        served.end_step(ids)
        for row, request in enumerate(rows):
            account = expected.setdefault(ids[request], np.zeros((2, NUM_HOSTS)))
            account[0, 0] += local_layers
            account[1, 0] += 2 * local_layers
            for hosts, weights in layers:
                for host, weight in zip(hosts[row], weights[row], strict=True):
                    if host >= 0:
                        account[:, host] += (weight, 1)
        if number == 1:
            for name in taken_between:
                np.testing.assert_allclose(
                    served.take(name), expected.pop(name, np.zeros((2, NUM_HOSTS))), atol=1e-12
                )
    assert len(served) == len(expected)
    for name in "abcd":
        np.testing.assert_allclose(
            served.take(name), expected.get(name, np.zeros((2, NUM_HOSTS))), atol=1e-12
        )
    assert len(served) == 0


@given(st.lists(st.floats(0, 1e6), min_size=NUM_HOSTS, max_size=NUM_HOSTS))
def test_the_shares_of_a_bill_sum_to_one_or_nothing_was_served(weights):
    served = np.array([weights, [4.0] * NUM_HOSTS])
    bill, slots = bill_of(Account(served, HOSTS))
    shares = ("exact_here", "exact_elsewhere", "substituted", "deferred", "dropped")
    total = sum(bill[name] for name in shares)
    assert total == (pytest.approx(1.0) if sum(weights) else 0.0)
    assert all(0 <= bill[name] <= 1 for name in shares)
    assert slots == dict.fromkeys(HOSTS, 4)
    assert bill["budget_spent"] == 0.0


def test_the_account_of_a_request_that_never_ran_is_empty_and_so_is_its_bill():
    served = ServedWeight(NUM_HOSTS)
    account = served.take("nobody")
    assert account.shape == (2, NUM_HOSTS) and not account.any()
    bill, slots = bill_of(Account(account, HOSTS))
    assert slots == {} and set(bill.values()) == {0.0}


def test_taking_an_account_closes_it():
    served = ServedWeight(1)
    served.begin_step(np.zeros(2, np.int32), 1)
    served.add_local_layers(3, 4)
    served.end_step(["a"])
    assert served.take("a").tolist() == [[6.0], [24.0]]
    assert served.take("a").tolist() == [[0.0], [0.0]]


def test_accounts_of_several_stages_are_put_together_by_name():
    one = Account(np.array([[3.0, 1.0], [12.0, 4.0]]), ["home", "far"])
    two = Account(np.array([[2.0, 2.0], [8.0, 8.0]]), ["other", "far"])
    joined = joined_accounts([one, two])
    assert joined.host_names == ["home", "far", "other"]
    assert joined.served.tolist() == [[3.0, 3.0, 2.0], [12.0, 12.0, 8.0]]
    assert bill_of(joined)[0]["exact_here"] == 5 / 8, "each stage's own node is here"


@given(st.integers(0, 2**31 - 1))
def test_accounts_of_stages_add_up_whoever_served(seed):
    """Three stages of two steps, each with hosts of its own that overlap: sums by name are those of plain addition."""
    draw = np.random.default_rng(seed)
    accounts = StagesAccounts("n1")
    plain: dict[str, np.ndarray] = {}
    here = np.zeros(2)
    for _ in range(2):
        hosts, served = [], np.zeros((2, 1), dtype=np.float32)
        for own in ("n1", "n2", "n3"):
            names = [own, *draw.permutation([name for name in ("n1", "n2", "n3", "n4") if name != own])[:2]]
            step = draw.integers(0, 4, (2, 2, 3)).astype(float)
            hosts, served = served_in_stages(hosts, served, names, step)
            here += step[0, :, 0]
            for index, name in enumerate(names):
                if step[1, :, index].any() or name in hosts:
                    plain[name] = plain.get(name, 0.0) + step[:, :, index]
        accounts.book(["a", "b"], hosts, served)
    for index, request_id in enumerate(("a", "b")):
        account = accounts.take(request_id)
        assert account.here == here[index]
        for column, name in enumerate(account.host_names):
            expected = plain[name][:, index] if name in plain else np.zeros(2)
            assert account.served[:, column].tolist() == expected.tolist()
    assert len(accounts) == 0 and accounts.take("a").served.sum() == 0
