"""A manifest is read as it was written, or not at all."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import xxhash

from recovery.errors import BadInput, Damaged
from recovery.format.manifest import Blob, Manifest, Section, StateBlob, difference, from_json, to_json
from recovery.rows import KEY, USES, Column, Schema, Table

SCHEMA = Schema(
    (Table("user", 100, (Column("weight", 4), Column("sum", 4))), Table("item", 10, (Column("weight", 4),))), 3
)
SECTIONS = (
    Section(0, 1, 33, 0, 7, 0, 1056, 1056, "raw", "00"),
    Section(1, 2, 3, 0, 7, 1056, 20, 48, "zstd", "01"),
    Section(0, 0, 5, None, 6, 1076, 176, 176, "d8+raw", "02"),
)
MANIFEST = Manifest(
    epoch=3,
    number=12,
    kind="delta",
    parent="manifests/000002-00000007.json",
    step=7,
    samples=28672,
    saved_unix_s=1.7e9,
    schema=SCHEMA,
    blobs=(Blob("blobs/000003-00000012/0000", 1252, SECTIONS),),
    state=StateBlob("blobs/000003-00000012/state", 10, 10, "raw", "03"),
    about={"job": "zähler", "versions": {"torch": [2, 13]}, "loss": 1e-05},
)
NAME = "manifests/000003-00000012.json"


def with_checksum(body: dict[str, Any]) -> bytes:
    """A document that somebody changed and signed again."""

    def canonical(value: Any) -> bytes:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()

    return canonical({**body, "checksum": xxhash.xxh3_128_hexdigest(canonical(body))})


def test_a_manifest_comes_back_as_it_was() -> None:
    data = to_json(MANIFEST)
    assert MANIFEST.name == NAME
    assert from_json(data, NAME) == MANIFEST
    assert to_json(from_json(data, NAME)) == data
    base = replace(MANIFEST, kind="full", parent=None, state=None, about={}, blobs=())
    assert from_json(to_json(base), NAME) == base
    body = msgspec.to_builtins(MANIFEST)
    body["schema"]["tables"] = [
        {"name": t.name, "n_rows": t.n_rows, "columns": [{"name": c.name, "width": c.width} for c in t.columns]}
        for t in SCHEMA.tables
    ]
    assert data == with_checksum({"format": 1, "manifest": body})


def test_only_a_keyed_table_says_what_it_shares_and_which_columns_are_exact() -> None:
    keyed = Table("by key", 4 * 35, (Column("weights", 4), KEY, USES), shared_rows=3)
    manifest = replace(MANIFEST, schema=Schema((SCHEMA.tables[0], keyed), 4), blobs=(), state=None)
    data = to_json(manifest)
    assert from_json(data, NAME) == manifest and to_json(from_json(data, NAME)) == data
    plain, saved = json.loads(data)["manifest"]["schema"]["tables"]
    assert "shared_rows" not in plain and saved["shared_rows"] == 3
    assert [column.get("exact", False) for column in saved["columns"]] == [False, True, True]


def test_keys_that_are_sums_of_two_shared_rows_have_a_format_that_earlier_versions_refuse() -> None:
    keyed = Table("by key", 4 * 36, (Column("weights", 4), KEY, USES), 4, 2)
    manifest = replace(MANIFEST, schema=Schema((SCHEMA.tables[0], keyed), 4), blobs=(), state=None)
    data = to_json(manifest)
    assert from_json(data, NAME) == manifest and to_json(from_json(data, NAME)) == data
    document = json.loads(data)
    assert document["format"] == 2
    plain, saved = document["manifest"]["schema"]["tables"]
    assert "shared_hashes" not in plain and saved["shared_hashes"] == 2
    with pytest.raises(Damaged, match="format 1 of another kind of tables"):
        from_json(with_checksum({"format": 1, "manifest": document["manifest"]}), NAME)
    saved["shared_rows"] = 3
    with pytest.raises(Damaged, match="2 hashes with 3 shared rows"):
        from_json(with_checksum({"format": 2, "manifest": document["manifest"]}), NAME)


@pytest.mark.parametrize("n_rows", [4 * 35 + 1, 4 * 3])
def test_a_keyed_table_without_rows_for_keys_in_each_shard_makes_no_sense(n_rows: int) -> None:
    keyed = Table("by key", n_rows, (Column("weights", 4), KEY, USES), shared_rows=3)
    data = to_json(replace(MANIFEST, schema=Schema((keyed,), 4), blobs=(), state=None))
    with pytest.raises(Damaged, match="by key"):
        from_json(data, NAME)


def test_keyed_tables_may_differ_in_size_and_not_in_kind() -> None:
    small, large = (Table("t", n, (Column("weights", 4), KEY, USES), shared_rows=1) for n in (68, 132))
    assert not difference(Schema((small,), 4), Schema((large,), 2))
    plain = Table("t", 68, (Column("weights", 4),))
    assert difference(Schema((small,), 4), Schema((plain,), 4)) == [
        "table 't' was saved with rows by key, here it has 68 numbered rows"
    ]


@pytest.mark.slow
def test_every_flipped_bit_is_noticed() -> None:
    data = to_json(MANIFEST)
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged, match=NAME):
            from_json(bytes(changed), NAME)


def test_every_missing_end_is_noticed() -> None:
    data = to_json(MANIFEST)
    for length in range(len(data)):
        with pytest.raises(Damaged, match="cut off or overwritten"):
            from_json(data[:length], NAME)


def test_a_manifest_edited_by_hand_is_reported_as_altered() -> None:
    document = json.loads(to_json(MANIFEST))
    document["manifest"]["step"] = 8
    for edited in (json.dumps(document), to_json(MANIFEST).decode().replace('"step":7', '"step":7 ')):
        with pytest.raises(Damaged, match="altered after it was written"):
            from_json(edited.encode(), NAME)


def test_a_manifest_in_the_place_of_another_is_reported() -> None:
    with pytest.raises(Damaged, match=f"it is {NAME}, in the place of another"):
        from_json(to_json(MANIFEST), "manifests/000003-00000013.json")


def test_a_newer_format_asks_for_an_update() -> None:
    with pytest.raises(BadInput, match=r"is in format 3, and this program reads formats up to 2: update gba-hvd"):
        from_json(with_checksum({"format": 3, "manifest": {"something": "new"}}), NAME)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"1", b'{"a":1}', b"\xff\xfe", b"[" * 100_000, b"NaN"])
def test_what_is_no_manifest_at_all_is_damaged(data: bytes) -> None:
    with pytest.raises(Damaged):
        from_json(data, NAME)


@pytest.mark.parametrize("about", [{"a": float("nan")}, {"a": object()}, {1: "a", "b": 2}])
def test_what_is_not_plain_json_cannot_be_said_about_a_checkpoint(about: dict[Any, Any]) -> None:
    with pytest.raises(BadInput, match="plain JSON"):
        to_json(replace(MANIFEST, about=about))


def blob(**changes: Any) -> dict[str, Any]:
    return {"blobs": (replace(MANIFEST.blobs[0], **changes),)}


def section(at: int, **changes: Any) -> dict[str, Any]:
    sections = list(SECTIONS)
    sections[at] = replace(sections[at], **changes)
    return blob(sections=tuple(sections))


def state(**changes: Any) -> dict[str, Any]:
    assert MANIFEST.state
    return {"state": replace(MANIFEST.state, **changes)}


NONSENSE = [
    (blob(name="../../etc/passwd"), "is not the name of a blob"),
    (blob(name="/etc/passwd"), "is not the name of a blob"),
    (blob(name="blobs/../manifests/x"), "is not the name of a blob"),
    (blob(name="C:\\blobs\\x"), "is not the name of a blob"),
    (blob(name="manifests/000001-00000001.json"), "is not the name of a blob"),
    (state(name="blobs//x"), "is not the name of a blob"),
    (state(name="blobs/000003-00000012/0000"), "two blobs of one name"),
    (state(n_bytes=-1), "bytes of state"),
    (state(n_bytes=11), "bytes of state"),
    (blob(n_bytes=1253), "its sections are 1252 bytes"),
    (section(1, start=1055), "starts at byte 1055, the one before ends at 1056"),
    (section(1, start=1057), "starts at byte 1057"),
    (section(0, start=-1), "starts at byte -1"),
    (section(0, table=2), "table 2"),
    (section(0, table=-1), "table -1"),
    (section(0, shard=3), "shard 3"),
    (section(0, n_rows=34), "34 rows from 0 on, the shard has 33"),
    (section(0, first=1), "33 rows from 1 on"),
    (section(0, first=-1), "33 rows from -1 on"),
    (section(2, n_rows=0), "0 rows"),
    (section(0, raw_bytes=10**12), "1056 bytes, 1000000000000 when decoded"),
    (section(0, raw_bytes=1055), "1055 when decoded"),
    (section(0, step=-1), "step -1"),
    (section(2, shard=1, n_rows=5, first=30, n_bytes=160, raw_bytes=160), "the shard has 33"),
    (section(2, shard=1, first=28), "rows from 28 on are there twice"),
    ({"kind": "some"}, "kind 'some'"),
    ({"kind": "full"}, "full ones have none"),
    ({"parent": None}, "all others need one"),
    ({"parent": "manifests/000003-00000012.json"}, "not an earlier checkpoint"),
    ({"parent": "manifests/000003-00000013.json"}, "not an earlier checkpoint"),
    ({"parent": "blobs/000001-00000001.json"}, "not an earlier checkpoint"),
    ({"parent": "manifests/../x"}, "not an earlier checkpoint"),
    ({"samples": -1}, "-1 samples"),
    ({"number": -1}, "number -1"),
    ({"epoch": 10**9}, "epoch 1000000000"),
    ({"schema": replace(SCHEMA, n_shards=0)}, "0 shards"),
    ({"schema": replace(SCHEMA, tables=SCHEMA.tables + SCHEMA.tables[:1])}, "two tables of one name"),
]


@pytest.mark.parametrize(("changes", "said"), NONSENSE)
def test_a_manifest_that_makes_no_sense_is_refused_although_it_is_signed(changes: dict[str, Any], said: str) -> None:
    bad = replace(MANIFEST, **changes)
    with pytest.raises(Damaged, match="makes no sense") as caught:
        from_json(to_json(bad), bad.name)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["step"], "7"),
        (["step"], 7.5),
        (["blobs"], None),
        (["blobs", 0, "sections", 0, "first"], "0"),
        (["schema", "tables", 0, "n_rows"], 0),
        (["schema", "tables", 0, "columns"], []),
        (["schema", "tables", 0, "columns", 0, "width"], -4),
    ],
)
def test_a_value_of_another_type_is_refused(path: list[Any], value: Any) -> None:
    body = {"format": 1, "manifest": json.loads(to_json(MANIFEST))["manifest"]}
    where = body["manifest"]
    for key in path[:-1]:
        where = where[key]
    where[path[-1]] = value
    with pytest.raises(Damaged, match="makes no sense"):
        from_json(with_checksum(body), NAME)


def test_signed_nonsense_of_any_kind_is_refused_and_never_anything_worse() -> None:
    rng = random.Random(3)
    values: list[Any] = [None, -1, 0, 2**70, 1.5, "x", [], {}, True, "../x"]
    for _ in range(500):
        body = {"format": 1, "manifest": json.loads(to_json(MANIFEST))["manifest"]}
        where: Any = body["manifest"]
        while True:
            key = rng.choice(list(where) if isinstance(where, dict) else range(len(where)))
            if not where[key] or not isinstance(where[key], dict | list) or rng.random() < 0.2:
                break
            where = where[key]
        where[key] = rng.choice(values)
        try:
            found = from_json(with_checksum(body), NAME)
        except Damaged:
            continue
        assert found.name == NAME and found.kind in ("full", "delta")


def test_what_differs_between_two_models_is_said_in_words() -> None:
    user, item = SCHEMA.tables
    assert difference(SCHEMA, replace(SCHEMA, n_shards=7)) == []
    mine = Schema((replace(user, n_rows=99), Table("shop", 5, item.columns)), 3)
    assert difference(SCHEMA, mine) == [
        "table 'item' was saved, this model has none of this name",
        "table 'shop' is not in the checkpoint",
        "table 'user' was saved with 100 rows, here it has 99",
    ]
    mine = Schema((replace(user, columns=(Column("weight", 8), Column("exp_avg", 4))), item), 3)
    assert difference(SCHEMA, mine) == [
        "table 'user' was saved with weight [4], sum [4], here it has weight [8], exp_avg [4]"
    ]
    assert "order" in difference(SCHEMA, Schema((item, user), 3))[0]
