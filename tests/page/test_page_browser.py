"""The page in a real browser: what it draws, how it behaves, and that it asks for nothing."""

import json

import pytest
from page_kit import HOSTILE, browse, browser_is_here, log_rows, train

import holdfast as hf
from holdfast.page import collect, render
from holdfast.storage import resolve

pytestmark = [pytest.mark.frameworks, browser_is_here]
NAMES = "[...document.querySelectorAll('#checkpoints tbody tr td:first-child')].map(one => one.textContent)"
CHARTS = "[...document.querySelectorAll('.draw')]"
DRAWN = f"{CHARTS}.filter(one => one.chart.drawn).length"
# Moves the pointer over the first chart until the tip holds a text; returns the text of the tip, or "".
HUNT = """(async (wanted) => {
  const canvas = document.querySelector('.draw canvas:last-child'), place = canvas.getBoundingClientRect();
  for (let x = place.right; x > place.left; x -= 2) for (let y = place.top; y < place.bottom; y += 6) {
    canvas.dispatchEvent(new PointerEvent('pointermove', {clientX: x, clientY: y, bubbles: true}));
    const tip = document.querySelector('.tip');
    if (!tip.hidden && tip.textContent.includes(wanted)) return tip.textContent;
  }
  return '';
})"""
SET = """((id, value, event) => {
  const one = document.getElementById(id); one.value = value; one.dispatchEvent(new Event(event)); })"""
FIRST = ".draw canvas:last-child"
X = "document.querySelector('.draw').chart"


