"""Segments that an earlier version wrote: read as they are, checked as they are, and shown with today's columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from redline.buffer.store.columns import SCHEMA, TURN

ONE_SEQUENCE_EACH = pa.schema(
    [
        *(SCHEMA.field(name) for name in ("version", "checksum", "group", "attempt", "task_id", "advantage", "reward")),
        *(
            SCHEMA.field(name)
            for name in ("reward_parts", "finish_reason", "oldest_version", "newest_version", "begun_version")
        ),
        ("turns", pa.list_(pa.struct([(name, pa.int64()) for name in ("start", "end", "oldest_version", "newest_version")]))),
        *(SCHEMA.field(name) for name in ("failure", "text", "loss_mask", "token_ids", "logprobs")),
    ]
)
"""Columns from when every attempt was a single sequence: `attempt` counts the rows of a group."""
_TURN_OF_ONE_SPAN = pa.list_(pa.struct([field for field in TURN if field.name != "switches"]))
WITHOUT_ROUTING = pa.schema([field for field in SCHEMA if field.name != "routing"])
"""Columns from before it was kept which experts a token went to."""
WITHOUT_SWITCHES = WITHOUT_ROUTING.set(SCHEMA.get_field_index("turns"), pa.field("turns", _TURN_OF_ONE_SPAN))
"""Columns from before it was kept where in a turn the weights changed."""
WITHOUT_TRUNCATED = pa.schema([field for field in WITHOUT_SWITCHES if field.name != "truncated"])
"""Columns from before it was kept whether an attempt had used up its budget."""
KNOWN = (SCHEMA, WITHOUT_ROUTING, WITHOUT_SWITCHES, WITHOUT_TRUNCATED, ONE_SEQUENCE_EACH)


def known_schema(schema: pa.Schema) -> pa.Schema:
    """The schema that a segment must have to be read. Raises ValueError for any other."""
    for known in KNOWN:
        if schema.equals(known):
            return known
    raise ValueError("not the columns of a run's trajectories")


def as_of_now(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with the columns of `SCHEMA`, null where an earlier version kept nothing; large columns are not copied."""
    if batch.schema.equals(SCHEMA):
        return batch
    derived: dict[str, pa.Array] = {"turns": _turns(batch)}
    if "sequence" not in batch.schema.names:
        derived |= {"sequence": batch.column("attempt"), "role": pa.repeat("", batch.num_rows)}
    columns = [
        derived[field.name]
        if field.name in derived
        else batch.column(field.name)
        if field.name in batch.schema.names
        else pa.nulls(batch.num_rows, field.type)
        for field in SCHEMA
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def as_dicts(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows with the columns of `SCHEMA`, but for `routing`, which may be hundreds of numbers for each token."""
    return as_of_now(batch).select([name for name in SCHEMA.names if name != "routing"]).to_pylist()


def _turns(batch: pa.RecordBatch) -> pa.Array:
    lists = batch.column("turns")
    turns, kind = lists.flatten(), SCHEMA.field("turns").type.value_type
    found = dict(zip((field.name for field in turns.type), turns.flatten(), strict=True))
    children = [
        found[field.name].cast(field.type) if field.name in found else pa.nulls(len(turns), field.type) for field in TURN
    ]
    offsets = np.concatenate([[0], np.cumsum(pc.list_value_length(lists).to_numpy())]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.StructArray.from_arrays(children, fields=list(kind)))
