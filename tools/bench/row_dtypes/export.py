"""The model of a checkpoint of `examples/train_ctr.py`, and its test samples as a file for `gba-hvd model predict`.

Runs in a process of its own, with `examples` on the path.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from torch import Tensor

import gba_hvd
from ctr.config import load
from ctr.datasets import open_splits
from ctr.served import arguments_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="of the job")
    parser.add_argument("--data", required=True)
    parser.add_argument("--checkpoints", required=True, help="URL")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--samples", type=Path, required=True, metavar="FILE.parquet")
    args = parser.parse_args()
    config = load(args.config, [f"data.dir={args.data}"])
    splits = open_splits(config.data)
    example = splits.train.take(np.arange(4))
    gba_hvd.export_model(
        args.checkpoints, args.model, build="ctr.served:build", arguments=arguments_of(config, splits.train),
        input_example=example,
    )  # fmt: skip
    test = splits.test.take(np.arange(len(splits.test)))
    columns = {name: ids.numpy() for name, ids in test.ids.items() if isinstance(ids, Tensor)}
    pyarrow.parquet.write_table(pyarrow.table({**columns, "label": test.label.numpy()}), args.samples)


if __name__ == "__main__":
    main()
