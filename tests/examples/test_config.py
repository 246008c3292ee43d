"""Settings: read from YAML, replaced from the command line, checked before anything starts."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from ctr.config import Checkpoint, JobConfig, LoggedModel, Switching, load
from ctr.plan import plan
from ctr.settings_list import settings_list
from gba_hvd import Compression, GBACallback
from gba_hvd.compression import Spec
from gba_hvd.errors import BadInput
from recovery.callback import CheckpointCallback
from train_ctr import main

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "examples" / "configs").glob("*.yaml"))


def file_with(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_that_comes_along_is_valid_and_named_after_its_file(path: Path) -> None:
    assert load(path).name == path.stem


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert load(file_with(tmp_path, "")) == JobConfig(name="job")


def test_the_command_line_beats_the_file_and_the_file_beats_the_defaults(tmp_path: Path) -> None:
    path = file_with(tmp_path, "embedding: {lr: 0.5, dim: 3}\n")
    config = load(path, ["embedding.lr=2e-3", "model.hidden=[8, 4]", "data.synthetic.tables.user=7", "name=mine"])
    assert (config.embedding.lr, config.embedding.dim) == (0.002, 3)
    assert config.model.hidden == (8, 4)
    assert config.data.synthetic.tables["user"] == 7
    assert config.name == "mine"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epoch=3", r"train\.epoch: no such setting; did you mean train\.epochs\?"),
        ("tarin.epochs=3", r"tarin: no such setting; did you mean train\?"),
        ("xyz=1", r"xyz: no such setting; known here: name, seed"),
        ("train.epochs=three", r"train\.epochs: expected a whole number, got 'three'"),
        ("train.epochs=true", r"train\.epochs: expected a whole number, got True"),
        ("model.batch_norm=1", r"model\.batch_norm: expected true or false, got 1"),
        ("model.hidden=400", r"model\.hidden: expected a list, each a whole number, got 400"),
        ("model.kind=fm", r"model\.kind: expected one of deepfm, dlrm, dcn, din, dien, youtube_dnn, got 'fm'"),
        ("embedding.lr=fast", r"embedding\.lr: expected a number, got 'fast'"),
        (
            "data.synthetic.drift=0.1",
            r"by_day is false with drift 0\.1 and new_ids 0\.0: a log by day",
        ),
        ("data.synthetic.by_day=true", r"by_day is true with drift 0\.0 and new_ids 0\.0"),
        ("data.synthetic.new_ids=2", r"data\.synthetic\.new_ids: must be in \[0, 1\], got 2"),
        ("data.synthetic.tables={user: many}", r"data\.synthetic\.tables\.user: expected a whole number, got 'many'"),
        ("train=3", r"train: expected a section with global_batch"),
        ("name.first=x", r"name is a value, not a section"),
        ("train.epochs", r"override 'train\.epochs': expected key\.path=value"),
        ("train.micro_batch=1000", r"train\.global_batch: must be a multiple of micro_batch \(1000\), got 4096"),
        ("train.max_norm=-1", r"train\.max_norm must be a positive, finite number, or None for no clipping, got -1\.0"),
        ("train.max_row_norm=big", r"train\.max_row_norm: expected a number, got 'big'"),
        ("data.num_workers=-1", r"data\.num_workers must be a whole number, 0 or more, got -1"),
        ("data={num_workers: 1, prefetch: 0}", r"data\.num_workers=1 with prefetch=0"),
        ("train.epochs=0", r"train\.epochs: must be positive, got 0"),
        ("model.dropout=1", r"model\.dropout: must be in \[0, 1\), got 1\.0"),
        ("train.row_average=local", r"train\.row_average: expected one of global, contributors, .*got 'local'"),
        ("train.sync_micro_batch=100", r"train\.sync_micro_batch=100 .*choose one of"),
        ("switching.rule=dana_zer", r"switching: rule 'dana_zer' is not known: did you mean 'dana_zero'\?"),
        ("switching={mode: shadow, rule: dana_zero}", r"switching: mode 'shadow' uses no rule, got 'dana_zero'"),
        ("compression=dtc", r"compression: compressor 'dtc' is not known: did you mean 'dct'\?"),
        ("row_compression={name: int9}", r"row_compression: compressor 'int9' is not known: did you mean 'int8'\?"),
        (
            "compression=5",
            r"compression: expected a section with name, keep, eta, refresh_every, drift, per_table, values, got 5",
        ),
        ("compression={name: dct, kep: 0.1}", r"compression\.kep: no such setting; did you mean compression\.keep\?"),
        ("compression={name: dct, keep: 2}", r"compression: keep is the share of elements that is sent"),
        ("compression={name: dct, keep: few}", r"compression\.keep: expected a number, got 'few'"),
        ("row_compression={name: int8, keep: 0.1}", r"row_compression: compressor 'int8' has no setting 'keep'"),
        (
            "compression={name: topk, refresh_every: 5}",
            r"compression: compressor 'topk' has no setting 'refresh_every': it has keep, eta",
        ),
        ("compression={name: dct, eta: 0.9, keep: 0.1}", r"compression: eta=0.9 and keep=0.1: give one of them"),
        ("compression={name: int8, drift: 2}", r"compression: compressor 'int8' has no setting 'drift'"),
        ("compression=dct_mp", r"compression: compression=dct_mp is a rule for rows"),
        ("row_compression=dct", r"row_compression: row_compression=dct: the name stood for a rule that is not"),
        ("compression={name: dct, refresh_every: 0}", r"compression: refresh_every is a number of steps, at least 1"),
        ("compression={name: int8, values: fp16}", r"compression: int8 and then fp16: chain a selector"),
        ("compression={name: topk, values: dct}", r"compression: .*: chain a selector"),
        ("switching.mode=gbaa", r"switching: mode 'gbaa' is not known: did you mean 'gba'\?"),
        ("switching.tolerance=-1", r"switching: tolerance .* must be"),
        ("switching.leave_gain=9", r"switching: leave_gain must be"),
        ("switching.lookahead=far", r"switching\.lookahead: expected a whole number, got 'far'"),
        (
            "switching.switch_at={soon: gba}",
            r"switching\.switch_at: expected a whole number before the colon, got 'soon'",
        ),
        ("switching.switch_at.7=bga", r"switching: mode 'bga' is not known"),
        ("switching=gba", r"switching: expected a section with mode, switch_at"),
        ("checkpoint.every_steps=10", r"checkpoint\.url: needed, a folder or an address"),
        ("checkpoint={url: c, every_steps: 0}", r"checkpoint: every_s and every_steps must be positive"),
        ("checkpoint={url: c, policy: mfuu}", r"checkpoint: policy 'mfuu' is not known: did you mean 'mfu'"),
        ("checkpoint={url: c, row_fraction: 2}", r"checkpoint: row_fraction is a share of the rows"),
        ("checkpoint={url: c, bits: 5}", r"checkpoint: .*5"),
        ("checkpoint={url: c, resum: false}", r"checkpoint\.resum: no such setting; did you mean checkpoint\.resume\?"),
        ("checkpoint={url: c, resume: 1}", r"checkpoint\.resume: expected true or false, got 1"),
        ("checkpoint=folder", r"checkpoint: expected a section with url, every_s"),
        ("model.cross_layers=2", r"model\.cross_layers: belongs to dcn, but model\.kind is deepfm"),
        ("dense.momentum=0.9", r"dense\.momentum: belongs to sgd, but dense\.optimizer is adam"),
        ("dense={optimizer: sgd, momentum: 1.0}", r"dense\.momentum: must be in \[0, 1\), got 1\.0"),
        ("train.threads=2", r"train\.threads: 2 threads share a replica, which only shadow, easgd, ma, bmuf have"),
        ("train.device=gpu", r"train\.device: must be cpu, cuda or cuda:N, got 'gpu'"),
        ("switching={mode: gba, staleness_of: rows}", r"switching\.staleness_of: expected one of token, values"),
        ("switching={mode: gba, warm_up_steps: 9}", r"switching: warm_up_steps=9 has no effect in mode 'gba'"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_place_and_what_was_expected(
    tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        load(file_with(tmp_path, "name: test"), [override])


def test_a_missing_file_says_where_the_ready_ones_are(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nothing\.yaml: no such configuration; the ready ones are in examples/configs"):
        load(tmp_path / "nothing.yaml")


@pytest.mark.parametrize(("text", "message"), [("a: [1", "not valid YAML"), ("- 1", "expected `key: value` lines")])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        load(file_with(tmp_path, text))


def test_a_job_without_the_section_has_no_switching(tmp_path: Path) -> None:
    assert load(file_with(tmp_path, "name: test")).switching is None
    assert load(file_with(tmp_path, "switching:")).switching is None


def test_switching_is_read_from_the_file_and_the_command_line(tmp_path: Path) -> None:
    path = file_with(tmp_path, "switching: {mode: auto, switch_at: {100: gba}, lookahead: null}\n")
    switching = load(path, ["switching.switch_at.20=hop_bw", "switching.patience=3"]).switching
    assert switching is not None
    callback = switching.callback()
    assert (callback.mode, callback.switch_at, callback.options.patience) == ("auto", {20: "hop_bw", 100: "gba"}, 3)
    assert callback.discipline("gba").lookahead is None
    assert load(path, ["switching.lookahead=2"]).switching.callback().discipline("gba").lookahead == 2  # type: ignore[union-attr]


def test_a_section_with_nothing_but_a_mode_has_the_defaults_of_the_callback(tmp_path: Path) -> None:
    switching = load(file_with(tmp_path, "switching: {mode: auto}")).switching
    assert switching is not None
    ours, default = switching.callback(), GBACallback()
    assert (ours.describe(), ours.options) == (default.describe(), default.options)


def test_a_rule_is_part_of_the_switching(tmp_path: Path) -> None:
    path = file_with(tmp_path, "switching: {mode: async, rule: dana_zero}\n")
    for overrides, rule in (([], "dana_zero"), (["switching.rule=gap_aware"], "gap_aware")):
        switching = load(path, overrides).switching
        assert switching is not None
        assert switching.callback().rule == rule


def test_a_job_that_says_nothing_compresses_nothing(tmp_path: Path) -> None:
    config = load(file_with(tmp_path, "name: test"))
    assert config.compression.spec().is_none
    assert config.row_compression.spec().is_none


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("int8", Compression.int8),
        ("{name: bf16}", Compression.bf16),
        ("topk", Compression.topk()),
        ("{name: topk, keep: 1e-3}", Compression.topk(keep=0.001)),
    ],
)
@pytest.mark.parametrize("what", ["compression", "row_compression"])
def test_compressors_are_read_from_the_file_and_the_command_line(
    tmp_path: Path, what: str, text: str, spec: Spec
) -> None:
    given = load(file_with(tmp_path, f"{what}: {text}\n")), load(file_with(tmp_path, ""), [f"{what}={text}"])
    for config in given:
        assert getattr(config, what).spec() == spec


@pytest.mark.parametrize(
    ("what", "name"), [("compression", "dct"), ("row_compression", "ternary_ef"), ("row_compression", "dct_mp")]
)
def test_thresholds_are_set_in_the_file_in_the_paper_s_letters_or_ours(tmp_path: Path, what: str, name: str) -> None:
    rule = getattr(Compression, name)
    for text, spec in (
        (name, rule()),
        (f"{{name: {name}, keep: 0.02, refresh_every: 50, values: int8}}", rule(0.02, 50).then(Compression.int8)),
        (f"{{name: {name}, eta: 0.99, refresh_every: 50, drift: .inf}}", rule(0.01, 50, drift=math.inf)),
        (f"{{name: {name}, drift: 1.25}}", rule(drift=1.25)),
    ):
        assert getattr(load(file_with(tmp_path, f"{what}: {text}\n")), what).spec() == spec


def test_a_threshold_of_each_table_is_set_in_the_file(tmp_path: Path) -> None:
    config = load(file_with(tmp_path, "row_compression: {name: dct_mp, per_table: true}\n"))
    assert config.row_compression.spec() == Compression.dct_mp(per_table=True)


def test_a_job_without_the_section_is_never_saved(tmp_path: Path) -> None:
    assert load(file_with(tmp_path, "name: test")).checkpoint is None
    assert load(file_with(tmp_path, "checkpoint:")).checkpoint is None


def test_checkpoints_are_read_from_the_file_and_the_command_line(tmp_path: Path) -> None:
    path = file_with(tmp_path, "checkpoint: {url: s3://bucket/job, every_s: 60, policy: mfu, row_fraction: 0.25}\n")
    checkpoint = load(path, ["checkpoint.every_steps=20", "checkpoint.resume=false", "checkpoint.bits=8"]).checkpoint
    assert checkpoint is not None
    callback = checkpoint.callback()
    assert (callback.url, callback.every_s, callback.every_steps) == ("s3://bucket/job", 60.0, 20)
    assert (callback.resume, callback.takeover) == (False, False)
    assert (callback.config.policy, callback.config.row_fraction, callback.config.bits) == ("mfu", 0.25, 8)


def test_a_section_with_nothing_but_a_place_has_the_defaults_of_the_callback(tmp_path: Path) -> None:
    checkpoint = load(file_with(tmp_path, "checkpoint: {url: folder}")).checkpoint
    assert checkpoint is not None
    ours, default = checkpoint.callback(), CheckpointCallback("folder")
    assert (ours.url, ours.config, ours.storage_options) == (default.url, default.config, default.storage_options)
    assert ours.final_checkpoint_s == default.final_checkpoint_s
    assert (ours.every_s, ours.every_steps, ours.resume) == (default.every_s, default.every_steps, default.resume)


def test_the_list_of_settings_is_a_file_of_the_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--settings"])
    assert ended.value.code == 0
    listed = capsys.readouterr().out
    assert load(file_with(tmp_path, listed)) == JobConfig(name="job")
    optional = "\n".join(line[2:] for line in listed.splitlines() if re.match(r"# +\w+:( |$)", line))
    config = load(file_with(tmp_path, optional), ["checkpoint.url=folder", "name=job"])
    sections = {"switching": Switching(), "checkpoint": Checkpoint(url="folder"), "log_model": LoggedModel()}
    assert config == JobConfig(name="job", **sections)


def every_setting(section: type, where: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    for one in dataclasses.fields(section):
        kind = get_type_hints(section)[one.name]
        yield where + one.name, one
        for inner in (kind, *get_args(kind)):
            if dataclasses.is_dataclass(inner) and isinstance(inner, type):
                yield from every_setting(inner, f"{where}{one.name}.")


def test_every_setting_is_listed_and_what_switches_it_off_is_taken(tmp_path: Path) -> None:
    listed, off = settings_list(), {}
    for place, one in every_setting(JobConfig):
        assert re.search(rf"^[# ]*{one.name}:", listed, re.MULTILINE), place
        if (value := one.metadata.get("off")) is not None:
            off[place] = value
    assert {"train.early_stop", "train.plateau_factor", "train.max_norm", "switching", "checkpoint.every_s"} <= set(off)
    for place, value in off.items():
        load(
            file_with(tmp_path, "checkpoint: {url: c}" if place.startswith("checkpoint.") else ""), [f"{place}={value}"]
        )


def test_a_plateau_factor_of_0_keeps_learning_rates_as_they_are(tmp_path: Path) -> None:
    config = load(file_with(tmp_path, "data: {preset: synthetic}"), ["train.plateau_factor=0"])
    assert "constant learning rates; stop after 2 epochs without gain" in plan(config, None, ())
