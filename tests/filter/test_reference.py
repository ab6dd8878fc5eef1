"""Random expressions on random messages: whole columns and row by row come to the same."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from rmq_pipeline import schema
from rmq_pipeline.errors import FilterExpressionError
from rmq_pipeline.filter.expression import compile_filter
from tests.filter.reference import Row, Tree, is_matched, written

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

NAMES = ["a", "b", "flag", "TAGS", "KEYS", "UNIQ_KEY", "__SHARDINGKEY"]
COLUMNS = {"TAGS": "tag", "UNIQ_KEY": "message_id", "__SHARDINGKEY": "message_group"}
KEYWORDS = {"AND", "OR", "NOT", "TRUE", "FALSE", "NULL", "IS", "BETWEEN", "IN"}
KEYWORDS |= {"CONTAINS", "STARTSWITH", "ENDSWITH"}
TEXTS = st.one_of(
    st.sampled_from(["", "e", "it's", "west", "we", "true", "FALSE", "yes", "0x10", "nan", "1 "]),
    st.sampled_from(["5", "+5", "-5", "5.0", "05", "5e0", ".5", "3.5", "5.", "1e400", "-0"]),
    st.sampled_from([str(n) for n in (2**31, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1)]),
    st.sampled_from(["9" * 30, "0" * 30 + "7", "+" + "0" * 25 + "9223372036854775807"]),
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=3),
)


def values() -> SearchStrategy[Tree]:
    return st.one_of(
        numbers(),
        st.sampled_from(NAMES).map(lambda n: ("name", n)),
        TEXTS.map(lambda t: ("text", t)),
    )


def numbers() -> SearchStrategy[Tree]:
    wholes = st.sampled_from([0, 1, 5, -5, 2**31, 2**63 - 1, -(2**63)])
    decimals = st.sampled_from(["5.0", "3.5", ".5", "5.", "1E3", "-2.5e-1", "0.0"])
    return wholes.map(lambda n: ("whole", n)) | decimals.map(lambda t: ("decimal", t))


def orderables() -> SearchStrategy[Tree]:
    return numbers() | st.sampled_from(NAMES).map(lambda n: ("name", n))


def leaves() -> SearchStrategy[Tree]:
    sign = st.sampled_from([">", ">=", "<", "<="])
    negated, name = st.booleans(), st.sampled_from(NAMES)
    how = st.sampled_from(["CONTAINS", "STARTSWITH", "ENDSWITH"])
    return st.one_of(
        st.tuples(st.sampled_from(["true", "false", "null"])),
        st.tuples(st.just("holds"), name),
        st.tuples(st.just("order"), sign, orderables(), orderables()),
        st.tuples(st.just("between"), negated, orderables(), orderables(), orderables()).filter(
            lambda t: limits_are_ordered(t[3], t[4])
        ),
        st.tuples(st.just("in"), negated, name, st.lists(TEXTS, min_size=1, max_size=3)),
        st.tuples(st.just("match"), how, negated, values(), TEXTS),
        st.tuples(st.just("is null"), negated, values()),
        st.tuples(st.just("equal"), negated, values(), values()),
    )


def limits_are_ordered(low: Tree, high: Tree) -> bool:
    if "name" in (low[0], high[0]):
        return True
    return float(low[1]) <= float(high[1])


def conditions() -> SearchStrategy[Tree]:
    return st.recursive(leaves(), composed, max_leaves=8)


def composed(inner: SearchStrategy[Tree]) -> SearchStrategy[Tree]:
    some = st.lists(inner, min_size=2, max_size=4)
    # A property in brackets is still a property.
    inside = inner.filter(lambda t: t[0] != "holds")
    comparable = inside.filter(lambda t: t != ("null",))
    side = comparable | values().filter(lambda t: t[0] in ("name", "text"))
    how = st.sampled_from(["CONTAINS", "STARTSWITH", "ENDSWITH"])
    return st.one_of(
        st.tuples(st.just("and"), some),
        st.tuples(st.just("or"), some),
        st.tuples(st.just("not"), inner),
        st.tuples(st.just("is null"), st.booleans(), inside),
        st.tuples(st.just("match"), how, st.booleans(), inside, TEXTS),
        st.tuples(st.just("equal"), st.booleans(), comparable, side),
        st.tuples(st.just("equal"), st.booleans(), side, comparable),
    )


def rows() -> SearchStrategy[list[Row]]:
    # A message id, a tag, a key that is there has at least one letter.
    row = st.dictionaries(st.sampled_from(NAMES), TEXTS.filter(bool), max_size=len(NAMES))
    return st.lists(row, max_size=8)


def table(found: list[Row]) -> pa.Table:
    """The rows as messages."""
    columns = {column: [row.get(name) for row in found] for name, column in COLUMNS.items()}
    keys = [row["KEYS"].split(" ") if "KEYS" in row else None for row in found]
    own = [{n: v for n, v in row.items() if n not in COLUMNS and n != "KEYS"} for row in found]
    properties = [list(pairs.items()) or None for pairs in own]
    fields = [schema.READ.field(name) for name in (*columns, "keys", "properties")]
    return pa.table([*columns.values(), keys, properties], schema=pa.schema(fields))


@settings(max_examples=300, deadline=None)
@given(conditions(), rows(), st.randoms(use_true_random=False))
def test_columns_and_rows_come_to_the_same(
    tree: Tree, found: list[Row], chance: random.Random
) -> None:
    text = disguised(written(tree), chance)
    messages = table(found)
    split = chance.randint(0, len(found))
    in_two = pa.concat_tables([messages.slice(0, split), messages.slice(split)])

    wanted = compile_filter(text, "sql92").matches(in_two).to_pylist()

    assert wanted == [is_matched(tree, row) for row in found], text


def disguised(text: str, chance: random.Random) -> str:
    """The same, with letters of another case in its keywords, and other blanks."""
    words = text.split(" ")
    inside = False
    disguise = []
    for word in words:
        quoted = inside or "'" in word
        inside ^= word.count("'") % 2 == 1
        bare = word.strip("()")
        if not quoted and bare.upper() in KEYWORDS:
            other = chance.choice([bare.lower(), bare.upper(), bare.title()])
            disguise.append(word.replace(bare, other))
        else:
            disguise.append(word)
        blank = " " if inside else chance.choice([" ", "\n", "\t ", " /* it''s ( */ ", " -- x\n"])
        disguise.append(blank)
    return "".join(disguise[:-1])


WORDS = [
    *KEYWORDS,
    "a",
    "TAGS",
    "5",
    "5.5",
    "1e3",
    "'x'",
    "''",
    "(",
    ")",
    ",",
    "=",
    "<>",
    ">",
    "<=",
]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([*WORDS, "+", "-", "'", "/*", "--", "\n", "%", "é"]), max_size=9),
    rows(),
)
def test_any_text_is_a_filter_or_refused(words: list[str], found: list[Row]) -> None:
    try:
        compiled = compile_filter(" ".join(words), "sql92")
    except FilterExpressionError:
        return

    assert len(compiled.matches(table(found))) == len(found)
