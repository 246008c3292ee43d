"""`LogModel`: the model of a job in MLflow, as `MLflowCallback(log_model=...)` logs it.

The chief writes it at the end of training into a folder beside the spool, in the format of `save_model`; the sender
makes a pyfunc model of that folder, logs and registers it (`gba_hvd.tracking.mlflow_model`).
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from gba_hvd.callbacks import KEEP_BEST
from gba_hvd.errors import BadInput
from gba_hvd.serving import hashed_columns, inputs
from gba_hvd.serving.builder import Builder
from gba_hvd.serving.dense_program import check_splits, formats_of
from gba_hvd.serving.load import open_model
from gba_hvd.serving.module import tables_in
from gba_hvd.serving.row_sources import has_all_rows
from gba_hvd.serving.save import described_vocabularies, export_model, save_model
from gba_hvd.serving.stored_encoder import encoder_to_store, opened_encoder
from recovery.restore.open_checkpoint import open_checkpoint

if TYPE_CHECKING:
    from gba_hvd.data.row_encoder import RowEncoder

_CODE = Path(__file__).with_name("pyfunc_model.py")  # not imported here: it imports mlflow
# What opening a model imports, at the versions of this environment. Horovod is not among them.
_REQUIREMENTS = (
    "gba-hvd", "torch", "numpy", "numba", "zstandard", "xxhash", "msgspec", "fsspec", "mlflow", "pandas", "cloudpickle",
)  # fmt: skip

_ALIAS = re.compile(r"(?!(latest|v[0-9]+)$)[\w-]+", re.IGNORECASE)


@dataclass(frozen=True)
class LogModel:
    """Log the trained model as an MLflow pyfunc model, with signature, input example and pinned requirements:

        log_model = gba_hvd.LogModel(name="ctr", input_example=batch, build="model.py:make_model",
                                     arguments={"dim": 16}, registered_model_name="ctr", alias="champion")
        state.register_callbacks([gba_hvd.MLflowCallback(log_model=log_model)])

    name: of the logged model. input_example, dense_names, build, arguments, tables, activation, dense_program, hashed:
    as `save_model` takes them; an input of few samples, since it is kept. encoder: the same, opened at once: the folder
    may be gone when the model is written. registered_model_name: of the registry, which gets a new version; alias: of
    that version. requirements: further ones, such as a package that `build` imports.

    When the job is FINISHED or NOT_SAVED the chief writes the model, and the sender logs it; the end of training waits
    as `MLflowCallback(flush_timeout_s=)` says. Where rows are on several hosts it is made from the newest checkpoint.
    of: "last": the model at the end of training; "best": that of the checkpoint which `CheckpointCallback(keep_best=)`
    keeps. checkpoint_options: for the store of checkpoints, as `recovery.open_checkpoint` takes them. The version has
    the tags `gba_hvd.step`, of its rows, and of the newest checkpoint, or that which it was made from,
    `gba_hvd.checkpoint`, `gba_hvd.checkpoint_checksum` and `gba_hvd.checkpoint_step`.
    A model that cannot be written or logged is the event `model_not_logged`, which says what to do; the training and
    its records are not affected.

    Raises BadInput for an alias without a registered model, and a name or alias that MLflow refuses. Registering the
    callback raises it where no builder or no request can be made.
    """

    name: str
    input_example: Any
    registered_model_name: str | None = None
    alias: str | None = None
    build: str | None = None
    arguments: Mapping[str, Any] | None = None
    tables: str = "all"
    activation: str = "none"
    dense_program: bool | str | Sequence[str] = False
    requirements: Sequence[str] = ()
    checkpoint_options: Mapping[str, Any] = field(default_factory=dict)
    dense_names: Sequence[str] = ()
    of: str = "last"
    encoder: RowEncoder | str | Path | None = None
    hashed: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.encoder is not None:
            object.__setattr__(self, "encoder", opened_encoder(self.encoder))
        check_names("LogModel", self.name, self.registered_model_name, self.alias)
        if self.of not in ("last", "best"):
            raise BadInput(f"LogModel: of={self.of!r}: choose 'last' or 'best'")
        if isinstance(self.requirements, str):
            raise BadInput("LogModel: requirements must be a list, such as ['my-models==1.2']")

    def check(self, model: nn.Module) -> None:
        """Raises BadInput for what would be refused at the end of the training."""
        spec = inputs.spec_of(self.input_example, model, self.dense_names)
        inputs.check_samples(spec, self.input_example, of_one=False)  # MLflow's signature is of it as a request
        if self.encoder is not None:
            example = inputs.columns_of(spec, self.input_example)
            encoder = encoder_to_store(self.encoder, spec, example, tables_in(model), {}, {}).encoder
            encoder.drop_indexes()  # every worker keeps the encoder, and only the chief has further use for it
        hashed_columns.checked(self.hashed, spec, tables_in(model), has_encoder=self.encoder is not None)
        if formats_of(self.dense_program):
            check_splits(model, self.input_example)
        Builder.of(self.build, self.arguments, model).checked()

    def check_job(self, settings: Mapping[str, Any]) -> None:
        """Raises BadInput where a job with these settings (`Job.settings`) keeps no best model, and it is asked for."""
        if self.of == "best" and not settings.get(KEEP_BEST):
            raise BadInput(
                "LogModel: of='best' is the model of the checkpoint that keep_best keeps: "
                "CheckpointCallback(URL, keep_best='valid_auc')"
            )

    def write(self, model: nn.Module, folder: Path, step: int, checkpoint: Mapping[str, Any] | None) -> int:
        """Write all that the sender needs into a new folder; returns its bytes.

        checkpoint: the data of the job's newest event `checkpoint`; None: it has saved none.
        """
        how: dict[str, Any] = {
            "build": self.build, "arguments": self.arguments, "tables": self.tables, "activation": self.activation,
            "input_example": self.input_example, "dense_program": self.dense_program, "dense_names": self.dense_names,
            "encoder": self.encoder, "hashed": self.hashed,
        }  # fmt: skip
        tags = {"gba_hvd.step": str(step)}
        if checkpoint is not None:
            place = f"{str(checkpoint.get('url', '')).rstrip('/')}/{checkpoint.get('manifest', '')}"
            tags = tags_of(step, place, checkpoint.get("checksum", ""), checkpoint.get("saved_step", ""))
        if has_all_rows(tables_in(model)) and self.of == "last":
            saved = save_model(model, folder / "model", source=tags, **how)
        else:
            if checkpoint is None or not checkpoint.get("url"):
                why = "of='best' is asked for" if self.of == "best" else "the rows of the model are on several hosts"
                raise BadInput(f"{why}, and the job has saved no checkpoint to make it from: register a "
                               "CheckpointCallback")  # fmt: skip
            build = Builder.of(self.build, self.arguments, model)
            how["build"] = self.build or build.target
            source = open_checkpoint(
                str(checkpoint["url"]), "best" if self.of == "best" else "newest", **self.checkpoint_options
            )
            if (best := source.best) is not None:
                which = f"{best.words}; {best.ahead}" if best.ahead else best.words
                that = "the best one" if best.unsaved is None else "the best one that is saved"
                print(f"MLflow: the logged model is {that}: {which}", file=sys.stderr, flush=True)
            step = source.step
            tags = tags_of(step, f"{source.url.rstrip('/')}/{source.name}", source.checksum, step)
            saved = export_model(source, folder / "model", **how)
        if self.encoder is not None:
            print(f"MLflow: {described_vocabularies(saved)}", file=sys.stderr, flush=True)
        write_facts(
            folder, name=self.name, registered_model_name=self.registered_model_name, alias=self.alias, step=step,
            tags=tags, requirements=self.requirements,
        )  # fmt: skip
        return saved.n_bytes


def check_names(what: str, name: str, registered_model_name: str | None, alias: str | None) -> None:
    """Raises BadInput for an alias without a registered model, and a name or alias that MLflow refuses."""
    if not name or any(character in name for character in "/:.%\"'"):
        raise BadInput(f"{what}: name={name!r}: MLflow takes names without / : . % and quotes")
    if registered_model_name and any(character in registered_model_name for character in "/:"):
        raise BadInput(f"{what}: registered_model_name={registered_model_name!r}: MLflow takes names without / and :")
    if alias and not registered_model_name:
        raise BadInput(f"{what}: alias={alias!r} needs registered_model_name, whose version it names")
    if alias and not _ALIAS.fullmatch(alias):
        raise BadInput(
            f"{what}: alias={alias!r}: MLflow takes letters, digits, _ and -, but neither 'latest' nor a v "
            "with a number, which it has for versions"
        )


def write_facts(
    folder: Path, *, name: str, registered_model_name: str | None, alias: str | None, step: int | None,
    tags: Mapping[str, str], requirements: Sequence[str],
) -> None:  # fmt: skip
    """Write what `mlflow_model` reads beside the saved model `folder/model`.

    Raises BadInput for a model without an example.
    """
    opened = open_model(folder / "model", tables="mmap")
    if opened.example is None:
        raise BadInput(
            "the model was saved without input_example, and MLflow's signature and pyfunc need the fields of a "
            "request: save or export it with one (`gba-hvd model export --example`)"
        )
    scores = opened.predict(opened.example)
    shutil.copyfile(_CODE, folder / _CODE.name)
    is_raw = opened.manifest.takes_raw
    packages = (*_REQUIREMENTS, "pyarrow") if is_raw else _REQUIREMENTS
    facts = {
        "name": name, "registered_model_name": registered_model_name, "alias": alias, "step": step, "tags": tags,
        "columns": opened.example, "outputs": {output: one.tolist() for output, one in scores.items()},
        "requirements": [*(f"{package}=={version(package)}" for package in packages), *requirements], "raw": is_raw,
    }  # fmt: skip
    (folder / "log.json").write_text(json.dumps(facts))


def tags_of(step: int, checkpoint: str, checksum: object, checkpoint_step: object) -> dict[str, str]:
    return {
        "gba_hvd.step": str(step),
        "gba_hvd.checkpoint": checkpoint,
        "gba_hvd.checkpoint_checksum": str(checksum),
        "gba_hvd.checkpoint_step": str(checkpoint_step),
    }
