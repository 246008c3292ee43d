"""Score requests with a saved model's program, by its files alone: `python score.py FOLDER REQUEST.json` prints scores.

For a model of `gba_hvd.save_model(..., dense_program=True)`. It needs torch, numpy and `consumer.py` beside it.
REQUEST.json has columns of B numbers, or of B lists, of features that are pooled.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from consumer import key_of, rows_of, shared_row

POOLED = {"sum": lambda rows: rows.sum(0), "mean": lambda rows: rows.mean(0), "max": lambda rows: rows.max(0)}

folder, request = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
model = json.loads(max((folder / "versions").glob("??????.json")).read_bytes())["model"]
rows = {}
for lookup in model["program"]["lookups"]:
    table = next(one for one in model["tables"] if one["name"] == lookup["table"])
    own = rows_of(folder, table["dim"], table["rows"])
    shared = rows_of(folder, table["dim"], table["shared"]) if table["shared"] else {}

    found = []
    for ids in request[lookup["column"]]:
        listed = [id for id in np.atleast_1d(ids).tolist() if id != lookup["padding"]]
        if outside := [id for id in listed if table["keys"] != "hash64" and not 0 <= id < table["n_rows"]]:
            sys.exit(f"field {lookup['column']!r}: expected ids 0 to {table['n_rows'] - 1}, got {outside[0]}")
        keys = [key_of(id) if table["keys"] == "hash64" else id for id in listed]
        some = np.array([own[key] if key in own else shared_row(table, shared, key) for key in keys])
        found.append(POOLED[lookup["pooling"] or "sum"](some) if len(some) else np.zeros(table["dim"]))
    rows[lookup["feature"]] = torch.tensor(np.array(found, np.float32))
program = torch.export.load(folder / model["program"]["file"]["name"]).module()
dtypes = {one["column"]: getattr(torch, one["dtype"]) for one in model["input"]["ids"].values() if not one["is_bag"]}
dtypes |= {one["column"]: getattr(torch, one["dtype"]) for one in (model["input"]["dense"],) if one}
scores = program(rows, {name: torch.tensor(request[name], dtype=dtype) for name, dtype in dtypes.items()})
print(json.dumps((torch.sigmoid(scores) if model["activation"] == "sigmoid" else scores).tolist()))
