"""A trained model apart from its job: saved, opened and asked for predictions where no Horovod is installed.

    save: model, tables, builder -> row shards, dense tensors, code -> manifest (last)
    load: manifest -> builder -> dense tensors, row readers -> `nn.Module` -> predictions

Rows stand in shards that are named by their content, so versions of a model at one URL share those that are equal.
docs/FORMAT.md describes the files.
"""
