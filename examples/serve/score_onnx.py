"""Score requests with ONNX Runtime, by the files of a model alone: `python score_onnx.py FOLDER REQUEST.json`.

As `score.py`, for a model saved with dense_program="onnx". It needs numpy, onnxruntime, and `consumer.py` beside it.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from consumer import key_of, rows_of, shared_row

folder, request = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
model = json.loads(max((folder / "versions").glob("??????.json")).read_bytes())["model"]
session = onnxruntime.InferenceSession(folder / model["onnx"]["file"]["name"])
types = {one.name: {"tensor(int64)": np.int64}.get(one.type, np.float32) for one in session.get_inputs()}
given = {name: np.array(request[column], types[name]) for column, name in model["onnx"]["fields"].items()}
for lookup in model["onnx"]["lookups"]:
    table = next(one for one in model["tables"] if one["name"] == lookup["table"])
    own, shared = (rows_of(folder, table["dim"], part) if part else {} for part in (table["rows"], table["shared"]))
    pool = getattr(np, lookup["pooling"] or "sum")
    given_ids = [i for ids in request[lookup["column"]] for i in np.atleast_1d(ids).tolist() if i != lookup["padding"]]
    if outside := [i for i in given_ids if not shared and not 0 <= i < table["n_rows"]]:
        sys.exit(f"field {lookup['column']!r}: expected ids 0 to {table['n_rows'] - 1}, got {outside[0]}")
    keys = [[key_of(i) if shared else i for i in np.atleast_1d(ids).tolist() if i != lookup["padding"]]
            for ids in request[lookup["column"]]]  # fmt: skip
    rows = [[own[key] if key in own else shared_row(table, shared, key) for key in some] for some in keys]
    pooled = [pool(some, 0) if some else np.zeros(table["dim"], np.float32) for some in rows]
    given[model["onnx"]["rows"][lookup["feature"]]] = np.array(pooled, np.float32)
logits = session.run(None, given)[0]
print(json.dumps((1 / (1 + np.exp(-logits)) if model["activation"] == "sigmoid" else logits).tolist()))
