"""Random messages and tensors of every kind the protocol knows, for hypothesis and for seeded loops."""

from typing import Any

import msgspec
import numpy
from hypothesis import strategies as st

from edge_runtime.protocol import MESSAGES, ExpertCall, ExpertReply, Message

_NUMPY = {
    "float32": numpy.dtype("<f4"),
    "bfloat16": numpy.dtype("<u2"),
    "int8": numpy.dtype("i1"),
    "uint8": numpy.dtype("u1"),
    "int16": numpy.dtype("<i2"),
    "int32": numpy.dtype("<i4"),
    "int64": numpy.dtype("<i8"),
}

_plain = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=9)
)
_anything = st.recursive(
    _plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def _of_type(info: Any) -> st.SearchStrategy:
    """Values of a msgspec type description."""
    kind = msgspec.inspect
    match info:
        case kind.AnyType():
            return _anything
        case kind.NoneType():
            return st.none()
        case kind.BoolType():
            return st.booleans()
        case kind.IntType():
            return st.integers(info.ge or 0, min(info.le or 2**62, 2**62))
        case kind.FloatType():
            lowest = info.ge if info.gt is None else info.gt
            highest = 1e6 if info.lt is None else info.lt
            return st.floats(
                lowest,
                highest,
                allow_nan=False,
                exclude_min=info.gt is not None,
                exclude_max=info.lt is not None,
            )
        case kind.StrType():
            return st.text(max_size=20)
        case kind.LiteralType():
            return st.sampled_from(info.values)
        case kind.UnionType():
            return st.one_of([_of_type(each) for each in info.types])
        case kind.ListType():
            return st.lists(_of_type(info.item_type), max_size=4)
        case kind.TupleType():
            return st.tuples(*[_of_type(each) for each in info.item_types])
        case kind.DictType():
            return st.dictionaries(_of_type(info.key_type), _of_type(info.value_type), max_size=3)
        case kind.StructType():
            return st.builds(info.cls, **{field.name: _of_type(field.type) for field in info.fields})
        case kind.DataclassType():
            return st.builds(info.cls, **{field.name: _positive(field.type) for field in info.fields})
    raise AssertionError(f"no strategy for {info}")


def _positive(info: Any) -> st.SearchStrategy:
    """Of a field of a measurement, whose numbers are all above 0."""
    return st.floats(1e-6, 1e12) if isinstance(info, msgspec.inspect.FloatType) else _of_type(info)


_by_type = {cls: _of_type(msgspec.inspect.type_info(cls)) for cls in MESSAGES.values()}


@st.composite
def tensors_for(draw: Any, cls: type[Message]) -> tuple[numpy.ndarray, ...]:
    """Tensors that this type of message may carry."""
    rows, pairs, width = (draw(st.integers(0, 5)) for _ in range(3))
    shapes = {1: (pairs,), 2: (rows, width), 3: (pairs, rows, width)}
    arrays = []
    for spec in cls.tensors:
        dtype = _NUMPY[draw(st.sampled_from(spec.dtypes))]
        size = int(numpy.prod(shapes[spec.ndim]))
        data = draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize))
        arrays.append(numpy.frombuffer(data, dtype).reshape(shapes[spec.ndim]))
    return tuple(arrays)


@st.composite
def messages(draw: Any, *classes: type[Message]) -> tuple[Message, tuple[numpy.ndarray, ...]]:
    """A message of one of `classes` (default: any) and its tensors."""
    cls = draw(st.sampled_from(classes or tuple(MESSAGES.values())))
    return draw(_by_type[cls]), draw(tensors_for(cls))


def expert_call(
    num_rows: int = 2, width: int = 8, num_pairs: int = 3
) -> tuple[ExpertCall, tuple[numpy.ndarray, ...]]:
    rows = numpy.arange(num_rows * width, dtype=numpy.float32).reshape(num_rows, width)
    pairs = numpy.arange(num_pairs, dtype=numpy.int32)
    return ExpertCall(3), (rows, pairs % num_rows, pairs)


def expert_reply(num_pairs: int = 3, width: int = 8) -> tuple[ExpertReply, tuple[numpy.ndarray, ...]]:
    return ExpertReply(3, 0.25), (numpy.full((num_pairs, width), 0.5, numpy.float32),)
