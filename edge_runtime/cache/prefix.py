"""Name the content of KV blocks by chained hashes, so that equal prefixes find each other.

A block's hash covers its own tokens, all tokens before them, and everything else that the stored numbers depend
on: model, tokenizer, the request's salt and its exactness tag. Only full blocks are shared; a prompt's last one has a
name too, so that it can be handed on. It knows no blocks and no memory.
"""

from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct

import numpy as np

from edge_runtime.cache.block_pool import BLOCK_MASK, BLOCK_SHIFT, BLOCK_TOKENS

HASH_BYTES = 16

_BLOCK = Struct(f"<{BLOCK_TOKENS}I")


def chain_seed(model_hash: str, tokenizer_hash: str, salt: str, exactness: str) -> bytes:
    """Where the chain of a request starts: two requests share blocks only if all four are equal.

    salt       separates users who must not learn from each other's cache
    exactness  how the rows were computed (`exact`, or a tier); a block of lower quality is never reused above it

    Each part goes in with its length, so that no two different quadruples spell the same bytes.
    """
    digest = blake2b(digest_size=HASH_BYTES, person=b"kv-prefix-1")
    for part in (model_hash, tokenizer_hash, salt, exactness):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


def encoder_seed(seed: bytes, input_ids: Sequence[int]) -> bytes:
    """The seed of a request to an encoder-decoder: every block depends on all that the encoder reads."""
    digest = blake2b(seed, digest_size=HASH_BYTES, person=b"kv-encoder-1")
    digest.update(Struct(f"<{len(input_ids)}I").pack(*input_ids))
    return digest.digest()


def extend_hashes(hashes: list[bytes], seed: bytes, tokens: Sequence[int], num_blocks: int) -> None:
    """Append to `hashes` until it names the first `num_blocks` full blocks of `tokens`.

    Token ids fit in 32 bits. Only blocks not yet in `hashes` are computed, so a growing request pays for each
    block once.
    """
    parent = hashes[-1] if hashes else seed
    for index in range(len(hashes), num_blocks):
        start = index << BLOCK_SHIFT
        packed = _BLOCK.pack(*tokens[start : start + BLOCK_TOKENS])
        parent = blake2b(parent + packed, digest_size=HASH_BYTES).digest()
        hashes.append(parent)


def tail_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a prompt's last block while it is not full, 1 to 15 tokens: no block that goes on otherwise has it."""
    packed = Struct(f"<{len(tokens)}I").pack(*tokens)
    return blake2b(parent + packed, digest_size=HASH_BYTES, person=b"kv-tail-1").digest()


def prompt_hashes(seed: bytes, prompt_ids: Sequence[int], known: Sequence[bytes] = ()) -> list[bytes]:
    """Names of all blocks of a prompt in order, the last one too if it is not full. known: of leading full ones"""
    full = len(prompt_ids) >> BLOCK_SHIFT
    hashes = list(known[:full])
    extend_hashes(hashes, seed, prompt_ids, full)
    if len(prompt_ids) & BLOCK_MASK:
        hashes.append(tail_hash(hashes[-1] if hashes else seed, prompt_ids[full << BLOCK_SHIFT :]))
    return hashes


def pack_hashes(hashes: Sequence[bytes]) -> np.ndarray:
    """[n, 16] uint8, as content hashes travel."""
    return np.frombuffer(b"".join(hashes), dtype=np.uint8).reshape(len(hashes), HASH_BYTES)


def reusable_blocks(num_tokens: int) -> int:
    """How many leading blocks of `num_tokens` tokens may come from the cache.

    The last token is always computed, since its logits are wanted and the cache has none. Thus a prompt that is
    cached to its end still computes its last block.
    """
    return (num_tokens - 1) >> BLOCK_SHIFT
