"""Sampling: each option against its plain definition, rows that mind only themselves, and random numbers by key."""

import math
import os
import subprocess
import sys
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from edge_runtime.model.sampling import Sampled, Sampler, exp2_weights, splitmix64, uniform


@dataclass(frozen=True)
class Options:
    """What sampling reads of a request's options."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logprobs: int | None = None


@dataclass
class Row:
    params: Options
    tokens: list[int] = field(default_factory=lambda: [0])
    encoder_end: int = 0


def row(tokens: list[int] | None = None, **options: object) -> Row:
    return Row(Options(**options), tokens if tokens is not None else [0])  # type: ignore[arg-type]


def sample(logits: Tensor, *rows: Row) -> Sampled:
    return Sampler(logits.shape[1]).sample(logits, rows)


def allowed(logits: list[float], draws: int = 400, **options: object) -> set[int]:
    """Token ids that ever come up, over many positions of one seed."""
    rows = [row(tokens=[0] * (n + 1), seed=7, **{"temperature": 1.0, **options}) for n in range(draws)]
    return set(sample(torch.tensor([logits] * draws), *rows).token_ids.tolist())


# Greedy.


def test_greedy_takes_the_best_token():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    result = sample(logits, row(), row())
    assert result == (result.token_ids, (), ()) and result.token_ids.tolist() == [1, 0]
    assert result.token_ids.dtype == torch.int64


@pytest.mark.parametrize("vocab_size", [5, 8192, 40_000])
def test_equal_best_tokens_go_to_the_lowest_id(vocab_size):
    logits = torch.zeros(3, vocab_size)
    logits[1, [vocab_size // 2, vocab_size - 1]] = 1.0
    logits[2, 3:] = 1.0
    assert sample(logits, row(), row(), row()).token_ids.tolist() == [0, vocab_size // 2, 3]


def test_a_tiny_temperature_and_a_top_k_of_one_are_greedy():
    logits = torch.tensor([[1.0, 1.1, 1.1]] * 2)
    assert sample(logits, row(temperature=1e-9), row(temperature=5.0, top_k=1)).token_ids.tolist() == [1, 1]


# Each option.


def test_top_k_keeps_exactly_k_with_the_lowest_ids_among_equals():
    assert allowed([1.0, 2.0, 1.0, 1.0, 0.0], top_k=3) == {0, 1, 2}
    assert allowed([1.0] * 5, top_k=2) == {0, 1}
    assert allowed([1.0] * 5, top_k=5) == allowed([1.0] * 5, top_k=500) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_fewest_best_tokens_that_have_p_together():
    logits = [math.log(p) for p in (0.1, 0.5, 0.25, 0.15)]
    assert allowed(logits, top_p=0.49) == {1}
    assert allowed(logits, top_p=0.51) == {1, 2}
    assert allowed(logits, top_p=0.89) == {1, 2, 3}
    assert allowed(logits, top_p=0.91) == {0, 1, 2, 3}
    assert allowed(logits, top_p=1e-9) == {1}
    assert allowed([0.0] * 4, top_p=0.5) == {0, 1}


def test_top_p_counts_what_top_k_left_as_everything():
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert allowed(logits, top_k=2, top_p=0.56) == {0}  # 0.4 of 0.7 is 0.571
    assert allowed(logits, top_k=2, top_p=0.58) == {0, 1}


def test_min_p_is_a_share_of_the_best_probability():
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    for more in ({}, {"top_k": 4 - 1}, {"top_p": 0.999}):
        assert allowed(logits, min_p=0.5, **more) == {0, 1}
        assert allowed(logits, min_p=0.61, **more) == {0}
    assert allowed(logits, min_p=1.0) == {0}


def test_temperature_comes_before_top_p():
    logits = [math.log(p) for p in (0.6, 0.4)]
    assert allowed(logits, top_p=0.65) == {0, 1}
    assert allowed(logits, top_p=0.65, temperature=0.5) == {0}  # 0.69 after sharpening


def test_a_repetition_penalty_makes_seen_tokens_less_likely_whatever_their_sign():
    logits = torch.tensor([[2.0, 1.5, -1.0], [-1.0, -1.5, -3.0]])
    rows = [row(tokens=[0, 0, 0], repetition_penalty=2.0) for _ in range(2)]
    before = logits.clone()
    assert sample(logits, *rows).token_ids.tolist() == [1, 1]
    assert torch.equal(logits, before)


def test_what_an_encoder_read_is_not_penalised():
    logits = torch.tensor([[3.0, 2.5, 2.0]])
    read = row(tokens=[0] * 16 + [1], repetition_penalty=2.0)
    assert sample(logits, read).token_ids.tolist() == [2]
    read.encoder_end = 16
    assert sample(logits, read).token_ids.tolist() == [0]


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_an_extreme_penalty_stays_finite(penalty):
    logits = torch.tensor([[2.0, -1.0, 0.5]])
    result = sample(logits, row(tokens=[0, 1, 2], repetition_penalty=penalty, temperature=1.0, seed=1))
    assert result.token_ids.tolist()[0] in {0, 1, 2} and result.bad_rows == ()


# Frequencies.


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 6, "top_p": 0.9}, {"temperature": 1.7}],
)
def test_tokens_come_up_as_often_as_their_probability_says(options):
    logits = torch.tensor([0.3, 2.0, -1.0, 1.0, 1.5, 0.0, -2.0, 1.2])
    draws = 20_000
    sampler = Sampler(8)
    rows = [
        row(tokens=[0] * (n % 50 + 1), seed=n // 50, **{"temperature": 1.0, **options}) for n in range(draws)
    ]
    counts = torch.bincount(sampler.sample(logits.expand(draws, 8).contiguous(), rows).token_ids, minlength=8)
    expected = plain_probabilities(logits, rows[0].params)
    assert not counts[expected == 0].any()
    kept = expected > 0
    chi_square = ((counts[kept] - draws * expected[kept]) ** 2 / (draws * expected[kept])).sum()
    assert chi_square < 30  # 7 degrees of freedom: by chance once in 10000


def plain_probabilities(logits: Tensor, options: Options) -> Tensor:
    """The definition, one row at a time in float64."""
    probs = (logits.double() / options.temperature).softmax(-1)
    order = sorted(range(len(probs)), key=lambda i: (-float(probs[i]), i))
    if options.top_k:
        order = order[: options.top_k]
    mass, total, kept = 0.0, sum(float(probs[i]) for i in order), []
    for i in order:
        if mass < options.top_p * total:
            kept.append(i)
        mass += float(probs[i])
    kept = [i for i in kept if probs[i] >= options.min_p * probs[order[0]]]
    result = torch.zeros_like(probs)
    result[kept] = probs[kept] / probs[kept].sum()
    return result


@given(st.integers(0, 2**31), st.data())
def test_a_draw_is_the_inverse_of_the_plain_distribution(seed, data):
    vocab_size = data.draw(st.integers(2, 60))
    generator = torch.Generator().manual_seed(seed)
    logits = (
        torch.randn(1, vocab_size, generator=generator).mul_(2).round(decimals=data.draw(st.integers(0, 3)))
    )
    options = Options(
        temperature=data.draw(st.floats(0.2, 3)),
        top_k=data.draw(st.integers(2, vocab_size + 3) | st.just(0)),
        top_p=data.draw(st.floats(0.05, 1)),
        min_p=data.draw(st.floats(0, 0.5)),
        seed=seed,
    )
    token = int(sample(logits, Row(options)).token_ids[0])
    assert plain_probabilities(logits[0], options)[token] > 1e-7
    narrowed = 0 < options.top_k < vocab_size or options.top_p < 1
    probs = plain_probabilities(logits[0], options)
    order = sorted(range(vocab_size), key=lambda i: (-float(probs[i]), i)) if narrowed else range(vocab_size)
    below = 0.0
    for i in order:
        if i == token:
            break
        below += float(probs[i])
    random = float(uniform(np.array([seed], dtype=np.uint64), np.array([1], dtype=np.uint64))[0])
    assert below - 1e-5 <= random <= below + float(probs[token]) + 1e-5


# A row minds only itself.


def mixed_rows(count: int, vocab_size: int) -> list[Row]:
    kinds: list[dict[str, object]] = [
        {},
        {"temperature": 0.7},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
        {"temperature": 0.9, "min_p": 0.05, "repetition_penalty": 1.3},
        {"repetition_penalty": 1.5, "logprobs": 3},
        {"temperature": 2.0, "logprobs": 20},
        {"temperature": 1.0, "top_k": vocab_size - 1},
    ]
    return [
        row(tokens=[(i * 7 + n) % vocab_size for n in range(i + 1)], seed=1000 + i, **kinds[i % len(kinds)])
        for i in range(count)
    ]


@pytest.mark.parametrize(("vocab_size", "count"), [(97, 40), (8192, 36), (151_936, 9)])
@pytest.mark.parametrize("threads", [1, 2])
def test_every_row_alone_equals_the_row_in_a_mixed_batch_bit_for_bit(vocab_size, count, threads):
    logits = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(1)).mul_(3)
    logits[::2] = logits[::2].round(decimals=1)  # many equals
    rows = mixed_rows(count, vocab_size)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        sampler = Sampler(vocab_size)
        batch = sampler.sample(logits, rows)
        for index, one in enumerate(rows):
            alone = sampler.sample(logits[index : index + 1].clone(), [one])
            assert alone.token_ids[0] == batch.token_ids[index]
            assert (alone.logprobs or (None,))[0] == batch.logprobs[index]
        backwards = sampler.sample(logits.flip(0).contiguous(), rows[::-1])
        assert torch.equal(backwards.token_ids.flip(0), batch.token_ids)
    finally:
        torch.set_num_threads(before)


def test_a_draw_depends_on_seed_and_position_and_on_nothing_else():
    logits = torch.zeros(1, 1000)
    sampler = Sampler(1000)

    def draw(seed: int, position: int) -> int:
        return int(
            sampler.sample(logits, [row(tokens=[position] * position, temperature=1.0, seed=seed)]).token_ids[
                0
            ]
        )

    table = [[draw(seed, position) for position in range(1, 20)] for seed in range(20)]
    assert table == [[draw(seed, position) for position in range(1, 20)] for seed in range(20)]
    assert len({tuple(line) for line in table}) == 20 and all(len(set(line)) > 15 for line in table)


def test_known_draws_stay_the_same_on_every_machine():
    logits = torch.arange(64, dtype=torch.float32).mul_(37).remainder_(64).div_(16).repeat(6, 1)
    rows = [
        row(tokens=[0] * (i + 1), seed=-5 + i, temperature=1.0, **more)
        for i, more in enumerate(
            [{}, {"top_k": 9}, {"top_p": 0.7}, {"min_p": 0.2}, {}, {"top_k": 30, "top_p": 0.9}]
        )
    ]
    assert sample(logits, *rows).token_ids.tolist() == [29, 50, 31, 24, 12, 29]


DIGEST = """
import hashlib, torch
from edge_runtime.model.sampling import exp2_weights
x = -torch.rand(100_000, generator=torch.Generator().manual_seed(1)) * 130
print(hashlib.sha256(exp2_weights(x, torch.empty_like(x)).cumsum(0).numpy().tobytes()).hexdigest())
"""


def test_the_weights_have_the_same_bits_without_vector_instructions(repository):
    digests = set()
    for level in ("default", "avx512"):  # the second is lowered to what the machine has
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": level}
        done = subprocess.run(
            [sys.executable, "-c", DIGEST],
            cwd=repository,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout)
    assert len(digests) == 1


def test_a_drawn_row_without_a_seed_is_a_fault_of_the_program():
    with pytest.raises(AssertionError, match="whoever creates a request draws one"):
        sample(torch.zeros(1, 4), row(temperature=1.0))


# Rows that are not finite.


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3, "logprobs": 2}]
)
def test_a_row_that_is_not_finite_is_reported_and_not_drawn_and_harms_nobody(poison, options):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    rows = [row(seed=i, **options) for i in range(3)]
    sound = sample(logits, *rows)
    logits[1, 17] = poison
    result = sample(logits, *rows)
    assert result.bad_rows == (1,) and result.token_ids.tolist()[1] == -1
    assert result.token_ids[[0, 2]].tolist() == sound.token_ids[[0, 2]].tolist()
    if result.logprobs:
        assert result.logprobs == (sound.logprobs[0], None, sound.logprobs[2])


# Log probabilities.


def test_log_probabilities_are_the_models_own_with_ties_to_the_lowest_id():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0]])
    [detail] = sample(logits, row(logprobs=2, repetition_penalty=9.0, tokens=[1])).logprobs
    expected = logits[0].log_softmax(-1)
    assert detail is not None and detail.top_ids == [1, 2]
    assert detail.top_logprobs == [float(expected[1]), float(expected[2])]
    assert detail.logprob == float(expected[2])  # the penalty made 2 the choice


def test_zero_log_probabilities_report_only_the_chosen_token_and_none_reports_nothing():
    logits = torch.tensor([[1.0, 3.0]] * 2)
    first, second = sample(logits, row(logprobs=0), row()).logprobs
    assert first is not None and (first.top_ids, first.top_logprobs, second) == ([], [], None)


def test_more_log_probabilities_than_tokens_report_all_tokens():
    [detail] = sample(torch.tensor([[1.0, 3.0]]), row(logprobs=20)).logprobs
    assert detail is not None and detail.top_ids == [1, 0]


# The arithmetic beneath.


def test_options_may_change_from_step_to_step():
    sampler = Sampler(4)
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    assert sampler.sample(logits, [row()]).token_ids.tolist() == [3]
    assert sampler.sample(logits, [row(tokens=[3], repetition_penalty=9.0)]).token_ids.tolist() == [2]
    assert sampler.sample(logits.repeat(2, 1), [row(), row()]).token_ids.tolist() == [3, 3]
    assert sampler.sample(logits[:0], []).token_ids.tolist() == []


def test_exp2_is_near_the_true_value_and_exact_at_zero():
    x = torch.cat([torch.zeros(1), -torch.rand(20_000, generator=torch.Generator().manual_seed(1)) * 140])
    true = torch.exp2(x.double())
    mine = exp2_weights(x.clone(), torch.empty_like(x)).double()
    inside = x > -124
    assert mine[0] == 1 and (mine > 0).all()
    assert ((mine - true) / true)[inside].abs().max() < 3e-7
    assert (mine[~inside] < 2.0**-123).all()


def test_splitmix64_gives_its_published_numbers():
    state, numbers = np.array([1234567], dtype=np.uint64), []
    for _ in range(3):
        numbers.append(int(splitmix64(state)[0]))
        state = state + np.uint64(0x9E3779B97F4A7C15)
    assert numbers == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_random_numbers_are_even_over_seeds_and_over_positions():
    many = np.arange(100_000, dtype=np.uint64)
    for numbers in (uniform(many, np.full_like(many, 9)), uniform(np.full_like(many, 9), many)):
        assert numbers.min() >= 0 and numbers.max() < 1
        counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 160  # 99 degrees of freedom
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.015
