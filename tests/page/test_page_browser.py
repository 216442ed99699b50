"""The page in a real browser: what it draws, how it behaves, and that it asks for nothing."""

import json
import shutil

import pytest
from page_kit import HOSTILE, STORES, browse, train

import holdfast as hf
from holdfast.page.document import render
from holdfast.page.facts import collect
from holdfast.run.index import Attempt
from holdfast.run.reports import ReportLog
from holdfast.storage import resolve

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.skipif(
        shutil.which("node") is None or not (STORES / "@sparticuz").exists(), reason="make test-frameworks installs it"
    ),
]
NAMES = "[...document.querySelectorAll('#checkpoints tbody tr td:first-child')].map(one => one.textContent)"
DRAWN = "document.querySelectorAll('.draw canvas').length"


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
            ["eval", "document.querySelectorAll('svg.lives rect').length"],
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
    # The newest checkpoint is at the right end of the first chart; where exactly, the chart knows.
    find = """(async () => {
      const canvas = document.querySelector('.draw canvas'), place = canvas.getBoundingClientRect();
      for (let x = place.right - 60; x < place.right; x += 2) for (let y = place.top; y < place.bottom; y += 3) {
        for (const Kind of [PointerEvent, MouseEvent]) {
          const name = Kind === PointerEvent ? 'pointermove' : 'mousemove';
          canvas.dispatchEvent(new Kind(name, {clientX: x, clientY: y, bubbles: true}));
        }
        const tip = document.querySelector('#vg-tooltip-element.visible');
        if (tip && tip.textContent.includes('checkpoint')) return tip.textContent;
      }
      return '';
    })()"""
    tip, hurt = fine(browse(page, ["wait", f"{DRAWN} >= 1"], ["eval", find], ["eval", "String(window.hurt)"]))
    assert newest in tip or any(row["name"] in tip for row in facts["checkpoints"])
    assert "size" in tip
    assert hurt == "undefined"


def test_deleted_checkpoints_stay_as_marks(page):
    """What retention deleted is still on the curves; hovering says when it went and by which rule."""
    facts = json.loads(page.read_text().split('type="application/json">')[1].split("</script>")[0])
    gone = [row for row in facts["checkpoints"] if row["state"] == "deleted"]
    assert gone
    assert all(row["why"] == "not among last 2, best 2 by val" and row["deleted"] for row in gone)
    find = """(async () => {
      const canvas = document.querySelector('.draw canvas'), place = canvas.getBoundingClientRect();
      for (let x = place.left; x < place.right; x += 2) for (let y = place.top; y < place.bottom; y += 3) {
        for (const Kind of [PointerEvent, MouseEvent]) {
          const name = Kind === PointerEvent ? 'pointermove' : 'mousemove';
          canvas.dispatchEvent(new Kind(name, {clientX: x, clientY: y, bubbles: true}));
        }
        const tip = document.querySelector('#vg-tooltip-element.visible');
        if (tip && tip.textContent.includes('not among last 2')) return tip.textContent;
      }
      return '';
    })()"""
    (tip,) = fine(browse(page, ["wait", f"{DRAWN} >= 1"], ["eval", find]))
    assert "deleted 20" in tip
    assert any(row["name"] in tip for row in gone)


def test_what_saving_took(page):
    """Two charts of seconds and bytes, with the figures in words; what went is listed by rule; lineage is drawn."""
    drawn, labels, said, branches, cards = fine(
        browse(
            page,
            ["scroll", 900],
            ["wait", "document.querySelectorAll('#saving .draw canvas').length === 2"],
            ["eval", "document.querySelectorAll('#saving .draw canvas').length"],
            ["eval", "[...document.querySelectorAll('#saving .draw')].map(one => one.getAttribute('aria-label'))"],
            ["eval", "document.querySelector('#saving .said').textContent"],
            ["eval", "document.querySelectorAll('svg.lives .branch').length"],
            ["eval", "[...document.querySelectorAll('.card dt')].map(one => one.textContent)"],
        )
    )
    assert drawn == 2
    assert "training held" in labels[0]
    assert "written" in labels[1]
    assert "deleted: not among last 2, best 2 by val" in said
    assert branches == 1, "the second life went on from the first"
    assert {"Saves", "Lost to saving", "Written"} <= set(cards)


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
    steps = [step for _ in range(30) for step in (["key", "Tab"], ["eval", where])]
    seen = fine(browse(page, *steps))
    assert seen[0] == "skip"
    assert {"log", "step", "checkpoint"} <= set(seen)


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
    log = ReportLog(storage, Attempt(attempt=1, start_id="aaaaaaaa"), "f" * 16)
    log.write({"step": n, "metrics": {"loss": 1 / (n + 1)}, "checkpoint": f"step_{n:08d}"} for n in range(10_000))
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
    assert first == 200
    assert second == 1000
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
    rows, drawn = fine(browse(tmp_path / "all.html", ["wait", f"{DRAWN} >= 1"], ["eval", NAMES], ["eval", DRAWN]))
    assert rows == ["one", "two"]
    assert drawn == 1
