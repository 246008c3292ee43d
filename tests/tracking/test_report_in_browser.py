"""The report and MLflow's page of a run, as a person sees them: in a real browser, light and dark, wide and narrow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import nn

import gba_hvd
from gba_hvd.callbacks import Event
from gba_hvd.tracking import MLflowCallback
from gba_hvd.tracking.report.page import page
from gba_hvd.tracking.run_history import from_files
from gba_hvd.tracking.spool_delivery import SpoolDelivery
from tests.browser import Browser, missing
from tests.tracking.conftest import FLUSH_S, Server, artifact_names, client, only_run, runs, wait_until
from tests.tracking.reported_job import report_job
from tests.unit.conftest import _no_keeper as _no_keeper
from tests.unit.serving.conftest import CODE, batch
from tests.unit.serving.conftest import job_memory as job_memory
from tests.unit.serving.conftest import trained as trained

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=missing() or "a browser is here"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
PHONE, WINDOW = 375, 1200
CONFIG = {"model": {"kind": "deepfm", "hidden": [64, 32]}, "data": {"dir": "clicks"}}
DATA = {"train": {"kind": "click log", "samples": 1_228_800}, "valid": {"kind": "click log", "samples": 60_000}}

# The contrast of each text with its ground (WCAG 2.1), where it is less than 4.5.
LOW_CONTRAST = """(() => {
  const light = c => { const v = c.match(/[\\d.]+/g).slice(0, 3).map(x => x / 255)
      .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
      return 0.2126*v[0] + 0.7152*v[1] + 0.0722*v[2] }
  const ground = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor
      if (!/, 0\\)$/.test(c)) return c } return 'rgb(255,255,255)' }
  const texts = [...document.querySelectorAll('body *')].filter(e => [...e.childNodes].some(
      n => n.nodeType == 3 && n.data.trim()))
  return texts.map(e => { const a = light(getComputedStyle(e).color), b = light(ground(e))
      return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.tagName, e.textContent.slice(0, 40)] })
      .filter(x => x[0] < 4.5) })()"""
OPEN_ALL = "document.querySelectorAll('details').forEach(one => one.open = true)"
TOO_WIDE = """[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1
    || e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX != 'visible')
    .map(e => e.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as one:
        yield one


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a job with a failure, switches, checkpoints, a warning and a logged model."""
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(SpoolDelivery, "look", lambda self, is_chief: None)
        callback = MLflowCallback(
            spool_dir=folder / "spool", log_every_steps=5, system_metrics=False, run_name="clicks of a day",
            config=CONFIG, data=DATA,
        )  # fmt: skip
        report_job([callback])
    callback.on_event(Event("checkpoint_failed", 400, "the store does not answer: name another", level="warning"))
    logged = {"model_uri": "models:/m-1f2e", "name": "ctr", "version": "3"}
    callback.on_event(Event("model_logged", 400, "the model is logged", logged))
    assert callback.spool is not None
    file = folder / "report.html"
    file.write_text(page(from_files(callback.spool)))
    return file


@pytest.mark.parametrize("width", [WINDOW, PHONE])
@pytest.mark.parametrize("dark", [False, True])
def test_a_report_opens_without_an_error_and_fits_the_window(
    browser: Browser, report: Path, width: int, dark: bool
) -> None:
    browser.look(width, dark=dark)
    browser.open(report.as_uri())
    browser.run(OPEN_ALL)
    assert browser.errors == []
    pictures = browser.run("[...document.images].map(one => [one.complete, one.naturalWidth, one.alt.length])")
    assert len(pictures) == 5
    assert all(complete and wide and words for complete, wide, words in pictures)
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert browser.run(TOO_WIDE) == []
    assert browser.run(LOW_CONTRAST) == []
    ground = browser.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (max(ground) < 60) if dark else (min(ground) > 200)


BROKEN = """[...document.querySelectorAll('td')].flatMap(cell => {
  const found = [], walk = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT)
  for (let node; (node = walk.nextNode());)
    for (const word of node.data.matchAll(/[^\\s\\-/]+/g)) {
      const range = document.createRange()
      range.setStart(node, word.index); range.setEnd(node, word.index + word[0].length)
      const lines = new Set([...range.getClientRects()].map(one => Math.round(one.top)))
      if (lines.size > 1 && word[0].length <= 40) found.push(word[0])
    }
  return found })"""


def test_no_word_of_a_table_is_broken_in_a_small_window(browser: Browser, report: Path) -> None:
    browser.look(1100)
    browser.open(report.as_uri())
    browser.run(OPEN_ALL)
    assert browser.run("document.querySelectorAll('td').length") > 50
    assert browser.run(BROKEN) == []
    assert browser.run(TOO_WIDE) == []


def test_pictures_are_drawn_for_a_window_and_for_a_phone(browser: Browser, report: Path) -> None:
    ratios = []
    for width in (WINDOW, PHONE):
        browser.look(width)
        browser.open(report.as_uri())
        ratios.append(browser.run("document.images[0].naturalWidth / document.images[0].naturalHeight"))
    assert ratios[0] > 1.5 * ratios[1]


def test_the_keyboard_reaches_and_opens_what_is_folded(browser: Browser, report: Path) -> None:
    browser.look()
    browser.open(report.as_uri())
    n = browser.run("document.querySelectorAll('summary').length")
    reached = set()
    for _ in range(n):
        browser.press("Tab", 9)
        reached.add(browser.run("document.activeElement.textContent"))
        assert browser.run("document.activeElement.tagName") == "SUMMARY"
        assert browser.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        assert browser.run("parseFloat(getComputedStyle(document.activeElement).outlineWidth)") >= 2
    assert len(reached) == n > 5
    assert not browser.run("document.activeElement.parentElement.open")
    browser.press("Enter", 13)
    assert browser.run("document.activeElement.parentElement.open")


def test_what_stands_out_does_so_without_colour(browser: Browser, report: Path) -> None:
    browser.look()
    browser.open(report.as_uri())
    for selector, sign in ((".badge.good", "\u2713"), ("dl .bad dd", "\u26a0"), ("dl .good dd", "\u2713")):
        assert sign in browser.run(f"getComputedStyle(document.querySelector('{selector}'), '::before').content")


def test_the_page_of_a_run_in_mlflow_has_the_whole_story(
    browser: Browser, trained: Callable[..., nn.Module], server: Server, tmp_path: Path
) -> None:
    callback = MLflowCallback(
        tracking_uri=server.uri, spool_dir=tmp_path / "spool", log_every_steps=20, system_metrics=False,
        flush_timeout_s=FLUSH_S, run_name="a day of clicks", config=CONFIG, data=DATA,
        log_model=gba_hvd.LogModel(name="ctr", input_example=batch(3), build=CODE, registered_model_name="shown"),
    )  # fmt: skip
    callback.on_model(trained())
    report_job([callback], job_id="shown")
    callback.on_end("FINISHED", None)
    run = only_run(server.uri, "shown")
    assert {"report.html", "learning_curves.png", "events.jsonl", "data.json"} <= artifact_names(server.uri, run)
    assert [one.dataset.name for one in run.inputs.dataset_inputs] == ["train", "valid"]
    address = f"{server.uri}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"

    browser.look(1600, 1400)
    browser.open(address)
    for words in ("a day of clicks", "The best valid_auc", "The whole report", "What to do next", r"shown\s+v1"):
        browser.wait_for(f"/{words}/.test(document.body.innerText)")
    link = browser.run("[...document.links].find(one => one.textContent == 'The whole report').href")
    browser.open("about:blank")
    browser.open(link)
    browser.wait_for("!!document.querySelector('iframe')")
    text = browser.wait_for("document.readyState == 'complete' && document.body?.innerText", in_frame=True)
    for words in ("deepfm", "shown, version 1", "worker 2 takes 6.1x the median", "Recoveries", "0.00250", "1,228,800"):
        assert words in text
    assert browser.run_in_frame("[...document.images].every(one => one.complete && one.naturalWidth > 0)")


def test_a_description_of_a_person_stays(server: Server, tmp_path: Path) -> None:
    callback = MLflowCallback(
        tracking_uri=server.uri, spool_dir=tmp_path / "spool", system_metrics=False, flush_timeout_s=FLUSH_S
    )
    report_job([callback], n_steps=40, job_id="noted")
    (found,) = wait_until("the run is there", lambda: runs(server.uri, "noted"))
    client(server.uri).set_tag(found.info.run_id, "mlflow.note.content", "my own words")
    callback.on_end("FINISHED", None)
    run = only_run(server.uri, "noted")
    assert "report.html" in artifact_names(server.uri, run)
    assert run.data.tags["mlflow.note.content"] == "my own words"
