"""The page of a dump in a real browser: it renders, folds, searches, shows a near miss, and keys are enough."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from portable_ops.inductor_ext import page as pages
from portable_ops.inductor_ext.record import Row

pytest.importorskip("jinja2")
pytest.importorskip("grandalf")


# ------------------------------------------------------------------------------------------------- without a browser


def row(name: str, *arguments: str, path: str = "", target: str = "aten.mul.Tensor") -> Row:
    return Row(name, target, arguments, "f32[2]", path, "", "a.py:1: x", {})


def test_nodes_without_a_module_go_with_those_that_they_serve() -> None:
    rows = [row("w", target="placeholder"), row("a", "w"), row("b", "a", path="m.0"), row("c", "b")]
    assert pages.paths(rows) == {"w": "m.0", "a": "m.0", "b": "m.0", "c": "m.0"}


@pytest.mark.parametrize(
    ("path", "block"),
    [
        ("model.layers.3.mlp.up", "model.layers.3"),
        ("model.norm", "model.norm"),
        ("encoder.stem.conv.bn", "encoder.stem"),
        ("", ""),
    ],
)
def test_what_is_folded_together(path: str, block: str) -> None:
    assert pages.block_of(path) == block


def test_a_box_that_nothing_leads_to_has_a_place() -> None:
    (a, b, c) = pages.layout((60, 60, 60), ((0, 1),), False)
    assert abs(c[0] - a[0]) >= 60 and abs(c[0] - b[0]) >= 60


def test_edges_lead_down_and_boxes_do_not_overlap() -> None:
    widths = (60, 80, 70, 60, 90)
    edges = ((0, 1), (0, 2), (1, 3), (2, 3), (4, 3))
    points = pages.layout(widths, edges, False)
    assert all(points[a][1] < points[b][1] for a, b in edges)
    for i, (x, y) in enumerate(points):
        for j, (u, v) in enumerate(points[:i]):
            assert abs(y - v) >= pages.HEIGHT or abs(x - u) >= (widths[i] + widths[j]) / 2


def test_a_page_needs_nothing_else(dumped: Path) -> None:
    text = (dumped / "index.html").read_text()
    assert not re.search(r"""(src|href)=["'](https?:)?//|@import|url\(["']?http""", text)
    outside = {url for url in re.findall(r"https?://[^\s\"'<)]+", text) if "www.w3.org" not in url}
    assert not outside


def test_text_of_the_users_cannot_end_the_script(tmp_path: Path) -> None:
    from portable_ops.inductor_ext import Report, Site

    source = "a.py:1: '</script><script>alert(1)</script>'"
    report = Report(sites=(Site("rms_norm", "rms_norm", "declined", "<b>why</b>", source),))
    text = report.save(tmp_path, model="<img src=x>").read_text()
    assert "<img" not in text and "alert(1)</script>" not in text
    assert text.count("</script>") == 2


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from portable_ops.inductor_ext import Report

    monkeypatch.setattr(pages.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(pages.MissingExtra, match=r"portable_ops\[dump\]"):
        Report().save(tmp_path)


# ------------------------------------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs a Chromium browser (apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Any, dumped: Path) -> Iterator[Any]:
    opened = browser.new_page(viewport={"width": 1400, "height": 900})
    errors: list[str] = []
    requests: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("request", lambda request: requests.append(request.url))
    opened.goto((dumped / "index.html").as_uri())
    yield opened
    assert not errors
    assert len(requests) == 1, requests
    opened.close()


def test_summary_and_tables(page: Any) -> None:
    summary = page.locator("#summary").inner_text()
    for part in ("rms_norm\t4\t4", "attention\t3\t3", "f32[2, 8, 64]", "sm_90", "gate=always", "torch "):
        assert part in summary, part
    (missed,) = page.locator("#miss-table tbody tr").all()
    assert "rms_norm \u00d73" in missed.inner_text()
    assert "the mean is not over the last dimension alone" in missed.inner_text()
    assert ".mean(-1, keepdim=True)" in missed.inner_text() and "planted.py" in missed.inner_text()


def test_equal_layers_share_a_line_and_unfold(page: Any) -> None:
    lines = page.locator(".line")
    assert lines.count() == 2
    layers = lines.first
    assert "layers.0 … layers.2" in layers.inner_text() and "\u00d73" in layers.inner_text()
    assert page.locator("svg").count() == 0
    fold = layers.locator(".fold")
    assert fold.get_attribute("aria-expanded") == "false"
    fold.click()
    assert fold.get_attribute("aria-expanded") == "true"
    before, after = layers.locator("svg").all()
    assert before.locator(".node.rewritten").count() > after.locator(".node.rewritten").count() == 3
    assert before.locator(".hull").count() == 4
    assert after.locator("text", has_text="portable_ops.rms_norm").count() == 1
    fold.click()
    assert page.locator("svg").count() == 0


def test_a_click_on_a_match_shows_all_about_it(page: Any) -> None:
    page.locator(".fold").first.click()
    page.locator("svg").first.locator(".node.rewritten").first.click()
    details = page.locator("#details").inner_text()
    for part in (
        "rewritten",
        "portable_ops::rms_norm",
        "one_pass",
        "chosen because",
        "a row of 64 elements fits into the registers of one program",
        "eps",
        "1e-06",
        "hidden_size=64",
        "rsqrt",
        "gate=always",
        "layers.0.norm",
        "3 times",
        "planted.py",
        "repro DUMP --site",
    ):
        assert part in details, part


def test_a_near_miss_is_hatched_and_explained(page: Any) -> None:
    page.locator("#miss-table .link").first.click()
    details = page.locator("#details").inner_text()
    assert "the mean is not over the last dimension alone" in details and "to match" in details
    node = page.locator("svg .node.miss").first
    assert "url" in node.locator("rect").evaluate("rect => rect.style.fill")
    assert node.is_visible()
    # Not the anchor alone: from the squares to the root, before and after.
    chosen = [text.split("\n")[0] for text in page.locator("svg .node.chosen title").all_text_contents()]
    assert chosen == ["pow_2", "mean_1", "add_4", "rsqrt_1"] * 2


def test_search_finds_and_leads_there(page: Any) -> None:
    page.keyboard.press("/")
    page.keyboard.type("aten.rsqrt")
    # Before: one of either norm in a layer, and the last norm.  After: that of the near miss.
    assert page.locator("#found").inner_text() == "4 found"
    page.keyboard.press("Enter")
    assert "rsqrt" in page.locator("svg .node.hit").text_content()
    page.locator("#search").fill("nothing like this")
    assert page.locator("#found").inner_text() == "0 found"
    assert page.locator(".line:visible").count() == 0
    page.keyboard.press("Escape")
    assert page.locator(".line:visible").count() == 2


def test_zoom_and_pan_by_wheel_mouse_and_keys(page: Any) -> None:
    page.locator(".fold").first.click()
    svg = page.locator("svg").first

    def frame() -> list[float]:
        return [float(n) for n in svg.get_attribute("viewBox").split()]

    svg.focus()
    start = frame()
    page.keyboard.press("+")
    assert frame()[2] < start[2]
    page.keyboard.press("ArrowRight")
    assert frame()[0] > start[0]
    page.keyboard.press("0")
    assert frame() == pytest.approx(start)
    box = svg.bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 200)
    page.mouse.wheel(0, -300)
    zoomed = frame()
    assert zoomed[2] < start[2]
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 150)
    page.mouse.up()
    assert frame()[0] > zoomed[0] and frame()[1] > zoomed[1]


