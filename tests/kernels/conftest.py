"""Every backend under the same tests; the reference is what they are held to."""

import pytest
import torch

from kernels import backends, ops


def built(name: str) -> bool:
    try:
        backends.load(name)
    except ImportError:
        return False
    return True


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def restore_backend():
    before = backends.active().NAME
    yield
    backends.use(before)


@pytest.fixture(params=["native", "torch"])
def backend(request):
    """The fast backend that serves during the test."""
    if not built(request.param):
        pytest.skip(f"{request.param} was not built")
    return backends.use(request.param)


@pytest.fixture
def native():
    if not built("native"):
        pytest.skip("native was not built")
    return backends.use("native")


@pytest.fixture
def by_reference():
    """by_reference(call) -> what call gives while the reference serves."""

    def run(call):
        before = backends.active().NAME
        backends.use("reference")
        try:
            return call()
        finally:
            backends.use(before)

    return run


@pytest.fixture
def random():
    """random(*shape) -> float32 normal values, the same in every run."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape, scale=1.0):
        return torch.randn(*shape, generator=generator) * scale

    draw.integers = lambda high, shape: torch.randint(high, shape, generator=generator, dtype=torch.int32)
    draw.permutation = lambda n: torch.randperm(n, generator=generator)
    return draw


@pytest.fixture
def make_bank(random):
    """make_bank(E, D, F, dtype, biases, **activation) -> (bank, plain), every expert resident, packed by who serves.

    plain holds what `ops.pack_expert` takes; make_bank.of packs it again.
    """

    def make(E, D, F, dtype=torch.bfloat16, biases=False, **activation):
        def one():
            gate, up = random(F, D, scale=D**-0.5).to(dtype), random(F, D, scale=D**-0.5).to(dtype)
            gated = activation.get("activation") != "relu"
            expert = {
                "gate": gate if gated else None,
                "up": up,
                "down": random(D, F, scale=F**-0.5).to(dtype),
            }
            if biases:
                expert |= {"up_bias": random(F), "down_bias": random(D).to(dtype)}
                expert |= {"gate_bias": random(F)} if gated else {}
            return {**expert, **activation}

        plain = [one() for _ in range(E)]
        return fill_bank(plain, D, F), plain

    def fill_bank(plain, D, F):
        bank = ops.ExpertBank(len(plain), D, F)
        for i, expert in enumerate(plain):
            bank.set(i, ops.pack_expert(**expert))
        return bank

    make.of = fill_bank
    return make


@pytest.fixture
def make_pages(random):
    """make_pages(lengths, G, P, Pv) -> pages with poison wherever no token was written, tables, and the plain keys and values."""

    def make(lengths, G, P, Pv=None, spare=2):
        Pv = P if Pv is None else Pv
        need = [-(-n // 16) for n in lengths]
        num_blocks = sum(need) + spare
        order = random.permutation(num_blocks).tolist()
        k_pages = torch.full((num_blocks, G, P, 16), torch.nan)
        v_pages = torch.full((num_blocks, G, 16, Pv), torch.nan)
        tables = torch.full((len(lengths), max(need) + 1), 2**30, dtype=torch.int32)
        plain = []
        for request, length in enumerate(lengths):
            blocks = [order.pop() for _ in range(need[request])]
            tables[request, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            k, v = random(length, G, P), random(length, G, Pv)
            slots = torch.tensor([blocks[i // 16] * 16 + i % 16 for i in range(length)], dtype=torch.int32)
            ops.kv_write(k, v, k_pages, v_pages, slots)
            plain.append((k, v))
        return k_pages, v_pages, tables, plain

    return make
