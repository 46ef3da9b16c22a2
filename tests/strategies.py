"""Hypothesis strategies: every wire record, with any values that its types allow."""

from typing import Any

import msgspec
from hypothesis import strategies as st

from tests import factories
from tests.architecture.surface import wire_records

WIRE_RECORDS = tuple(wire_records())
MOST_ITEMS = 3  # of a collection: sizes are the codec's business, here the kinds of values are

peer_ids = st.integers(0, 255).map(lambda number: factories.identity(number).peer_id)


def wire(kind: type) -> st.SearchStrategy[Any]:
    """Any record of this kind."""
    return of_type(msgspec.inspect.type_info(kind))


def any_record() -> st.SearchStrategy[Any]:
    return st.sampled_from(WIRE_RECORDS).flatmap(wire)


def of_type(info: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    """Any value that msgspec accepts for a type."""
    match info:
        case msgspec.inspect.StructType():
            fields = [of_type(field.type) for field in info.fields]
            return st.builds(lambda kind, values: kind(*values), st.just(info.cls), st.tuples(*fields))
        case msgspec.inspect.Metadata():
            return of_type(info.type)
        case msgspec.inspect.IntType():
            least = info.ge if info.ge is not None else -(2**63)
            most = info.le if info.le is not None else info.lt - 1 if info.lt is not None else 2**63 - 1
            return st.integers(least, most)
        case msgspec.inspect.FloatType():
            return st.floats(allow_nan=False)  # nan != nan would spoil every comparison
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.BytesType():
            least = info.min_length or 0
            return st.binary(min_size=least, max_size=min(info.max_length or 64, max(64, least)))
        case msgspec.inspect.StrType():
            if info.pattern is not None:
                return peer_ids
            return st.text(
                st.characters(codec="utf-8"), min_size=info.min_length or 0, max_size=min(info.max_length or 32, 32)
            )
        case msgspec.inspect.VarTupleType():
            items = of_type(info.item_type)
            return st.lists(items, min_size=info.min_length or 0, max_size=MOST_ITEMS).map(tuple)
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.UnionType():
            return st.one_of(*map(of_type, info.types))
        case msgspec.inspect.DictType():
            return st.dictionaries(of_type(info.key_type), of_type(info.value_type), max_size=MOST_ITEMS)
    raise TypeError(f"no strategy for {info}")