def test_modules_fold_inside_of_a_large_layer(browser: Any, tmp_path: Path) -> None:
    from portable_ops.inductor_ext import Report, Site
    from portable_ops.inductor_ext.record import Mark, Recording, Stage

    rows, marks = [row("x", target="placeholder")], []
    for layer in range(4):
        for i in range(90):
            path = f"layers.{layer}" + ("" if i < 10 else ".attention" if i < 50 else ".mlp")
            rows.append(row(f"n{layer}_{i}", rows[-1].name, path=path))
        # One site inside of the MLP, and one that begins in the attention and ends there.
        for start in (45, 70):
            nodes = tuple(f"n{layer}_{i}" for i in range(start, start + 9))
            marks.append(Mark(0, nodes[-1], nodes=nodes))
    recording = Recording([Stage(name, "", tuple(rows)) for name in ("joint", "rewritten")], marks)
    sites = tuple(Site("rms_norm", "rms_norm", "declined", "gate=never", "a.py:1: x") for _ in marks)
    recording.report = Report(sites=sites)
    path = Report(sites=sites, recordings=(recording,)).save(tmp_path)
    opened = browser.new_page()
    opened.goto(path.as_uri())
    names = opened.locator(".name:visible").all_inner_texts
    assert names() == ["layers.0 … layers.3"]
    opened.locator(".fold:visible").click()
    inner = ["layers.0.attention … layers.3.attention", "layers.0.mlp … layers.3.mlp"]
    assert names() == ["layers.0 … layers.3", *inner]
    assert opened.locator("svg").first.locator(".node:not(.outside)").count() == 90
    opened.reload()
    opened.keyboard.press("n")
    assert opened.locator("svg").count() == 2, "the site of two modules is shown in the layer"
    opened.keyboard.press("n")
    assert opened.locator("svg").count() == 4, "the site of one module is shown there"
    assert opened.locator(".inner .line svg").first.locator(".chosen").count() == 9
    assert "4 times: #1 layers.0.mlp" in opened.locator("#details").inner_text()
    opened.close()