def fine(told):
    assert told["errors"] == []
    assert told["requests"] == 0
    return told["values"]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of a run with two lives, ranked checkpoints and hostile names."""
    root = tmp_path_factory.mktemp("browser")
    keep = hf.Keep(last=2, best=2, metric="val", mode="min")
    metrics = {"val": lambda step: abs(step - 14) / 10, HOSTILE: lambda step: step}
    train(root / "gpt", 20, die_at=12, **metrics)
    train(root / "gpt", 20, keep=keep, **metrics)
    target = root / "run.html"
    target.write_text(render({**collect(resolve(root / "gpt")), "warnings": [HOSTILE]}))
    return target


def test_it_draws(page):
    """Curves, lives and the table are there; names that look like HTML are text; nothing is asked for."""
    drawn, rows, lives, hurt, warning, labels = fine(
        browse(
            page,
            ["wait", f"{DRAWN} >= 3"],
            ["eval", DRAWN],
            ["eval", NAMES],
            ["eval", "document.querySelectorAll('.lives .kept, .lives .lost').length"],
            ["eval", "String(window.hurt)"],
            ["eval", "document.querySelector('.warnings').textContent"],
            ["eval", "[...document.querySelectorAll('.draw')].every(one => one.getAttribute('aria-label'))"],
        )
    )
    assert drawn >= 3
    assert rows
    assert lives >= 3, "two lives, and what was lost of the first"
    assert hurt == "undefined"
    assert warning == HOSTILE
    assert labels


def test_hovering_tells_of_a_checkpoint(page):
    """A mark on a curve says name, step, size and why it is kept, as text."""
    facts = json.loads(page.read_text().split('type="application/json">')[1].split("</script>")[0])
    newest = facts["checkpoints"][0]["name"]
    tip, hurt = fine(
        browse(page, ["wait", f"{DRAWN} >= 1"], ["eval", f"{HUNT}('checkpoint')"], ["eval", "String(window.hurt)"])
    )
    assert newest in tip
    assert "size" in tip
    assert hurt == "undefined"


def test_deleted_checkpoints_stay_as_marks(page):
    """What retention deleted is still on the curves; hovering says when it went and by which rule."""
    facts = json.loads(page.read_text().split('type="application/json">')[1].split("</script>")[0])
    gone = [row for row in facts["checkpoints"] if row["state"] == "deleted"]
    assert gone
    assert all(row["why"] == "not among last 2, best 2 by val" and row["deleted"] for row in gone)
    (tip,) = fine(browse(page, ["wait", f"{DRAWN} >= 1"], ["eval", f"{HUNT}('not among last 2')"]))
    assert "deleted 20" in tip
    assert any(row["name"] in tip for row in gone)


def test_what_saving_took(page):
    """Two charts of seconds and bytes, with the figures in words; what went is listed by rule; lineage is drawn."""
    drawn, labels, said, branches, cards = fine(
        browse(
            page,
            ["scroll", 900],
            ["wait", "[...document.querySelectorAll('#saving .draw')].every(one => one.chart.drawn)"],
            ["eval", "document.querySelectorAll('#saving .draw').length"],
            ["eval", "[...document.querySelectorAll('#saving .draw')].map(one => one.getAttribute('aria-label'))"],
            ["eval", "document.querySelector('#saving .said').textContent"],
            ["eval", "document.querySelectorAll('.lives .branch').length"],
            ["eval", "[...document.querySelectorAll('.card dt')].map(one => one.textContent)"],
        )
    )
    assert drawn == 2
    assert "training held" in labels[0]
    assert "written" in labels[1]
    assert "deleted: not among last 2, best 2 by val" in said
    assert branches == 1, "the second life went on from the first"
    assert {"Newest checkpoint", "Starts", "Lost to saving", "On disk"} <= set(cards)


def test_sorting_filtering_and_what_a_reload_keeps(page):
    """A click sorts, another one turns it; the filter narrows; a reload keeps both, and the place on the page."""
    by_step = "#checkpoints thead th:nth-child(3) button"
    step = NAMES.replace("first-child", "nth-child(3)")
    aria = "document.querySelector('#checkpoints thead th:nth-child(3)').getAttribute('aria-sort')"
    down, sorted_, up, more, few, again, sort_again = fine(
        browse(
            page,
            ["click", by_step],
            ["eval", step],
            ["eval", aria],
            ["click", by_step],
            ["eval", step],
            ["click", "#checkpoints-deleted"],
            ["eval", f"({NAMES}).length"],
            ["fill", "#checkpoints input[type=search]", "newest"],
            ["eval", NAMES],
            ["reload"],
            ["eval", NAMES],
            ["eval", aria],
        )
    )
    assert [int(one) for one in down] == sorted(map(int, down), reverse=True)
    assert sorted_ == "descending"
    assert up == down[::-1]
    assert more > len(down)
    assert len(few) == 1
    assert again == few
    assert sort_again == "ascending"


def test_keys_are_enough(page):
    """From the top the Tab key reaches the link to the table, the switches and the heads of the table."""
    where = "document.activeElement.className || document.activeElement.id || document.activeElement.textContent"
    steps = [step for _ in range(40) for step in (["key", "Tab"], ["eval", where])]
    seen = fine(browse(page, *steps))
    assert seen[0] == "skip"
    assert {"axis", "smooth", "log", "draw", "step", "checkpoint", "link"} <= set(seen)


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_small_and_dark(page, width, scheme):
    """No sideways scrolling on a phone, and readable contrast of text in both schemes."""
    measure = """(() => {
      const linear = (value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
      const luminance = (colour) => {
        const [red, green, blue] = colour.match(/[0-9.]+/g).slice(0, 3).map((value) => linear(value / 255));
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
      };
      const back = luminance(getComputedStyle(document.body).backgroundColor);
      return ['body', '.soft', 'th button', '.state'].map((one) => {
        const front = luminance(getComputedStyle(document.querySelector(one)).color);
        return (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
      });
    })()"""
    overflow, contrast = fine(
        browse(
            page,
            ["eval", "document.documentElement.scrollWidth - innerWidth"],
            ["eval", measure],
            width=width,
            scheme=scheme,
        )
    )
    assert overflow <= 0
    assert min(contrast) >= 4.5, "WCAG AA"


def test_ten_thousand_checkpoints(tmp_path):
    """A long run: the table answers at once, and the rest of it is one click away."""
    storage = resolve(tmp_path / "run")
    rows = ({"step": n, "metrics": {"loss": 1 / (n + 1)}, "checkpoint": f"step_{n:08d}"} for n in range(10_000))
    log_rows(storage, rows)
    facts = collect(storage)
    for row in facts["checkpoints"]:
        row["state"] = "ok"  # ten thousand real ones take minutes to save
    (tmp_path / "run.html").write_text(render(facts))
    told = browse(
        tmp_path / "run.html",
        ["eval", f"({NAMES}).length"],
        ["click", "#checkpoints .more"],
        ["eval", f"({NAMES}).length"],
        ["fill", "#checkpoints input[type=search]", "step_00009876"],
        ["eval", NAMES],
    )
    first, second, found = fine(told)
    assert first == 50
    assert second == 250
    assert found == ["step_00009876"]
    print(f"interactive after {told['ms']} ms")


def test_a_live_page_loads_itself_again(tmp_path):
    """While the run lives the page reloads, and shows what was written meanwhile."""
    train(tmp_path / "run", 6)
    facts = {**collect(resolve(tmp_path / "run")), "live": True}
    target = tmp_path / "run.html"
    target.write_text(render(facts, reload_s=1))
    first, second = fine(
        browse(
            target,
            ["eval", "(sessionStorage.setItem('first', performance.timeOrigin), performance.timeOrigin)"],
            ["wait", "performance.timeOrigin > Number(sessionStorage.getItem('first'))"],
            ["eval", "performance.timeOrigin"],
        )
    )
    assert second > first


def test_a_folder_of_runs(tmp_path):
    """Runs are compared: a row each, and one chart for each metric with a curve for each run."""
    for name in ("one", "two"):
        train(tmp_path / name, 6)
    (tmp_path / "all.html").write_text(render(collect(resolve(tmp_path))))
    names = NAMES.replace("first-child", "nth-child(2)")
    lines = f"{X}.lines().map(one => one.name)"
    order = "document.getElementById('checkpoints').compareDocumentPosition(document.getElementById('metrics')) & 4"
    rows, drawn, table_first, both, one, after = fine(
        browse(
            tmp_path / "all.html",
            ["wait", f"{DRAWN} >= 1"],
            ["eval", names],
            ["eval", DRAWN],
            ["eval", order],
            ["eval", lines],
            ["click", "#checkpoints tbody tr:first-child input[type=checkbox]"],
            ["eval", lines],
            ["reload"],
            ["eval", lines],
        )
    )
    assert rows == ["one", "two"]
    assert drawn == 1
    assert table_first
    assert both == ["one", "two"]
    assert one == after == ["two"], "what is not ticked is not drawn, after a reload neither"


def many(tmp_path, metrics=6, steps=60):
    """A page with several charts."""
    train(tmp_path / "many", steps, **{f"m{at}": lambda step, at=at: step * at for at in range(metrics)})
    target = tmp_path / "many.html"
    target.write_text(render(collect(resolve(tmp_path / "many"))))
    return target


def test_the_wheel_scrolls_and_with_ctrl_zooms(tmp_path):
    """Over one of seven charts the wheel scrolls the page; with Ctrl it zooms all charts, and the page stays alive."""
    alive = "new Promise(done => setTimeout(() => requestAnimationFrame(() => done(true)), 200))"
    domains = f"{CHARTS}.filter(one => one.chart.drawn).map(one => [one.chart.from, one.chart.to])"
    scrolled, before, alive1, zoomed, alive2, wide = fine(
        browse(
            many(tmp_path),
            ["wait", f"{DRAWN} >= 6"],
            ["wheel", FIRST, 120, False],
            ["wait", "scrollY > 0"],
            ["eval", "scrollY"],
            ["eval", domains],
            ["wheel", FIRST, -240, True],
            ["wheel", FIRST, -240, True],
            ["eval", alive],
            ["eval", domains],
            *[["wheel", FIRST, 240, True] for _ in range(6)],
            ["eval", alive],
            ["eval", domains],
        )
    )
    assert scrolled > 0
    assert alive1
    assert alive2
    assert all(one == [0, 60] for one in before)
    assert all(low > 0 and high < 60 and high - low < 50 for low, high in zoomed)
    assert len({tuple(one) for one in zoomed}) == 1, "all charts show the same steps"
    assert wide == before


def test_dragging_selects_steps(tmp_path):
    """A drag over a chart selects its steps in all charts, a reload keeps that, and a double click shows all again."""
    domain = f"[{X}.from, {X}.to]"
    zoomed, kept, whole, _, switched = fine(
        browse(
            many(tmp_path, 2),
            ["wait", f"{DRAWN} >= 2"],
            ["drag", FIRST, 120, 220],
            ["wait", f"{X}.to < 50"],
            ["eval", domain],
            ["reload"],
            ["wait", f"{DRAWN} >= 2"],
            ["eval", domain],
            ["click", "#reset"],
            ["wait", f"{X}.to === 60"],
            ["eval", domain],
            [
                "eval",
                f"{SET}('axis', 'time', 'change')",
            ],
            ["wait", f"{X}.to !== 60"],
            ["eval", f"{X}.view.xText({X}.to)"],
        )
    )
    assert zoomed[0] > 0
    assert zoomed[1] < 50
    assert kept == zoomed
    assert whole == [0, 60]
    assert switched.endswith(" in")


def test_the_crosshair_gives_step_value_and_time(tmp_path):
    """Under the pointer stand the step, the value of the curve there and the time; other charts show theirs as well."""
    at = """(() => { const chart = document.querySelector('.draw').chart, place = chart.top.getBoundingClientRect();
      const there = {clientX: place.left + chart.toX(33), clientY: place.top + 1, bubbles: true};
      chart.top.dispatchEvent(new PointerEvent('pointermove', there));
      const texts = () => [...document.querySelectorAll('.tip, .readout')].map(one => one.textContent);
      return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(texts()))));
    })()"""
    smooth = f"{SET}('smooth', 0.9, 'input')"
    (loss, *others, tip), _, (*_, smoothed_tip) = fine(
        browse(many(tmp_path, 3), ["wait", f"{DRAWN} >= 4"], ["eval", at], ["eval", smooth], ["eval", at])
    )
    assert "step33" in tip
    assert "UTC" in tip
    assert loss == str(float(f"{1 / 34:.5g}"))
    assert others[:3] == ["0", "33", "66"]
    assert "smoothed" in smoothed_tip


def test_a_checkpoint_opens(page):
    """A click on a name shows items, parent, whether it was checked, and lines to copy; Escape closes it."""
    dialog = "document.querySelector('dialog')"
    text, codes, found, closed, hurt = fine(
        browse(
            page,
            ["click", "#checkpoints tbody tr:first-child .link"],
            ["eval", f"{dialog}.textContent"],
            ["eval", "[...document.querySelectorAll('dialog code')].map(one => one.textContent)"],
            ["axe"],
            ["key", "Escape"],
            ["eval", f"{dialog}.open"],
            ["eval", "String(window.hurt)"],
        )
    )
    assert "float32" in text
    assert "parent" in text
    assert "manifest and sizes of all files are right" in text
    assert codes[0].startswith('state = holdfast.load("/')
    assert "resume=" in codes[1]
    assert not serious(found)
    assert not closed
    assert hurt == "undefined"


def serious(found):
    return [one for one in found if one[0] in ("critical", "serious")]


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (390, "light"), (1400, "light"), (1400, "dark")])
def test_axe(page, width, scheme):
    """axe-core finds nothing critical and nothing serious, and no text is smaller than 9 pixels."""
    small = """Math.min(...[...document.querySelectorAll('body *')]
      .filter(one => one.textContent.trim() && !['SCRIPT', 'STYLE'].includes(one.tagName))
      .map(one => parseFloat(getComputedStyle(one).fontSize)))"""
    top = "document.querySelector('{}').getBoundingClientRect().top"
    curves = f"{top.format('#metrics')} < {top.format('.cards')}"
    found, size, curves_first = fine(
        browse(page, ["wait", f"{DRAWN} >= 1"], ["axe"], ["eval", small], ["eval", curves], width=width, scheme=scheme)
    )
    assert not serious(found)
    assert size >= 9
    assert curves_first is (width == 390)


def test_metrics_are_grouped(tmp_path):
    """Of 76 metrics the ranking one and the losses are open, the rest in closed groups; each can be found and drawn."""
    names = [*(f"grad/layer.{at}" for at in range(40)), *(f"x{at}" for at in range(32)), "aux_loss", "zz"]
    keep = hf.Keep(best=1, metric="zz", mode="min")
    train(tmp_path / "wide", 6, keep=keep, **{name: lambda step: step for name in names})
    (tmp_path / "wide.html").write_text(render(collect(resolve(tmp_path / "wide"))))
    shown = """[...document.querySelectorAll('#metrics .chart')]
      .filter(one => !one.closest('details:not([open])') && !one.hidden)
      .map(one => one.querySelector('h3').textContent)"""
    first, every, groups, found = fine(
        browse(
            tmp_path / "wide.html",
            ["eval", shown],
            ["eval", "document.querySelectorAll('#metrics .chart').length"],
            ["eval", "[...document.querySelectorAll('#metrics summary')].map(one => one.textContent)"],
            ["fill", "#metric-filter", "layer.17"],
            ["wait", "[...document.querySelectorAll('.draw')].some(one => one.chart.drawn && one.closest('details'))"],
            ["eval", shown],
        )
    )
    assert first == ["zz", "aux_loss", "loss"]
    assert every == 75
    assert groups == ["grad 40 metrics", "other metrics 32 metrics"]
    assert found == ["grad/layer.17"]


def test_a_long_run_is_drawn_at_once(tmp_path):
    """10 000 values and 300 checkpoints: the charts are drawn at once, counted from the start of the script."""
    storage = resolve(tmp_path / "run")
    row = {f"m{at}": 1.5 for at in range(5)}
    rows = (
        {
            "step": n,
            "time": 1e9 + n,
            "metrics": {"loss": 1 / (n + 1), **row},
            **({"checkpoint": f"step_{n:08d}"} if n % 33 == 0 else {}),
        }
        for n in range(10_000)
    )
    log_rows(storage, rows)
    facts = collect(storage)
    assert len(facts["checkpoints"]) == 304
    (tmp_path / "run.html").write_text(render(facts))
    at = "performance.getEntriesByName('holdfast-{}')[0].startTime"
    spent = f"{at.format('drawn')} - {at.format('begun')}"
    (ms,) = fine(
        browse(
            tmp_path / "run.html", ["wait", "performance.getEntriesByName('holdfast-drawn').length"], ["eval", spent]
        )
    )
    print(f"drawn after {ms:.0f} ms")
    assert ms < 5000, "a quarter of a second where nothing else runs"
