"""Content hashes: what they depend on, and how far the cache may serve a prompt."""

from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.cache.prefix import HASH_BYTES, chain_seed, extend_hashes, reusable_blocks

SEED = chain_seed("model", "tokenizer", "", "exact")


def hashes_of(tokens: list[int], seed: bytes = SEED) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, seed, tokens, len(tokens) // 16)
    return hashes


def test_only_full_blocks_are_named():
    assert [len(hashes_of(list(range(n)))) for n in (15, 16, 31, 32)] == [0, 1, 1, 2]
    assert all(len(name) == HASH_BYTES for name in hashes_of(list(range(32))))


def test_a_name_covers_all_tokens_before_its_block():
    one, other = hashes_of([*range(32)]), hashes_of([99, *range(1, 32)])
    assert one[0] != other[0] and one[1] != other[1]


def test_equal_prefixes_have_equal_names_whatever_follows():
    assert hashes_of([*range(32), 1]) == hashes_of([*range(32), 2, 3])


def test_names_are_the_same_in_every_process():
    assert hashes_of(list(range(16)))[0].hex() == "64427ff882f281ef5321cc4b6d90af0c"


def test_model_tokenizer_salt_and_exactness_each_start_another_chain():
    base = ("model", "tokenizer", "salt", "exact")
    seeds = {chain_seed(*base)}
    for index in range(4):
        seeds.add(chain_seed(*base[:index], "other", *base[index + 1 :]))
    assert len(seeds) == 5


def test_parts_of_the_seed_do_not_run_into_each_other():
    assert chain_seed("ab", "c", "", "x") != chain_seed("a", "bc", "", "x")
    assert chain_seed("m", "t", "a", "b") != chain_seed("m", "t", "", "ab")


def test_any_salt_can_be_used():
    assert (
        len({chain_seed("m", "t", salt, "exact") for salt in ("", "\0", "\ud800", "ue\u0308", "\u00fc")}) == 5
    )


@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.integers(0, 4), st.integers(0, 4))
def test_extending_step_by_step_equals_extending_at_once(tokens, first, second):
    whole = hashes_of(tokens)
    grown: list[bytes] = []
    for upto in (first, second, len(tokens) // 16):
        extend_hashes(grown, SEED, tokens, min(upto, len(tokens) // 16))
    assert grown == whole


def test_the_last_token_is_always_left_to_compute():
    assert [reusable_blocks(n) for n in (1, 16, 17, 32, 33)] == [0, 0, 1, 1, 2]