def test_keys_are_enough(page: Any) -> None:
    page.locator(".fold").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("svg").count() == 2
    for key in ("Enter", "Space"):
        page.keyboard.press("Escape")
        page.locator("svg .node.marked").first.focus()
        page.keyboard.press(key)
        assert page.locator("#details").is_visible()
    page.keyboard.press("Escape")
    assert page.locator("#details").is_hidden()
    page.keyboard.press("m")
    assert "to match" in page.locator("#details").inner_text()
    page.keyboard.press("n")
    first = page.locator("#details h2").inner_text()
    page.keyboard.press("p")
    assert page.locator("#details h2").inner_text() != first


def test_kinds_are_told_apart_without_colour() -> None:
    # Okabe and Ito's colours; each box also carries its kind in words, and what became of it in its border.
    palette = {"#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999"}
    assert {*pages.COLOURS.values(), pages.OTHER_COLOUR} <= palette
    assert len({*pages.COLOURS.values(), pages.OTHER_COLOUR}) == len(pages.COLOURS) + 1


def test_a_large_model_stays_small_and_quick(browser: Any, tmp_path: Path) -> None:
    """Some 30000 nodes in 80 equal layers, as rows: a trace of such a model would take a minute."""
    from portable_ops.inductor_ext import Report, Site
    from portable_ops.inductor_ext.record import Mark, Recording, Stage

    rows, marks = [row("x", target="placeholder")], []
    for layer in range(80):
        for i in range(375):
            last = rows[-1].name
            skip = rows[-5].name if i % 7 == 0 and i > 5 else last
            rows.append(row(f"n{layer}_{i}", *{last: 0, skip: 0}, path=f"model.layers.{layer}.part{i // 50}"))
        marks += [Mark(0, f"n{layer}_{i}", nodes=tuple(f"n{layer}_{j}" for j in range(i, i + 8))) for i in (20, 90)]
    sites = tuple(Site("rms_norm", "rms_norm", "declined", "gate=never", "a.py:1: x") for _ in marks)
    stages = [Stage(name, "", tuple(rows)) for name in ("joint", "rewritten")]
    recording = Recording(stages, marks)
    recording.report = Report(sites=sites)
    path = Report(sites=sites, recordings=(recording,)).save(tmp_path)
    assert path.stat().st_size < 2_000_000
    opened = browser.new_page()
    opened.goto(path.as_uri())
    lines = opened.locator(".line:visible")
    assert lines.count() == 1 and "\u00d780" in lines.inner_text()
    paints = opened.evaluate("performance.getEntriesByType('paint').map(e => e.startTime)")
    assert max(paints, default=0) < 2000
    lines.locator(".fold").first.click()
    assert opened.locator("svg").first.locator(".node").count() >= 375
    opened.close()
